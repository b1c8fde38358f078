"""Shared by the Linear-shaped rules: recognition by probe, and the reasons that depend on the dimensions."""

from __future__ import annotations

from te_convert.facts.linears import LinearFacts, NotALinear, probe_linear_cached
from te_convert.match.candidate import Candidate
from te_convert.match.guards import aligned_features, aligned_rows
from te_convert.reasons import Reason
from te_convert.replacements.specs import LinearSpec, dtype_name
from te_convert.weights.ops import Move, Transpose, WeightMap


def probe_linear_site(site: Candidate) -> LinearFacts | NotALinear:
    """What the site's module computes; identical modules are probed once."""
    return probe_linear_cached(site.module, site.probe_cache)


def linear_miss(site: Candidate, layout: str) -> str:
    """Why the site is no Linear with a weight of the layout, in words."""
    facts = probe_linear_site(site)
    if not isinstance(facts, LinearFacts):
        return facts.detail
    return "" if facts.layout == layout else f"its weight is {'[out, in]' if facts.layout == 'linear' else '[in, out]'}"


def linear_spec(site: Candidate, facts: LinearFacts) -> LinearSpec:
    """``te.Linear`` with the site's sizes and dtype."""
    assert site.dtype is not None  # a recognised Linear has a weight
    return LinearSpec(facts.in_features, facts.out_features, facts.bias is not None, dtype_name(site.dtype))


def linear_weights(facts: LinearFacts) -> WeightMap:
    """weight → ``weight`` [out, in] (transposed from conv1d's [in, out]), bias → ``bias``."""
    weight = Move(facts.weight, "weight") if facts.layout == "linear" else Transpose(facts.weight, "weight")
    return WeightMap((weight,) if facts.bias is None else (weight, Move(facts.bias, "bias")))


def recipe_reasons(site: Candidate, facts: LinearFacts) -> tuple[Reason, ...]:
    """Advices about the recipe's alignment."""
    found = (aligned_features(site, facts.in_features, facts.out_features), aligned_rows(site))
    return tuple(advice for advice in found if advice is not None)


def recipe_precision(site: Candidate, facts: LinearFacts) -> str:
    """High precision ("high") when the recipe cannot take the feature dimensions."""
    return "high" if aligned_features(site, facts.in_features, facts.out_features) else "recipe"
