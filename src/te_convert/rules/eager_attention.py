"""Attention that a module writes out  ->  te.DotProductAttention.

    (scale · q @ k.T + bias).masked_fill(mask, -inf).softmax(-1) @ v        q [b, h, s, d] or [b · h, s, d], any order of the steps
    te.DotProductAttention(q, k, v)                                         the same as [b, s, h, d]

The module stays and keeps its forward: its scores are lazy, and the replacement takes the call where the values come in.
"""

from __future__ import annotations

from te_convert.match.eager_attention import EagerSite
from te_convert.match.fusion import Fusion, Member
from te_convert.replacements.specs import DotProductAttentionSpec, dtype_name
from te_convert.weights.ops import WeightMap


class EagerAttentionRule:
    """Softmax attention that was seen as operations on scores."""

    id = "eager-attention"
    kind = "Attention"

    def spec(self, found: EagerSite) -> DotProductAttentionSpec:
        """The replacement's constructor facts."""
        facts = found.facts
        assert facts is not None
        default = float(facts.channels[0]) ** -0.5
        return DotProductAttentionSpec(
            num_attention_heads=facts.heads,
            kv_channels=facts.channels,
            num_gqa_groups=facts.heads,
            softmax_scale=None if abs(facts.scale - default) <= 1e-6 * default else facts.scale,
            attention_dropout=found.dropout,
            dtype=dtype_name(facts.dtype),
        )

    def fusion(self, found: EagerSite, spec: DotProductAttentionSpec) -> Fusion:
        """The TE module as a child of the module."""
        fqn, name = found.site.fqn, "core_attention"
        while hasattr(found.site.module, name):
            name += "_"
        full = f"{fqn}.{name}" if fqn else name
        return Fusion(full, fqn, self.id, (Member("attention", fqn),), spec, WeightMap(()))
