"""Putting an explanation together: a plan is made with a trace, and the rest is asked for the one module."""

from __future__ import annotations

import difflib

import torch
from torch import nn

from te_convert.capture.ambient import float32_by_default
from te_convert.capture.fake import is_meta
from te_convert.capture.graph import Capture
from te_convert.capture.scenario import Scenario
from te_convert.config import ConvertConfig
from te_convert.errors import InputError
from te_convert.explain.graph import lines_around
from te_convert.explain.inputs import companions, describe_source
from te_convert.explain.leaves import attention_attempt, leaf_attempts, written_attempt
from te_convert.explain.model import Explanation
from te_convert.explain.trial import try_fusion
from te_convert.facts.sharing import module_names
from te_convert.match.candidate import Candidate, find_candidates
from te_convert.pipeline import observe
from te_convert.plan.choose import make_plan
from te_convert.plan.fusions import is_te
from te_convert.plan.model import Plan
from te_convert.plan.trace import CLAIMED, NOT_ASKED, REFUSED, Attempt, Trace
from te_convert.rules.registry import load_rules

ROOT = "(root)"
"""What the root module may be called."""


def explain_site(model: nn.Module, fqn: str, given: tuple[Scenario, ...], config: ConvertConfig, context: int) -> Explanation:
    """Everything that is known about one module, which stays as it is with the model around it.

    Raises:
        InputError: no such module, or the model fails on the inputs.
    """
    name = find_site(model, fqn)
    _, captured, notes = observe(model, given, config)
    trace = Trace(name)
    plan = make_plan(model, captured, config, notes, trace)
    candidates = find_candidates(model, captured, config.alignment)
    site = next(candidate for candidate in candidates if candidate.fqn == name)
    decision = next((found for found in plan if found.fqn == name), None)
    fusion = next((found for found in plan.fusions if decision is not None and found.fqn == decision.fused_into), None)
    attempts, facts = _attempts(site, candidates, dict(model.named_modules()), captured, trace, plan)
    recording = next((found for found in captured.recordings if found.call_counts()[name]), None)
    lines, hidden = ((), 0) if recording is None else lines_around(recording, name, context)
    return Explanation(
        fqn=name,
        aliases=site.aliases,
        class_name=f"{type(site.module).__module__}.{type(site.module).__qualname__}",
        decision=decision,
        members=() if fusion is None else tuple((member.role, member.fqn) for member in fusion.members),
        parameters={key: _describe(value, site.ties.get(key, ())) for key, value in site.parameters.items()},
        calls={found.scenario.name: found.call_counts()[name] for found in captured.recordings},
        arguments=site.calls[0].given if site.calls else (),
        facts=facts,
        source="" if recording is None else describe_source(recording, plan, name),
        companions={} if recording is None else companions(recording, plan, name, dict(model.named_modules())),
        attempts=tuple(attempts),
        trial=None if fusion is None or is_meta(model) else try_fusion(model, captured, plan, fusion.fqn),
        scenario="" if recording is None else recording.scenario.name,
        graph=lines,
        hidden=hidden,
        notes=plan.notes,
    )


def find_site(model: nn.Module, name: str) -> str:
    """The canonical name of a module that is called by any of its names.

    Raises:
        InputError: no such module; the message names those that are spelt like it.
    """
    wanted = "" if name in ("", ROOT) else name
    names = module_names(model)
    known = {alias: found[0] for found in names.values() for alias in found}
    if wanted in known:
        return known[wanted]
    holder, _, last = wanted.rpartition(".")
    if holder in known and isinstance(getattr(model.get_submodule(holder), last, None), torch.Tensor):
        raise InputError(f"{name} is a tensor of {holder or ROOT}, not a module", f"explain {holder or ROOT}")
    close = difflib.get_close_matches(wanted, [alias for alias in known if alias], n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}?" if close else "te-convert explain MODEL --list names all sites"
    raise InputError(f"{type(model).__name__} has no module {name!r}", hint)


@float32_by_default()
def _attempts(
    site: Candidate,
    candidates: list[Candidate],
    modules: dict[str, nn.Module],
    captured: Capture,
    trace: Trace,
    plan: Plan,
) -> tuple[list[Attempt], dict[str, str]]:
    """In the order of a plan: called attention, single modules, blocks, fusions, written-out attention."""
    if is_te(site.module):  # of an earlier conversion: its rules are not asked again
        return [], {}
    attempts: list[Attempt] = []
    facts: dict[str, str] = {}
    attends = next(site.module.children(), None) is not None or not site.parameters
    if attends:
        first, facts = attention_attempt(site, modules, captured, candidates)
        attempts.append(first)
    if site.parameters:
        leaves, found = leaf_attempts(site, load_rules())
        attempts, facts = [*attempts, *leaves], {**facts, **found}
    attempts += trace.attempts
    if attends:
        why = _taken(site.fqn, attempts, plan)
        last, found = (
            (Attempt("eager-attention", (site.fqn,), NOT_ASKED, miss=why), {}) if why else written_attempt(site, modules, captured)
        )
        attempts, facts = [*attempts, last], {**facts, **found}
    return attempts, facts


def _taken(fqn: str, attempts: list[Attempt], plan: Plan) -> str:
    """Why nobody asks whether a module writes its attention out, or ""."""
    for fusion in plan.fusions:
        if fusion.whole is not None and (fusion.whole in ("", fqn) or fqn.startswith(f"{fusion.whole}.")):
            return f"{fusion.rule} takes {fusion.whole or ROOT} as a whole"
    decided = (attempt for attempt in attempts if attempt.about == (fqn,) and attempt.result in (CLAIMED, REFUSED))
    rules = {"attention", *(rule.id for rule in load_rules())}
    return next((f"{attempt.rule} has decided" for attempt in decided if attempt.rule in rules), "")


def _describe(parameter: nn.Parameter, ties: tuple[str, ...]) -> str:
    try:
        words = f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
    except RuntimeError:  # a lazy parameter
        return "without a shape yet"
    words += "" if parameter.requires_grad else ", frozen"
    return words + (f", also {', '.join(ties)}" if ties else "")
