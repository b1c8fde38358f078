"""Transformers' Conv1D, and any module that a probe proves equal to it  ->  te.Linear with the weight transposed.

    y = x @ weight + bias          weight [in_features, out_features]  ->  [out_features, in_features]

TE needs the other layout, so the converted module owns a new weight Parameter; a tied weight is refused.
"""

from __future__ import annotations

from torch import nn

from te_convert.facts.linears import LinearFacts, looks_like_linear
from te_convert.match.candidate import Candidate
from te_convert.match.guards import layout_is_free
from te_convert.match.linears import linear_miss, linear_spec, linear_weights, probe_linear_site, recipe_precision, recipe_reasons
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.replacements.specs import Spec
from te_convert.rules.base import NearMiss, Rule
from te_convert.weights.ops import WeightMap


class Conv1DRule(Rule[LinearFacts]):
    """One transposed Linear (GPT-2 style)."""

    id = "conv1d"
    kind = "Conv1D"

    def looks_like(self, site: Candidate) -> bool:
        """One 2-D and at most one 1-D parameter, and no nn.Linear."""
        return not isinstance(site.module, nn.Linear) and looks_like_linear(site.module)

    def recognise(self, site: Candidate) -> LinearFacts | NearMiss | None:
        """The probe's facts when the weight is [in, out]."""
        facts = probe_linear_site(site)
        return facts if isinstance(facts, LinearFacts) and facts.layout == "conv1d" else None

    def miss(self, site: Candidate) -> str:
        """What the probe saw."""
        return linear_miss(site, "conv1d")

    def check(self, site: Candidate, facts: LinearFacts) -> tuple[Reason, ...]:
        """Ties and reads forbid the new layout; the new Parameter object is an advice."""
        moved = reason(ReasonCode.PARAMETER_NEW_OBJECT, f"{facts.weight} [in, out] is stored as [out, in]")
        return (*layout_is_free(site, keeps_layout=False), moved, *recipe_reasons(site, facts))

    def precision(self, site: Candidate, facts: LinearFacts) -> str:
        """High precision when the recipe cannot take the dimensions."""
        return recipe_precision(site, facts)

    def build(self, site: Candidate, facts: LinearFacts) -> Spec:
        """``te.Linear`` with the same sizes."""
        return linear_spec(site, facts)

    def weights(self, site: Candidate, facts: LinearFacts) -> WeightMap:
        """The weight transposed, the bias as it is."""
        del site
        return linear_weights(facts)
