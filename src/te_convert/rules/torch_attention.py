"""nn.MultiheadAttention  ->  te.MultiheadAttention, in its place.

    in_proj_weight [q; k; v] = qkv.weight        out_proj = proj            (self-attention)
    in_proj_weight [q | k; v] = query_layer.weight | key_value.weight       (cross-attention: keys and values from elsewhere)

A call that asks for the attention weights, float masks other than 0 and -inf, and dropout in training run the original.
"""

from __future__ import annotations

from torch import nn

from te_convert.match.blocks import Block
from te_convert.match.fusion import Fusion
from te_convert.match.groups import Found
from te_convert.match.torch_layers import attention_obstacles, attention_ops, block_members, sizes_of
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
        obstacles = [*attention_obstacles(block, module), *((kind,) if isinstance(kind, Reason) else ())]
        if obstacles or isinstance(kind, Reason):
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
        weights = WeightMap(attention_ops(module, "", "", "qkv" if kind == "self" else ("query_layer", "key_value")))
        precision = block.precision(*sizes_of(module))
        return Found((Fusion(site.fqn, site.fqn, self.id, block_members(block), spec, weights, precision),))


def _kind(block: Block) -> str | Reason:
    """Either "self" or "cross", from which arguments are the same tensor in the recorded calls."""
    kinds = set()
    for call in block.site.calls:
        nodes = call.args[:3]
        if len(nodes) < 3 or nodes[1] is None or nodes[1] is not nodes[2]:
            return reason(ReasonCode.ATTENTION_MIXED, "keys and values come from different tensors")
        kinds.add("self" if nodes[0] is nodes[1] else "cross")
    if len(kinds) != 1:
        return reason(ReasonCode.ATTENTION_MIXED, "called as self-attention and as cross-attention" if kinds else "it never ran")
    return kinds.pop()
