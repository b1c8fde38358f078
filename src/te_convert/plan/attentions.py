"""Decisions for attention modules, which own no parameters and are found by what they called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import nn

from te_convert.capture.graph import Capture
from te_convert.capture.run import describe_error
from te_convert.config import ConvertConfig
from te_convert.facts.flops import attention_flops
from te_convert.match.attention import AttentionSite, find_attention
from te_convert.match.candidate import Candidate
from te_convert.match.direct_attention import find_direct_attention
from te_convert.match.fusion import Fusion
from te_convert.plan.model import MEMBER_ATTRIBUTE, CallShape, Decision, Outcome
from te_convert.plan.pins import excluded
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.replacements.specs import DotProductAttentionSpec, dtype_name
from te_convert.rules.attention import AttentionRule

_RULE = AttentionRule()
_MAX_SHAPES = 8


def attention_decisions(
    model: nn.Module, capture: Capture, candidates: Sequence[Candidate], config: ConvertConfig
) -> tuple[dict[str, Decision], tuple[Fusion, ...]]:
    """Decisions of all attention modules that no earlier conversion has taken, by name, and the fusions that carry them out."""
    decisions: dict[str, Decision] = {}
    fusions: list[Fusion] = []
    if not config.fuse:
        return decisions, ()
    flops = attention_flops(capture.recordings[0]) if capture.recordings else {}
    modules = dict(model.named_modules())
    sites = find_attention(modules, capture, candidates)
    proposed = {fqn: _propose(found) for fqn, found in sites.items()}
    # Under another name these models would take another way; the function that they call under their own is caught instead.
    compared = [fqn for fqn, (_, reasons) in proposed.items() if _is_compared(reasons) and sites[fqn].implementation == "sdpa"]
    direct = find_direct_attention(modules, capture, candidates, compared)
    sites |= direct
    for fqn, found in sites.items():
        if MEMBER_ATTRIBUTE in found.site.module.__dict__:
            continue
        spec, reasons = _propose(found) if fqn in direct else proposed[fqn]
        unwanted = excluded(found.site, config.include, config.exclude)
        if unwanted is not None:
            decisions[fqn] = _decision(found, Outcome.EXCLUDED, spec, (unwanted, *reasons), flops.get(fqn, 0))
        elif spec is None or any(not found_reason.is_advice for found_reason in reasons):
            decisions[fqn] = _decision(found, Outcome.REFUSED, spec, reasons, flops.get(fqn, 0))
        else:
            fusions.append(_RULE.fusion(found, spec))
            decisions[fqn] = _decision(found, Outcome.CONVERTED, spec, reasons, flops.get(fqn, 0), fusions[-1].fqn)
    return decisions, tuple(fusions)


def settle_attention(
    changed: dict[str, Decision], fusions: Sequence[Fusion], decisions: dict[str, Decision], own: Sequence[Fusion]
) -> tuple[Fusion, ...]:
    """The attention fusions that stay: not those inside a module that becomes one TE module as a whole.

    Args:
        changed: decisions that other fusions changed; those of attention modules that give way are added.
        fusions: the other fusions.
        decisions: of attention modules.
        own: attention fusions.
    """
    whole = {owner: fusion for fusion in fusions if (owner := fusion.whole) is not None}
    kept = []
    for fusion in own:
        around = next((other for owner, other in whole.items() if not owner or f"{fusion.scope}.".startswith(f"{owner}.")), None)
        if around is None:
            kept.append(fusion)
            continue
        before = changed.get(fusion.scope, decisions[fusion.scope])
        changed[fusion.scope] = replace(
            before, outcome=Outcome.FUSED, rule=around.rule, spec=around.spec, weights=None, fused_into=around.fqn
        )
    return tuple(kept)


def _is_compared(reasons: Iterable[Reason]) -> bool:
    return {found.code for found in reasons if not found.is_advice} == {ReasonCode.ATTENTION_NAME_COMPARED}


def _propose(found: AttentionSite) -> tuple[DotProductAttentionSpec | None, tuple[Reason, ...]]:
    try:
        return _RULE.propose(found)
    except Exception as error:
        return None, (reason(ReasonCode.INTERNAL_ERROR, f"rule {_RULE.id}: {describe_error(error)}"),)


def _decision(
    found: AttentionSite,
    outcome: Outcome,
    spec: DotProductAttentionSpec | None,
    reasons: tuple[Reason, ...],
    flops: int,
    fused_into: str | None = None,
) -> Decision:
    site = found.site
    seen: dict[CallShape, None] = {}
    for call in found.calls:
        output = (call.query[0], call.query[2], call.query[1], call.value[-1]) if len(call.query) == 4 else call.query
        seen[CallShape(call.query, output, dtype_name(call.dtype))] = None
    return Decision(
        fqn=site.fqn,
        kind=_RULE.kind,
        class_name=type(site.module).__name__,
        outcome=outcome,
        aliases=site.aliases,
        rule=_RULE.id,
        spec=spec,
        reasons=reasons,
        calls=len(found.calls),
        shapes=tuple(seen)[:_MAX_SHAPES],
        params=0 if fused_into else sum(parameter.numel() for parameter in site.parameters.values()),
        flops=flops,
        fused_into=fused_into,
    )
