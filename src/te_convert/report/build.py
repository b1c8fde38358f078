"""The report of a conversion, from its plan and what verification found."""

from __future__ import annotations

from collections.abc import Mapping

from te_convert.config import ConvertConfig
from te_convert.plan.model import Plan
from te_convert.reasons import ReasonCode, reason
from te_convert.report.model import Report, build_sites, measure_coverage
from te_convert.runtime.backend import Backend
from te_convert.runtime.doctor import brief, brief_checks
from te_convert.runtime.probe import describe_environment
from te_convert.runtime.recipes import why_not_here
from te_convert.verify.model import Parity
from te_convert.verify.recipe_figures import RecipeFigures

_OPTIONAL = {
    "gradients": "gradients",
    "generate": "generate() with a cache",
    "padded left": "padded batches",
}
"""Scenario → what stays unverified without it."""


def report_of(
    plan: Plan,
    parity: Parity,
    config: ConvertConfig,
    backend: Backend,
    timings: Mapping[str, float],
    figures: RecipeFigures | None = None,
) -> Report:
    """The report of a plan that was carried out and of what its verification found."""
    return Report(
        model_class=plan.model_class,
        converted=bool(plan.converting),
        sites=build_sites(plan, parity),
        parity=parity,
        coverage=measure_coverage(plan),
        recipe=plan.recipe,
        backend=backend.name,
        backend_reason=backend.reason,
        scenarios=plan.scenarios,
        environment={**describe_environment(), "doctor": brief()},
        doctor=brief_checks(),
        not_verified=_not_verified(plan, parity, config, figures),
        notes=tuple(dict.fromkeys((*plan.notes, *parity.notes))),
        warnings=_warnings(plan, parity, figures),
        timings_s={stage: round(seconds, 4) for stage, seconds in timings.items()},
        recipe_figures=figures,
    )


def _not_verified(plan: Plan, parity: Parity, config: ConvertConfig, figures: RecipeFigures | None) -> tuple[str, ...]:
    lines = []
    if not plan.converting:
        return ()
    if not config.verify:
        lines.append("parity: verify=False was asked for")
    if parity.status == "sites-only":
        lines.append("the whole model: each site was compared alone")
    if parity.status == "slice":
        lines.append("the whole model: a shallow one with the weights of some layers ran; every tensor's bytes are in the ledger")
    if parity.backend == "reference":
        lines.append("Transformer Engine's kernels: the pure-PyTorch twins ran, which proves the mapping and the weights")
    if plan.recipe not in (None, "bf16"):
        emulated = "only its forward was emulated, in float32 on the example inputs"
        plain = "everything ran in the model's own precision"
        lines.append(f"the recipe {plan.recipe}: {plain if figures is None else emulated}")
    compared = {s.name.rpartition("[")[2].rstrip("]") for s in parity.scenarios}
    lines += [text for name, text in _OPTIONAL.items() if name not in compared]
    lines.append("training steps: te_convert.verify(..., steps=N) compares them")
    return tuple(lines)


def _warnings(plan: Plan, parity: Parity, figures: RecipeFigures | None) -> tuple[str, ...]:
    lines = _reverted_lines(parity)
    lacking = why_not_here(plan.recipe)
    if lacking and plan.converting:
        why = reason(ReasonCode.RECIPE_UNAVAILABLE, lacking)
        lines.append(f"{why.code}: {why.detail}; {why.hint}")
    if figures is not None and figures.scenarios and not figures.passed:
        lines.append(f"in the recipe {plan.recipe} the model has {figures.sqnr_db:.1f} dB, below {figures.min_sqnr_db:g} dB")
    if parity.status == "failed":
        lines.append("parity failed")
    idle = [fqn or "the root" for fqn, count in parity.executed.items() if count == 0]
    if idle and parity.status == "passed":
        lines.append(f"{len(idle)} converted sites never ran in verification: {', '.join(idle[:5])}")
    if not plan.converting:
        lines.append("nothing was converted: 0 sites would run on Transformer Engine")
    return tuple(lines)


def _reverted_lines(parity: Parity) -> list[str]:
    """One line per cause: hundreds of sites can be put back for the same one."""
    by_cause: dict[str, list[str]] = {}
    for site in parity.reverted:
        by_cause.setdefault(site.why, []).append(site.fqn or "the root")
    return [
        f"{fqns[0]} was put back: {why}" if len(fqns) == 1 else f"{len(fqns)} sites were put back ({fqns[0]}, ...): {why}"
        for why, fqns in by_cause.items()
    ]
