"""Attention that a module writes out: replaced where it is understood and proved, else said with what stands in the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from te_convert.capture.graph import Capture
from te_convert.capture.run import describe_error
from te_convert.config import ConvertConfig
from te_convert.match.candidate import Candidate
from te_convert.match.eager_attention import EagerSite, find_eager_attention
from te_convert.match.fusion import Fusion
from te_convert.plan.model import MEMBER_ATTRIBUTE, CallShape, Decision, Outcome
from te_convert.plan.pins import excluded
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.replacements.specs import DotProductAttentionSpec, dtype_name
from te_convert.rules.eager_attention import EagerAttentionRule

_RULE = EagerAttentionRule()
_MAX_SHAPES = 8


def eager_decisions(
    modules: dict[str, nn.Module],
    capture: Capture,
    candidates: Sequence[Candidate],
    known: Mapping[str, Decision | None],
    fusions: Sequence[Fusion],
    config: ConvertConfig,
) -> tuple[dict[str, Decision], tuple[Fusion, ...]]:
    """A decision for each module with a written-out attention that no fusion took and that no rule decided, by name.

    Returns:
        The decisions, and the fusions that carry out those that convert.
    """
    owners = [fusion.whole for fusion in fusions if fusion.whole is not None]
    decisions: dict[str, Decision] = {}
    made: list[Fusion] = []
    open_sites = [
        site for site in candidates
        if _is_open(known.get(site.fqn)) and MEMBER_ATTRIBUTE not in site.module.__dict__
        and not any(f"{site.fqn}.".startswith(f"{o}." if o else "") for o in owners)
    ]  # fmt: skip
    try:
        sites = find_eager_attention(modules, capture, open_sites)
    except Exception as error:
        why = reason(ReasonCode.INTERNAL_ERROR, f"rule {_RULE.id}: {describe_error(error)}")
        return {"": _decision(EagerSite(candidates[0]), Outcome.REFUSED, None, (why,))} if candidates else {}, ()
    for fqn, found in sites.items():
        unwanted = excluded(found.site, config.include, config.exclude)
        if found.problem or found.facts is None:
            steps = ", ".join(dict.fromkeys(found.between)) or "nothing"
            detail = f"{found.problem}; between the two products: {steps}"
            decisions[fqn] = _decision(found, Outcome.REFUSED, None, (reason(ReasonCode.ATTENTION_EAGER_REGION, detail),))
        elif unwanted is not None:
            decisions[fqn] = _decision(found, Outcome.EXCLUDED, _RULE.spec(found), (unwanted,))
        else:
            spec = _RULE.spec(found)
            made.append(_RULE.fusion(found, spec))
            decisions[fqn] = _decision(found, Outcome.CONVERTED, spec, (), made[-1].fqn)
    return decisions, tuple(made)


def _is_open(decision: Decision | None) -> bool:
    return decision is None or decision.outcome is Outcome.NO_MATCH


def _decision(
    found: EagerSite,
    outcome: Outcome,
    spec: DotProductAttentionSpec | None,
    reasons: tuple[Reason, ...],
    fused_into: str | None = None,
) -> Decision:
    site = found.site
    shapes = dict.fromkeys(CallShape(given, result, dtype_name(dtype)) for given, result, dtype in found.shapes)
    return Decision(
        fqn=site.fqn,
        kind=_RULE.kind,
        class_name=type(site.module).__name__,
        outcome=outcome,
        aliases=site.aliases,
        rule=None if spec is None else _RULE.id,
        spec=spec,
        reasons=reasons,
        calls=len(found.shapes) or len(site.calls),
        shapes=tuple(shapes)[:_MAX_SHAPES],
        params=0 if fused_into else sum(parameter.numel() for parameter in site.parameters.values()),
        fused_into=fused_into,
    )
