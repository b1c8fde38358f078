"""What every rule does with a transformer block whose parts were found: what stands against it, TE's spec, and the weight map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from te_convert.capture.graph import ModuleCall, Recording
from te_convert.match.blocks import Block
from te_convert.match.groups import CONTAINERS, Group, LinearSite, NormSite, inside, joined_ops
from te_convert.match.mlp import ERF, MLP, find_mlp
from te_convert.match.readers import dropout_p, is_dropout
from te_convert.match.transformer_blocks import BlockError, Parts, parse_block
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.replacements.specs import TransformerLayerSpec
from te_convert.weights.ops import Fill, Move, SwapHalves, WeightOp

Parse = Callable[[Block, Recording, ModuleCall], Parts]
APPROXIMATION = "gelu-tanh"


def looks_like_block(block: Block) -> bool:
    """Holds two norms and four Linears or more, and a tensor of three dimensions goes in and one of the same shape out."""
    if isinstance(block.site.module, CONTAINERS):
        return False
    calls = block.site.calls
    shaped = all(call.input_shape == call.output_shape and len(call.input_shape or ()) == 3 for call in calls)
    if not calls or not shaped:
        return False
    prefix = f"{block.site.fqn}." if block.site.fqn else ""
    names = [prefix + name for name, _ in block.site.module.named_modules() if name]
    return sum(name in block.norms for name in names) in (1, 2) and 4 <= sum(name in block.linears for name in names) <= 7


def te_activation(block: Block, mlp: MLP) -> tuple[str, str, tuple[Reason, ...]]:
    """TE's activation, the approximation that it is ("" for none), and what the caller has to allow first."""
    if not mlp.activation.endswith(ERF):
        return mlp.activation, "", ()
    allowed = APPROXIMATION in block.allow
    why = reason(ReasonCode.ACTIVATION_GELU_ERF, "the activation is GELU by erf; TE's is tanh GELU")
    return mlp.activation.removesuffix(ERF), APPROXIMATION, () if allowed else (why,)


def parts_in_all_calls(block: Block, parse: Parse = parse_block) -> tuple[Parts, MLP]:
    """The parts, equal in every recorded call.

    Raises:
        BlockError: not found, or not the same everywhere.
    """
    found: tuple[Parts, MLP] | None = None
    for recording in block.capture.recordings:
        for call in recording.calls:
            if call.fqn != block.site.fqn or call.raised:
                continue
            parts = parse(block, recording, call)
            group = Group(None, tuple(block.linears[name] for name in parts.inputs), frozenset(), block.modules, block.capture,
                          block.linears)  # fmt: skip
            mlp = find_mlp(group, recording, parts.first, block.site.probe_cache)
            if isinstance(mlp, str):
                raise BlockError(f"its MLP: {mlp}")
            if found is not None and _key(*found) != _key(parts, mlp):
                raise BlockError("its recorded calls differ")
            found = (parts, mlp)
    if found is None:
        raise BlockError("no recorded run called it")
    return found


def _key(parts: Parts, mlp: MLP) -> tuple[object, ...]:
    names = (parts.order, parts.norms, parts.qkv, parts.proj, parts.inputs, parts.down, parts.heads, parts.is_causal)
    return (*names, mlp.inputs, mlp.activation, mlp.packed)


def _linears(block: Block, parts: Parts) -> list[LinearSite]:
    return [block.linears[name] for name in (*parts.qkv, parts.proj, *parts.inputs, parts.down)]


def block_obstacles(block: Block, parts: Parts) -> list[Reason]:
    """What te.TransformerLayer has once for all: bias, eps, kind of norm; and what has to be the same to be one weight."""
    reasons = []
    linears, norms = _linears(block, parts), [block.norms[name].facts for name in parts.norms]
    sites = [*(linear.site for linear in linears), *(block.norms[name].site for name in parts.norms)]
    owned = {id(parameter) for site in sites for parameter in site.parameters.values()}
    others = [name for name, parameter in block.site.module.named_parameters() if id(parameter) not in owned]
    if others:
        reasons.append(reason(ReasonCode.BLOCK_FORM, f"it also holds {', '.join(others[:3])}"))
    if parts.norms[0] == parts.norms[1]:
        reasons.append(reason(ReasonCode.BLOCK_FORM, "one norm stands before both branches, te.TransformerLayer has two"))
    if any(site.ties for site in sites):
        reasons.append(reason(ReasonCode.BLOCK_FORM, "one of its parameters is tied"))
    if len({linear.spec.bias for linear in linears}) > 1:
        reasons.append(reason(ReasonCode.BLOCK_FORM, "only some of its Linears have a bias"))
    if len({(norm.kind, norm.eps, norm.zero_centered_gamma) for norm in norms}) > 1:
        reasons.append(reason(ReasonCode.BLOCK_FORM, "its norms differ in kind or eps"))
    for same in (parts.qkv, parts.inputs):
        if len({block.linears[name].flags for name in same}) > 1:
            reasons.append(reason(ReasonCode.BLOCK_FORM, f"{', '.join(same)} differ in requires_grad or layout"))
    active = [n for n, child in block.site.module.named_modules() if isinstance(child, nn.Dropout) and child.p > 0]
    active += [f"{n}.{name}" for n, child in block.site.module.named_modules() for name in dropout_attributes(child)]
    active += ["a call of dropout"] if _drops_by_function(block) else []
    if active:
        reasons.append(reason(ReasonCode.BLOCK_DROPOUT, f"p > 0 in {', '.join(active)}"))
    return reasons


def dropout_attributes(module: nn.Module) -> list[str]:
    """Names of a module's attributes that hold a probability of dropout above 0, which its forward gives to a function."""
    return [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float) and value > 0]


def _drops_by_function(block: Block) -> bool:
    """A dropout as a function with p > 0 anywhere inside, which parsing looks through; its p can be read nowhere later."""
    return any(
        node.op != "call_module"
        and ((is_dropout(node, block.modules) and dropout_p(node, block.modules) > 0) or bool(node.kwargs.get("dropout_p")))
        for recording in block.capture.recordings
        for node in recording.graph.nodes
        if block.site.fqn in (node.meta.get("nn_module_stack") or ("",))
    )


def block_spec(block: Block, parts: Parts, activation: str, mask: str) -> TransformerLayerSpec:
    """TE's layer for the parts, with the mask type of a call without a mask."""
    down, norm = block.linears[parts.down].spec, block.norms[parts.norms[0]].facts
    return TransformerLayerSpec(
        hidden_size=down.out_features,
        ffn_hidden_size=down.in_features,
        num_attention_heads=parts.heads,
        eps=norm.eps,
        bias=down.bias,
        activation=activation,
        normalization=norm.kind,
        zero_centered_gamma=norm.zero_centered_gamma,
        post_layernorm=parts.order == "post",
        parallel_attention_mlp=parts.order == "parallel",
        layer_type="encoder",
        attn_input_format="bshd",
        self_attn_mask_type=mask,
        dtype=down.dtype,
    )


def block_ops(block: Block, parts: Parts, mlp: MLP) -> tuple[WeightOp, ...]:
    """Where each parameter of the parts goes in TE's layer; names relative to the block."""
    scope, post = block.site.fqn, parts.order == "post"
    attention = "self_attention.qkv." if post else "self_attention.layernorm_qkv."
    first, second = (block.norms[name] for name in parts.norms)
    ops = list(_norm(first, scope, "layernorm_mlp.layer_norm_" if post else f"{attention}layer_norm_"))
    ops += _norm(second, scope, "layernorm." if post else "layernorm_mlp.layer_norm_")
    qkv = tuple(block.linears[name] for name in parts.qkv)
    ops += joined_ops(qkv, scope, f"{attention}weight", f"{attention}bias")
    ops += joined_ops((block.linears[parts.proj],), scope, "self_attention.proj.weight", "self_attention.proj.bias")
    fc1 = tuple(block.linears[name] for name in mlp.inputs)
    names = ("layernorm_mlp.fc1_weight", "layernorm_mlp.fc1_bias")
    ops += _swapped(fc1[0], scope, names) if mlp.packed == "second" else joined_ops(fc1, scope, *names)
    ops += joined_ops((block.linears[parts.down],), scope, "layernorm_mlp.fc2_weight", "layernorm_mlp.fc2_bias")
    return tuple(ops)


def _norm(norm: NormSite, scope: str, dest: str) -> tuple[WeightOp, ...]:
    facts, prefix = norm.facts, inside(norm.fqn, scope)
    weight: WeightOp = Move(f"{prefix}.{facts.weight}", f"{dest}weight")
    if facts.kind == "RMSNorm":
        return (weight,)
    bias: Any = Fill(f"{dest}bias", 0.0, facts.width) if facts.bias is None else Move(f"{prefix}.{facts.bias}", f"{dest}bias")
    return (weight, bias)


def _swapped(linear: LinearSite, scope: str, names: tuple[str, str]) -> list[WeightOp]:
    prefix = inside(linear.fqn, scope)
    found: list[WeightOp] = [SwapHalves(f"{prefix}.{linear.weight}", names[0], linear.transposed)]
    return [*found, SwapHalves(f"{prefix}.{linear.bias}", names[1])] if linear.spec.bias else found
