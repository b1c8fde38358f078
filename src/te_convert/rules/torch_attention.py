"""nn.MultiheadAttention  ->  te.MultiheadAttention, in its place.

    in_proj_weight [q; k; v] = qkv.weight        out_proj = proj            (self-attention)
    in_proj_weight [q | k; v] = query_layer.weight | key_value.weight       (cross-attention: keys and values from elsewhere)

A call that asks for the attention weights, float masks other than 0 and -inf, and dropout in training run the original.
"""

from __future__ import annotations

from torch import fx, nn

from te_convert.capture.graph import ModuleCall
from te_convert.match.blocks import Block
from te_convert.match.fusion import Fusion
from te_convert.match.groups import Found
from te_convert.match.torch_layers import (
    ATTENTION_CHILDREN,
    attention_obstacles,
    attention_ops,
    block_members,
    part_obstacles,
    site_obstacles,
    sizes_of,
    weight_obstacles,
)
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.replacements.specs import MultiheadAttentionSpec, dtype_name
from te_convert.rules.base import BlockRule
from te_convert.weights.ops import WeightMap


class TorchAttentionRule(BlockRule):
    """torch's own attention module, whose parts never run by themselves."""

    id = "torch-attention"

    def looks_like(self, block: Block) -> bool:
        """torch's own forward."""
        module = block.site.module
        return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward

    def propose(self, block: Block) -> Found:
        """A fusion when every recorded call is self-attention, or every one cross-attention."""
        site, module = block.site, block.site.module
        assert isinstance(module, nn.MultiheadAttention)
        kind = _kind(block)
        weights_asked = _always_asks_for_weights(block)
        obstacles = [*site_obstacles(block), *attention_obstacles(module), *part_obstacles(module, ATTENTION_CHILDREN)]
        obstacles += [kind] if isinstance(kind, Reason) else []
        obstacles += [weights_asked] if weights_asked is not None else []
        if obstacles or isinstance(kind, Reason):
            return Found(advices={site.fqn: tuple(obstacles)})
        weights = WeightMap(attention_ops(module, "", "", "qkv" if kind == "self" else ("query_layer", "key_value")))
        obstacles = list(weight_obstacles(block, weights))
        if obstacles:
            return Found(advices={site.fqn: tuple(obstacles)})
        spec = MultiheadAttentionSpec(
            hidden_size=module.embed_dim,
            num_attention_heads=module.num_heads,
            attention_dropout=module.dropout,
            bias=module.in_proj_bias is not None,
            attention_type=kind,
            qkv_format="bshd" if module.batch_first else "sbhd",
            dtype=dtype_name(module.out_proj.weight.dtype),
        )
        precision = block.precision(*sizes_of(module))
        return Found((Fusion(site.fqn, site.fqn, self.id, block_members(block), spec, weights, precision),))


def _always_asks_for_weights(block: Block) -> Reason | None:
    """torch's default is to return the attention weights, which TE never has."""
    calls = block.site.calls
    if calls and not any("need_weights" in call.keywords or call.n_positional > 4 for call in calls):
        return reason(ReasonCode.ATTENTION_WEIGHTS, "every recorded call returns the attention weights (torch's default)")
    return None


def _kind(block: Block) -> str | Reason:
    """Either "self" or "cross", from which arguments are the same tensor in the recorded calls."""
    kinds = set()
    for call in block.site.calls:
        nodes = _query_key_value(call)
        if len(nodes) < 3 or nodes[1] is None or nodes[1] is not nodes[2]:
            return reason(ReasonCode.ATTENTION_MIXED, "keys and values come from different tensors")
        kinds.add("self" if nodes[0] is nodes[1] else "cross")
    if not kinds:
        return reason(ReasonCode.ATTENTION_MIXED, "no recorded run called it")
    if len(kinds) > 1:
        return reason(ReasonCode.ATTENTION_MIXED, "called as self-attention and as cross-attention")
    return kinds.pop()


def _query_key_value(call: ModuleCall) -> list[fx.Node | None]:
    """The three tensors, also when they are given by keyword behind a mask."""
    by_keyword = len(call.args) - min(call.n_positional, len(call.args))
    names = [name for name in call.keywords if name in ("query", "key", "value", "key_padding_mask", "attn_mask")]
    if call.n_positional >= 3 or len(names) != by_keyword:  # masks behind the three, or masks that are None
        return list(call.args[:3])
    given = dict(zip(names, call.args[call.n_positional :], strict=True))
    wanted = ("query", "key", "value")[call.n_positional :]
    return [*call.args[: call.n_positional], *(given[name] for name in wanted if name in given)]
