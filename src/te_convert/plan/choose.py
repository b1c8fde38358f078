"""From a capture to a plan: ask every rule about every module and keep all reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from te_convert.capture.ambient import float32_by_default
from te_convert.capture.graph import Capture
from te_convert.capture.run import describe_error
from te_convert.config import ConvertConfig
from te_convert.facts.flops import recording_flops
from te_convert.facts.stand_in import has_no_shape
from te_convert.match.candidate import Candidate, find_candidates
from te_convert.match.fusion import Fusion
from te_convert.plan.attentions import attention_decisions, settle_attention
from te_convert.plan.eager_attention import eager_decisions
from te_convert.plan.fusions import Lacks, existing_fusions, fuse_decisions, lacks_nothing, te_internals
from te_convert.plan.model import MEMBER_ATTRIBUTE, SITE_ATTRIBUTE, CallShape, Decision, Outcome, Plan
from te_convert.plan.pins import excluded, unused_patterns
from te_convert.plan.trace import Trace
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.rules.base import AnyRule, Proposal
from te_convert.rules.registry import load_rules

_MAX_SHAPES = 8
_RESTRUCTURES = "the model puts other modules into itself when it runs, so nothing was fused: a fused module could be lost"


@float32_by_default()
def make_plan(
    model: nn.Module,
    capture: Capture,
    config: ConvertConfig,
    notes: Sequence[str] = (),
    trace: Trace | None = None,
    lacks: Lacks = lacks_nothing,
) -> Plan:
    """Decide every site of the model.  A rule that fails on a site refuses that site and no other.

    A ``trace`` hears what the rules for blocks and fusions say about its module.  Fusions for whose spec ``lacks`` has a reason are
    not made; smaller ones, or the members' own conversions, take their place.
    """
    rules = load_rules()
    flops_total, flops = recording_flops(model, capture.recordings[0]) if capture.recordings else (0, {})
    candidates = find_candidates(model, capture, config.alignment)
    if config.fuse and any(recording.restructures for recording in capture.recordings):
        config, notes = replace(config, fuse=False), (*notes, _RESTRUCTURES)
    attention, attention_fusions = attention_decisions(model, capture, candidates, config)
    sites = []
    internals = te_internals(model)
    for index, site in enumerate(candidates):
        if id(site.module) in internals:
            continue
        decision = attention.get(site.fqn) or _decide(site, rules, config, flops.get(site.fqn, 0))
        sites.append((site, decision))
        config.report_progress("plan", index + 1, len(candidates))
    changed, fusions = fuse_decisions(model, capture, sites, config, trace, lacks) if config.fuse else ({}, ())
    attention_fusions = settle_attention(changed, fusions, attention, attention_fusions)
    kept = existing_fusions(model)
    if config.fuse:
        decided = {site.fqn: changed.get(site.fqn, decision) for site, decision in sites}
        others = (*fusions, *kept.values())
        eager, eager_fusions = eager_decisions(dict(model.named_modules()), capture, candidates, decided, others, config)
        changed |= eager
        attention_fusions = (*attention_fusions, *eager_fusions)
    final = [changed.get(site.fqn, decision) for site, decision in sites]
    decisions = [_renamed(decision, kept) for decision in final if decision is not None]
    failures = tuple(f"scenario {name} did not run: {error}" for name, error in capture.failures)
    return Plan(
        model_class=type(model).__name__,
        decisions=tuple(decisions),
        scenarios=tuple(recording.scenario.name for recording in capture.recordings),
        recipe=config.recipe,
        params_total=sum(parameter.numel() for parameter in model.parameters() if not has_no_shape(parameter)),
        flops_total=flops_total,
        notes=(*notes, *failures, *unused_patterns(decisions, config.include, config.exclude)),
        fusions=(*kept.values(), *fusions, *attention_fusions),
    )


def _decide(site: Candidate, rules: Sequence[AnyRule], config: ConvertConfig, flops: int) -> Decision | None:
    """The decision for one module, or None for a module that owns nothing a rule could look at."""
    record = site.module.__dict__.get(SITE_ATTRIBUTE)
    decision = site.module.__dict__.get(MEMBER_ATTRIBUTE)
    if decision is None and record is not None:
        decision = record.decision if isinstance(record.decision, Decision) else None
        if decision is None:  # a fused module: its members are the sites
            return None
    if decision is not None:
        return _already_converted(decision, site, flops)
    extra = _foreign(site)
    proposal = None if extra else _propose(site, rules)
    if proposal is None and not site.parameters:
        return None
    outcome = Outcome.NO_MATCH
    unwanted = excluded(site, config.include, config.exclude)
    if proposal is not None and unwanted is not None:
        outcome, extra = Outcome.EXCLUDED, (unwanted,)
    elif proposal is not None:
        outcome = Outcome.REFUSED if proposal.refused else Outcome.CONVERTED
    return Decision(
        fqn=site.fqn,
        kind=proposal.kind if proposal is not None else type(site.module).__name__,
        class_name=type(site.module).__name__,
        outcome=outcome,
        aliases=site.aliases,
        rule=None if proposal is None else proposal.rule,
        spec=None if proposal is None else proposal.spec,
        weights=None if proposal is None else proposal.weights,
        reasons=(*extra, *(proposal.reasons if proposal is not None else ())),
        calls=len(site.calls),
        shapes=_shapes(site),
        params=sum(p.numel() for p in site.parameters.values() if not has_no_shape(p)),
        flops=flops,
        precision="recipe" if proposal is None else proposal.precision,
    )


def _foreign(site: Candidate) -> tuple[Reason, ...]:
    """Why no rule is asked about a module: it is TE's own, or compiled TorchScript."""
    if type(site.module).__module__.startswith("transformer_engine"):
        return (reason(ReasonCode.MODULE_ALREADY_TE, type(site.module).__qualname__),)
    if isinstance(site.module, torch.jit.ScriptModule):
        return (reason(ReasonCode.MODULE_SCRIPTED, str(getattr(site.module, "original_name", type(site.module).__name__))),)
    return ()


def _already_converted(decision: Decision, site: Candidate, flops: int) -> Decision:
    """A site of an earlier conversion keeps its decision; the rewrite passes over it, verification compares it again."""
    return replace(decision, fqn=site.fqn, aliases=site.aliases, calls=len(site.calls), shapes=_shapes(site), flops=flops)


def _renamed(decision: Decision, kept: dict[str, Fusion]) -> Decision:
    """A member of an earlier fusion, whose module may have another name now."""
    fusion = kept.get(decision.fused_into or "")
    return decision if fusion is None else replace(decision, fused_into=fusion.fqn)


def _propose(site: Candidate, rules: Sequence[AnyRule]) -> Proposal | None:
    """The first rule that knows the module; one that breaks says so and refuses."""
    for rule in rules:
        try:
            proposal = rule.propose(site)
        except Exception as error:
            detail = f"rule {rule.id}: {describe_error(error)}"
            return Proposal(rule.id, type(site.module).__name__, None, None, (reason(ReasonCode.INTERNAL_ERROR, detail),))
        if proposal is not None:
            return proposal
    return None


def _shapes(site: Candidate) -> tuple[CallShape, ...]:
    seen: dict[CallShape, None] = {}
    for call in site.calls:
        if call.input_shape is not None and call.output_shape is not None:
            seen[CallShape(call.input_shape, call.output_shape, str(call.dtype).removeprefix("torch."))] = None
    return tuple(seen)[:_MAX_SHAPES]
