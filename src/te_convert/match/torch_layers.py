"""What torch's attention and transformer layers hold, in TE's terms; used by the rules that replace them as wholes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from te_convert.facts.activations import probe_activation
from te_convert.match.blocks import Block
from te_convert.match.fusion import Member
from te_convert.match.guards import BEFORE_PROBES, executed, te_dtype
from te_convert.match.layer_calls import is_idle_hook
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.weights.ops import Fill, Move, Rows, WeightMap, WeightOp

TE_ACTIVATIONS = {"gelu_tanh": "gelu", "relu": "relu", "silu": "silu", "qgelu": "qgelu", "srelu": "srelu"}
"""facts/activations.py's names → TE's."""
ATTENTION_CHILDREN = frozenset({"qkv", "query_layer", "key_value", "core_attention", "proj", "q_norm", "k_norm"})
"""Names that te.MultiheadAttention gives to its children."""
LAYER_CHILDREN = frozenset({"self_attention", "inter_attention", "layernorm_mlp", "layernorm"})
"""The same of te.TransformerLayer."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def attention_obstacles(module: Any) -> Iterator[Reason]:
    """Every reason against te.MultiheadAttention for one attention module."""
    if type(module).forward is not nn.MultiheadAttention.forward:
        yield reason(ReasonCode.BLOCK_FORM, f"its attention is a {type(module).__name__}")
        return
    if not module._qkv_same_embed_dim:
        yield reason(ReasonCode.ATTENTION_FORM, "keys or values have another width than queries")
    if module.bias_k is not None or module.add_zero_attn:
        yield reason(ReasonCode.ATTENTION_FORM, "it adds a learned or zero key (add_bias_kv, add_zero_attn)")
    if (module.in_proj_bias is None) != (module.out_proj.bias is None):
        yield reason(ReasonCode.ATTENTION_FORM, "only one of its projections has a bias")


def site_obstacles(block: Block) -> Iterator[Reason]:
    """Every reason of the usual guards against replacing a module of torch's."""
    for guard in (*BEFORE_PROBES, te_dtype, executed):
        found = guard(block.site)
        if found is not None and not found.is_advice:
            yield found


def has_hooks(module: nn.Module, collected: Mapping[str, Any] | None = None) -> bool:
    """Whether a module has hooks that would run now; ``collected`` is what Transformers' own are asked for."""
    hooks = [hook for name in _HOOKS for hook in module.__dict__[name].values()]
    return any(not is_idle_hook(hook, collected) for hook in hooks)


def part_obstacles(module: nn.Module, children: frozenset[str]) -> Iterator[Reason]:
    """Hooks, special parameters, own buffers and replaced forwards of a module that becomes one with ``children`` of TE's names."""
    hooked = [name for name, child in module.named_modules() if name and has_hooks(child)]
    if hooked:
        yield reason(ReasonCode.MODULE_HOOKS, f"hooks on {', '.join(hooked[:3])} would not run")
    patched = [name for name, child in module.named_modules() if "forward" in child.__dict__]
    if patched:
        yield reason(ReasonCode.BLOCK_FORM, f"the forward of {patched[0] or 'the module'} was replaced on the instance")
    parameters = list(module.parameters())
    if any(type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor for parameter in parameters):
        yield reason(ReasonCode.BLOCK_FORM, "a parameter is no plain tensor")
    if len({parameter.dtype for parameter in parameters}) > 1:
        yield reason(ReasonCode.BLOCK_FORM, "its parameters have different dtypes")
    if any(hasattr(child, "parametrizations") for child in module.modules()):
        yield reason(ReasonCode.BLOCK_FORM, "a weight in it is parametrised")
    if module._buffers:
        yield reason(ReasonCode.BLOCK_FORM, f"it has buffers of its own: {', '.join(module._buffers)}")
    clash = sorted(children & (module._modules.keys() | module.__dict__.keys()))
    if clash:
        yield reason(ReasonCode.BLOCK_FORM, f"it has something called {', '.join(clash)}, as the TE module has")


def weight_obstacles(block: Block, weights: WeightMap) -> Iterator[Reason]:
    """Parameters that the replacement has no place for, or lacks, and shared ones that it needs in another layout."""
    found = dict(block.site.module.named_parameters(remove_duplicate=False))
    others = [name for name in (*found, *weights.sources) if name not in weights.sources or name not in found]
    if others:
        yield reason(ReasonCode.BLOCK_FORM, f"it has not just the usual parameters: {', '.join(others[:3])}")
        return
    changed = {id(found[source]) for op in weights.ops if not isinstance(op, Move) for source in op.sources}
    holders = sum(id(parameter) in changed for module in block.modules.values() for parameter in module._parameters.values())
    if holders > len(changed):
        yield reason(ReasonCode.BLOCK_FORM, "a weight that TE needs in another layout is shared with another module")


def block_members(block: Block) -> tuple[Member, ...]:
    """The module itself and every module inside that has parameters."""
    prefix = f"{block.site.fqn}." if block.site.fqn else ""
    parts = [name for name, child in block.site.module.named_modules() if name and child._parameters]
    return (Member("owner", block.site.fqn), *(Member("part", prefix + name) for name in parts))


def sizes_of(*modules: Any) -> tuple[int, ...]:
    """Feature dimensions that a recipe has to take."""
    sizes: list[int] = []
    for module in modules:
        sizes += [module.embed_dim] if isinstance(module, nn.MultiheadAttention) else [module.in_features, module.out_features]
    return tuple(sizes)


def attention_ops(
    module: nn.MultiheadAttention, source: str, dest: str, projections: str | tuple[str, str]
) -> tuple[WeightOp, ...]:
    """An attention's projections; ``projections`` names TE's [q; k; v], or those of queries and of [k; v]."""
    packed_bias: torch.Tensor | None = module.in_proj_bias
    names = ("weight",) if packed_bias is None else ("weight", "bias")
    ops: list[WeightOp] = []
    for name in names:
        packed = f"{source}in_proj_{name}"
        if isinstance(projections, str):
            ops.append(Move(packed, f"{dest}{projections}.{name}"))
        else:
            query, key_value = projections
            size = module.embed_dim
            ops.append(Rows(packed, f"{dest}{query}.{name}", 0, size, 3 * size))
            ops.append(Rows(packed, f"{dest}{key_value}.{name}", size, 2 * size, 3 * size))
        ops.append(Move(f"{source}out_proj.{name}", f"{dest}proj.{name}"))
    return tuple(ops)


def layer_norm_ops(norm: nn.LayerNorm, source: str, dest: str) -> tuple[WeightOp, ...]:
    """Weight and bias of a LayerNorm under ``{dest}weight`` and ``{dest}bias``; a missing bias is a frozen zero."""
    width = int(norm.normalized_shape[0])
    offset: torch.Tensor | None = norm.bias
    bias = Fill(f"{dest}bias", 0.0, width) if offset is None else Move(f"{source}.bias", f"{dest}bias")
    return (Move(f"{source}.weight", f"{dest}weight"), bias)


def linear_ops(linear: nn.Linear, source: str, dest: str) -> tuple[WeightOp, ...]:
    """Weight and bias of a Linear under ``{dest}_weight`` and ``{dest}_bias``."""
    offset: torch.Tensor | None = linear.bias
    names = ("weight",) if offset is None else ("weight", "bias")
    return tuple(Move(f"{source}.{name}", f"{dest}_{name}") for name in names)


def approximated(fqn: str, approximation: str) -> dict[str, tuple[Reason, ...]]:
    """What to say about a module whose erf GELU becomes a tanh GELU because the caller allowed it."""
    return {fqn: (reason(ReasonCode.ACTIVATION_APPROXIMATED, "erf GELU computed as tanh GELU"),)} if approximation else {}


def activation_name(function: Any) -> str | None:
    """The activation's name in facts/activations.py, or None."""
    return probe_activation(function)
