"""What the rules for single modules and for attention say about one module, each asked again for it alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from te_convert.capture.graph import Capture
from te_convert.capture.run import describe_error
from te_convert.match.attention import find_attention
from te_convert.match.candidate import Candidate
from te_convert.match.direct_attention import find_direct_attention
from te_convert.match.eager_attention import find_eager_attention
from te_convert.match.guards import BEFORE_PROBES
from te_convert.plan.trace import CLAIMED, NOT_ASKED, PASSED, REFUSED, Attempt, looks_for, said
from te_convert.reasons import ReasonCode, reason
from te_convert.rules.attention import AttentionRule
from te_convert.rules.base import AnyRule, NearMiss
from te_convert.rules.eager_attention import EagerAttentionRule


def leaf_attempts(site: Candidate, rules: Sequence[AnyRule]) -> tuple[list[Attempt], dict[str, str]]:
    """What each rule says about a module, and what the probe of the first that knows it found out.

    The first rule that knows a module decides; those behind it are not asked.
    """
    attempts: list[Attempt] = []
    facts: dict[str, str] = {}
    decided = ""
    for rule in rules:
        if decided:
            attempts.append(Attempt(rule.id, (site.fqn,), NOT_ASKED, miss=f"{decided} has decided"))
            continue
        attempt, facts = _ask(rule, site)
        attempts.append(attempt)
        decided = rule.id if attempt.result in (CLAIMED, REFUSED) else ""
    return attempts, facts


def _ask(rule: AnyRule, site: Candidate) -> tuple[Attempt, dict[str, str]]:
    about = (site.fqn,)
    try:
        if not rule.looks_like(site):
            return Attempt(rule.id, about, PASSED, miss=looks_for(rule)), {}
        proposal = rule.propose(site)
        blocked = any(not why.is_advice for guard in BEFORE_PROBES if (why := guard(site)) is not None)
        found = None if blocked else rule.recognise(site)
    except Exception as error:
        why = reason(ReasonCode.INTERNAL_ERROR, f"rule {rule.id}: {describe_error(error)}")
        return Attempt(rule.id, about, REFUSED, (why,)), {}
    if proposal is None:
        return Attempt(rule.id, about, PASSED, miss=said(lambda: rule.miss(site))), {}
    result = REFUSED if proposal.refused else CLAIMED
    return Attempt(rule.id, about, result, proposal.reasons), _facts(found)


def _facts(found: Any) -> dict[str, str]:
    if found is None or isinstance(found, NearMiss) or not dataclasses.is_dataclass(found):
        return {}
    return {each.name: str(getattr(found, each.name)) for each in dataclasses.fields(found)}


def attention_attempt(
    site: Candidate, modules: dict[str, nn.Module], capture: Capture, candidates: Sequence[Candidate]
) -> tuple[Attempt, dict[str, str]]:
    """What the rule for called attention says about a module, and what is known about its calls."""
    rule, about = AttentionRule(), (site.fqn,)
    try:
        every = find_attention(modules, capture, candidates) | find_direct_attention(modules, capture, candidates)
        found = every.get(site.fqn)
        spec, reasons = (None, ()) if found is None else rule.propose(found)
    except Exception as error:
        return Attempt(rule.id, about, REFUSED, miss=describe_error(error)), {}
    if found is None:
        nothing = "it calls neither an attention function of Transformers nor scaled_dot_product_attention"
        return Attempt(rule.id, about, PASSED, miss=nothing), {}
    refused = spec is None or any(not why.is_advice for why in reasons)
    facts = {"implementation": found.implementation, "dropout": str(found.dropout)}
    return Attempt(rule.id, about, REFUSED if refused else CLAIMED, reasons), facts


def written_attempt(site: Candidate, modules: dict[str, nn.Module], capture: Capture) -> tuple[Attempt, dict[str, str]]:
    """What the rule for written-out attention says about a module, and what stands between the two products."""
    rule, about = EagerAttentionRule(), (site.fqn,)
    try:
        found = find_eager_attention(modules, capture, [site]).get(site.fqn)
    except Exception as error:
        return Attempt(rule.id, about, REFUSED, miss=describe_error(error)), {}
    if found is None:
        return Attempt(rule.id, about, PASSED, miss="it writes out no softmax(q @ k.T) @ v"), {}
    facts = {"between the two products": ", ".join(dict.fromkeys(found.between)) or "nothing"}
    if found.problem or found.facts is None:
        return Attempt(rule.id, about, REFUSED, (reason(ReasonCode.ATTENTION_EAGER_REGION, found.problem),)), facts
    return Attempt(rule.id, about, CLAIMED), {**facts, **_facts(found.facts), "dropout": str(found.dropout)}
