"""A transformer block of any class that a probe proves equal  ->  te.TransformerLayer, in its place.

    pre-norm, post-norm or parallel, as in match/transformer_blocks.py; one tensor [batch, sequence, hidden] in and out

The block and the TE layer are run on random input with perturbed norms and biases, at two shapes; only equal results convert.
Only without dropout; a block with erf GELU stays in parts unless the approximation is allowed.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from te_convert.match.blocks import Block
from te_convert.match.fusion import Fusion
from te_convert.match.groups import CONTAINERS, Found, Group, LinearSite, NormSite, inside, joined_ops
from te_convert.match.mlp import ERF, MLP, find_mlp
from te_convert.match.proof import first_difference
from te_convert.match.readers import dropout_p, is_dropout
from te_convert.match.torch_layers import LAYER_CHILDREN, approximated, block_members, part_obstacles
from te_convert.match.transformer_blocks import BlockError, Parts, parse_block
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.replacements.specs import TransformerLayerSpec
from te_convert.rules.base import BlockRule
from te_convert.weights.ops import Fill, Move, SwapHalves, WeightMap, WeightOp

_APPROXIMATION = "gelu-tanh"


class TransformerBlockRule(BlockRule):
    """Hand-written blocks: nanoGPT's, timm's, and their like."""

    id = "transformer-block"

    def looks_like(self, block: Block) -> bool:
        """Holds two norms and four Linears or more, and one tensor of three dimensions goes in and out."""
        if isinstance(block.site.module, CONTAINERS):
            return False
        prefix = f"{block.site.fqn}." if block.site.fqn else ""
        norms = sum(name.startswith(prefix) for name in block.norms)
        linears = sum(name.startswith(prefix) for name in block.linears)
        calls = block.site.calls
        shaped = all(call.input_shape == call.output_shape and len(call.input_shape or ()) == 3 for call in calls)
        return norms in (1, 2) and 4 <= linears <= 7 and bool(calls) and shaped

    def propose(self, block: Block) -> Found:
        """A fusion, if the parts are found in every recorded call and the proof holds."""
        try:
            parts, mlp = _in_all_calls(block)
        except BlockError:  # most modules are no blocks
            return Found()
        obstacles = [*part_obstacles(block.site.module, LAYER_CHILDREN), *_obstacles(block, parts)]
        activation, approximation = mlp.activation, ""
        if activation.endswith(ERF):
            activation, approximation = activation.removesuffix(ERF), _APPROXIMATION
            if _APPROXIMATION not in block.allow:
                obstacles.append(reason(ReasonCode.ACTIVATION_GELU_ERF, "the activation is GELU by erf; TE's is tanh GELU"))
        if obstacles:
            return Found(advices={block.site.fqn: tuple(obstacles)})
        weights = WeightMap(_ops(block, parts, mlp))
        spec, difference = block.cached_deep(lambda: _prove(block, parts, activation, weights, bool(approximation)))
        if difference:
            return _no(block, ReasonCode.BLOCK_FORM, difference)
        fqn = block.site.fqn
        precision = block.precision(spec.hidden_size, spec.ffn_hidden_size)
        fusion = Fusion(fqn, fqn, self.id, block_members(block), spec, weights, precision, approximation=approximation)
        return Found((fusion,), approximated(fqn, approximation))


def _prove(block: Block, parts: Parts, activation: str, weights: WeightMap, approximate: bool) -> tuple[TransformerLayerSpec, str]:
    """The spec whose twin gives the block's results, and ""; or the last one tried, and how it differs."""
    masks = ("causal", "no_mask") if parts.is_causal is None else ("causal" if parts.is_causal else "no_mask",)
    for mask in masks:
        spec = _spec(block, parts, activation, mask)
        difference = first_difference(block, spec, weights, approximate=approximate)
        if not difference:
            break
    return spec, difference


def _no(block: Block, code: ReasonCode, detail: str) -> Found:
    return Found(advices={block.site.fqn: (reason(code, detail),)})


def _in_all_calls(block: Block) -> tuple[Parts, MLP]:
    """The parts, equal in every recorded call.

    Raises:
        BlockError: not found, or not the same everywhere.
    """
    found: tuple[Parts, MLP] | None = None
    for recording in block.capture.recordings:
        for call in recording.calls:
            if call.fqn != block.site.fqn or call.raised:
                continue
            parts = parse_block(block, recording, call)
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


def _obstacles(block: Block, parts: Parts) -> list[Reason]:
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
    active += ["a call of dropout"] if _drops_by_function(block) else []
    if active:
        reasons.append(reason(ReasonCode.BLOCK_DROPOUT, f"p > 0 in {', '.join(active)}"))
    return reasons


def _drops_by_function(block: Block) -> bool:
    """A dropout as a function with p > 0 anywhere inside, which parsing looks through; its p can be read nowhere later."""
    return any(
        node.op != "call_module" and is_dropout(node, block.modules) and dropout_p(node, block.modules) > 0
        for recording in block.capture.recordings
        for node in recording.graph.nodes
        if block.site.fqn in (node.meta.get("nn_module_stack") or ("",))
    )


def _spec(block: Block, parts: Parts, activation: str, mask: str) -> TransformerLayerSpec:
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


def _ops(block: Block, parts: Parts, mlp: MLP) -> tuple[WeightOp, ...]:
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
