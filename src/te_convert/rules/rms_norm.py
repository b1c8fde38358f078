"""Any module that a probe proves to be an RMSNorm over the last dimension  ->  te.RMSNorm.

    y = x / sqrt(mean(x^2) + eps) * gamma                  gamma = weight, or 1 + weight (Gemma)

Whatever its class is called: Llama's, T5's, Gemma's, nn.RMSNorm with eps=None, and LayerNorms in name only.
"""

from __future__ import annotations

from torch import nn

from te_convert.facts.norm_formula import NormFacts
from te_convert.facts.norms import looks_like_norm
from te_convert.match.candidate import Candidate
from te_convert.match.guards import layout_is_free
from te_convert.match.norms import declared_norm_reasons, norm_miss, norm_reasons, probe_norm_site
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.replacements.specs import RMSNormSpec, Spec, dtype_name
from te_convert.rules.base import NearMiss, Rule
from te_convert.weights.ops import Move, WeightMap


class RMSNormRule(Rule[NormFacts]):
    """One RMSNorm, wherever its output goes."""

    id = "rms-norm"
    kind = "RMSNorm"

    def looks_like(self, site: Candidate) -> bool:
        """Shaped like a norm."""
        return looks_like_norm(site.module)

    def recognise(self, site: Candidate) -> NormFacts | NearMiss | None:
        """The probe's facts; a module that calls itself a norm and is none of TE's is a near miss."""
        declared = declared_norm_reasons(site)
        if declared:
            return NearMiss(self.kind, declared)
        facts = probe_norm_site(site)
        if isinstance(facts, NormFacts):
            if facts.kind == "RMSNorm" and facts.bias is None:
                return facts
            return _near_miss(site, facts)
        name = type(site.module).__name__
        if isinstance(site.module, nn.RMSNorm) or "norm" in name.lower():
            kind = self.kind if isinstance(site.module, nn.RMSNorm) else name
            return NearMiss(kind, (reason(ReasonCode.NORM_NOT_RECOGNISED, f"{name}: {facts.detail}"),))
        return None

    def miss(self, site: Candidate) -> str:
        """What the probe saw."""
        return norm_miss(site, self.kind)

    def check(self, site: Candidate, facts: NormFacts) -> tuple[Reason, ...]:
        """What a recognised norm may still lack."""
        return (*norm_reasons(site, facts), *layout_is_free(site, self.weights(site, facts).keeps_layout))

    def build(self, site: Candidate, facts: NormFacts) -> Spec:
        """``te.RMSNorm`` with the measured eps."""
        assert site.dtype is not None
        return RMSNormSpec(facts.width, facts.eps, facts.zero_centered_gamma, dtype_name(site.dtype))

    def weights(self, site: Candidate, facts: NormFacts) -> WeightMap:
        """The weight under TE's name."""
        del site
        return WeightMap(() if facts.weight is None else (Move(facts.weight, "weight"),))


def _near_miss(site: Candidate, facts: NormFacts) -> NearMiss:
    """An RMSNorm with a bias, or a subclass of nn.RMSNorm that is a LayerNorm: norms, and none of TE's replaces them here."""
    name = type(site.module).__name__
    detail = f"an RMSNorm with a bias ({facts.bias})" if facts.kind == "RMSNorm" else "an nn.RMSNorm that subtracts the mean"
    return NearMiss("RMSNorm", (reason(ReasonCode.NORM_NOT_RECOGNISED, f"{name}: {detail}"),))
