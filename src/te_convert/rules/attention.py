"""The attention of a Transformers model  ->  te.DotProductAttention.

    attention(module, q, k, v, mask, scaling=, dropout=)        q [b, h, s, d], k and v [b, groups, s, d]
    te.DotProductAttention(q, k, v)                             the same as [b, s, heads, d]

A bias that every call brings (``position_bias``) is TE's post-scale bias, and so is a mask that TE has no type for.  Sinks
(``s_aux``) are TE's learnable softmax offset.

The module stays: the function that it asks Transformers for is exchanged, together with the one that makes its masks.  A module
that calls torch's scaled_dot_product_attention gets a forward that calls the replacement.
"""

from __future__ import annotations

from te_convert.facts.attention import DIRECT
from te_convert.match.attention import AttentionSite, check_attention, softmax_scale
from te_convert.match.fusion import Fusion, Member
from te_convert.reasons import Reason
from te_convert.replacements.specs import DotProductAttentionSpec, dtype_name
from te_convert.weights.ops import Move, WeightMap


class AttentionRule:
    """Softmax attention that was seen to go through Transformers' AttentionInterface, or to be torch's own function."""

    id = "attention"
    direct = "sdpa"
    kind = "Attention"

    def propose(self, found: AttentionSite) -> tuple[DotProductAttentionSpec | None, tuple[Reason, ...]]:
        """The replacement's constructor facts (None when the calls disagree), and every reason against it."""
        facts, reasons = check_attention(found)
        if facts is None:
            return None, reasons
        spec = DotProductAttentionSpec(
            num_attention_heads=facts.heads,
            kv_channels=facts.channels,
            num_gqa_groups=facts.groups,
            softmax_scale=softmax_scale(facts),
            attention_dropout=found.dropout,
            dtype=dtype_name(found.calls[0].dtype),
            softcap=facts.softcap,
            bias=facts.bias,
            softmax_type="learnable" if facts.sink else "vanilla",
        )
        return spec, reasons

    def fusion(self, found: AttentionSite, spec: DotProductAttentionSpec) -> Fusion:
        """The TE module as a child of the attention module."""
        fqn, module = found.site.fqn, found.site.module
        name = "core_attention"
        while hasattr(module, name):
            name += "_"
        return Fusion(
            fqn=f"{fqn}.{name}" if fqn else name,
            scope=fqn,
            rule=self.direct if found.implementation == DIRECT else self.id,
            members=(Member("attention", fqn),),
            spec=spec,
            weights=WeightMap((Move(found.sink, "softmax_offset"),) if found.sink else ()),
        )
