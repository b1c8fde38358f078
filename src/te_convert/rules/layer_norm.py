"""Any module that a probe proves to be a LayerNorm over the last dimension  ->  te.LayerNorm.

    y = (x - mean) / sqrt(var + eps) * gamma + bias        gamma = weight, or 1 + weight

TE's module always has a bias: where the original has none, a frozen zero bias is filled in (it is not in the state dict).
"""

from __future__ import annotations

from torch import nn

from te_convert.facts.norm_formula import NormFacts
from te_convert.facts.norms import looks_like_norm
from te_convert.match.candidate import Candidate
from te_convert.match.guards import layout_is_free
from te_convert.match.norms import declared_norm_reasons, norm_miss, norm_reasons, probe_norm_site
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.replacements.specs import LayerNormSpec, Spec, dtype_name
from te_convert.rules.base import NearMiss, Rule
from te_convert.weights.ops import Fill, Move, WeightMap


class LayerNormRule(Rule[NormFacts]):
    """One LayerNorm, wherever its output goes."""

    id = "layer-norm"
    kind = "LayerNorm"

    def looks_like(self, site: Candidate) -> bool:
        """Shaped like a norm, and not declared to be the other kind."""
        return looks_like_norm(site.module) and not isinstance(site.module, nn.RMSNorm)

    def recognise(self, site: Candidate) -> NormFacts | NearMiss | None:
        """The probe's facts; torch's LayerNorm in a form that TE lacks is a near miss."""
        declared = declared_norm_reasons(site)
        if declared:
            return NearMiss(self.kind, declared)
        facts = probe_norm_site(site)
        if isinstance(facts, NormFacts):
            return facts if facts.kind == "LayerNorm" else None
        if isinstance(site.module, nn.LayerNorm):
            detail = f"{type(site.module).__name__}: {facts.detail}"
            return NearMiss(self.kind, (reason(ReasonCode.NORM_NOT_RECOGNISED, detail),))
        return None

    def miss(self, site: Candidate) -> str:
        """What the probe saw."""
        return norm_miss(site, self.kind)

    def check(self, site: Candidate, facts: NormFacts) -> tuple[Reason, ...]:
        """What a recognised norm may still lack."""
        return (*norm_reasons(site, facts), *layout_is_free(site, self.weights(site, facts).keeps_layout))

    def build(self, site: Candidate, facts: NormFacts) -> Spec:
        """``te.LayerNorm`` with the measured eps."""
        assert site.dtype is not None
        return LayerNormSpec(facts.width, facts.eps, facts.zero_centered_gamma, dtype_name(site.dtype))

    def weights(self, site: Candidate, facts: NormFacts) -> WeightMap:
        """Weight and bias under TE's names; a missing bias is filled with zeros."""
        del site
        bias = Fill("bias", 0.0, facts.width) if facts.bias is None else Move(facts.bias, "bias")
        return WeightMap((bias,) if facts.weight is None else (Move(facts.weight, "weight"), bias))
