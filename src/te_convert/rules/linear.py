"""nn.Linear, and any module that a probe proves equal to it  ->  te.Linear.

    y = x @ weight.T + bias        weight [out_features, in_features]

The Parameter objects are re-used: ties, requires_grad, optimizer identity and state-dict keys survive.
"""

from __future__ import annotations

from torch import nn

from te_convert.facts.linears import LinearFacts, NotALinear, looks_like_linear, packed_weight
from te_convert.match.candidate import Candidate
from te_convert.match.guards import layout_is_free
from te_convert.match.linears import linear_miss, linear_spec, linear_weights, probe_linear_site, recipe_precision, recipe_reasons
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.replacements.specs import Spec
from te_convert.rules.base import NearMiss, Rule
from te_convert.weights.ops import WeightMap


class LinearRule(Rule[LinearFacts]):
    """One Linear, wherever its input comes from."""

    id = "linear"
    kind = "Linear"

    def looks_like(self, site: Candidate) -> bool:
        """A Linear by class, a module with one 2-D and at most one 1-D parameter, or a Linear whose weight is packed."""
        return looks_like_linear(site.module) or bool(packed_weight(site.module))

    def recognise(self, site: Candidate) -> LinearFacts | NearMiss | None:
        """The probe's facts; a Linear subclass that computes something else is a near miss."""
        facts = probe_linear_site(site)
        if isinstance(facts, LinearFacts):
            return facts if facts.layout == "linear" else None
        return _near_miss(site, facts) if isinstance(site.module, nn.Linear) else None

    def miss(self, site: Candidate) -> str:
        """What the probe saw."""
        return linear_miss(site, "linear")

    def check(self, site: Candidate, facts: LinearFacts) -> tuple[Reason, ...]:
        """Reads of the weight from elsewhere, and the recipe's alignment."""
        return (*layout_is_free(site, linear_weights(facts).keeps_layout), *recipe_reasons(site, facts))

    def precision(self, site: Candidate, facts: LinearFacts) -> str:
        """High precision when the recipe cannot take the dimensions."""
        return recipe_precision(site, facts)

    def build(self, site: Candidate, facts: LinearFacts) -> Spec:
        """``te.Linear`` with the same sizes."""
        return linear_spec(site, facts)

    def weights(self, site: Candidate, facts: LinearFacts) -> WeightMap:
        """Weight and bias as they are."""
        del site
        return linear_weights(facts)


def _near_miss(site: Candidate, facts: NotALinear) -> NearMiss:
    module = site.module
    more = bool(module._modules) or bool(module._buffers) or len(module._parameters) > len(set(module.parameters(recurse=False)))
    code = ReasonCode.MODULE_EXTRA_STATE if more else ReasonCode.MODULE_SUBCLASS
    return NearMiss("Linear", (reason(code, f"{type(site.module).__name__}: {facts.detail}"),))
