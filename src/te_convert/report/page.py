"""What the HTML page shows beyond the shared summary: tree, bars, plots, grouped reasons with anchors, checks, estimate, footer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from te_convert.capture.run import SEED
from te_convert.plan.model import CONVERTING, Outcome, Plan
from te_convert.report.charts import Bar, Meter, Plot, coverage_bars, parity_plot, recipe_plot, scenario_meter
from te_convert.report.format import clean, format_value
from te_convert.report.generic import Block, blocks_of
from te_convert.report.model import Report, measure_coverage
from te_convert.report.summary import Summary, summarise, summarise_plan
from te_convert.report.tables import AnySite, ReasonGroup, Table, folded_sites_table, reason_groups
from te_convert.report.tree import Branch, build_tree

OUTCOME_WORDS = {
    "CONVERTED": "runs on a TE module of its own",
    "FUSED": "part of a larger TE module",
    "REFUSED": "left as it was, with reasons",
    "EXCLUDED": "left as it was, as asked",
    "NO_MATCH": "nothing that TE replaces",
}
"""The outcomes in the order of a legend."""

SEED_WORDS = (
    f"Every recorded run starts from seed {SEED}; what verification draws itself (inputs, moved parameters, directions of "
    "gradients) comes from constants in its source. The same versions on the same machine draw the same numbers."
)


@dataclass(frozen=True)
class ReasonSection:
    """Reasons of the sites with some outcomes; each group with the id of its place in the page."""

    title: str
    intro: str
    groups: tuple[tuple[str, ReasonGroup], ...]


@dataclass(frozen=True)
class Page:
    """Everything that the template reads.

    Attributes:
        anchors: for an outcome and a reason code, the id of the code's group.
        meters: one for each row of the summary's table of scenarios.
        sites: every site, repeated layers on one row.
    """

    summary: Summary
    is_plan: bool
    tree: Branch
    bars: tuple[Bar, ...]
    parity: Plot | None
    meters: tuple[Meter | None, ...]
    recipe: Plot | None
    reasons: tuple[ReasonSection, ...]
    anchors: Mapping[tuple[Outcome, str], str]
    sites: Table
    count: int
    environment: tuple[tuple[str, str], ...]
    timings: tuple[tuple[str, str], ...]
    doctor: Table
    doctor_verdict: str
    estimate: tuple[Block, ...]
    command: str


def page_of_report(report: Report) -> Page:
    """The page of a conversion's report."""
    figures = report.recipe_figures
    verdict, checks = _doctor(report.doctor)
    reasons, anchors = _reasons(report.sites)
    return Page(
        summary=summarise(report),
        is_plan=False,
        tree=build_tree(report.sites, report.model_class),
        bars=coverage_bars(report.sites, report.coverage),
        parity=parity_plot(report.sites, report.parity),
        meters=tuple(map(scenario_meter, report.parity.scenarios)),
        recipe=None if figures is None else recipe_plot(report.sites, figures),
        reasons=reasons,
        anchors=anchors,
        sites=folded_sites_table(report.sites),
        count=len(report.sites),
        environment=tuple((clean(key).replace("_", " "), format_value(value)) for key, value in report.environment.items()),
        timings=tuple((clean(stage), f"{seconds:.1f} s") for stage, seconds in report.timings_s.items()),
        doctor=checks,
        doctor_verdict=verdict,
        estimate=blocks_of(report.estimate),
        command=clean(report.command),
    )


def page_of_plan(plan: Plan, command: str = "", estimate: Mapping[str, Any] | None = None) -> Page:
    """The page of a plan, which nothing was run for."""
    reasons, anchors = _reasons(plan.decisions)
    return Page(
        summary=summarise_plan(plan),
        is_plan=True,
        tree=build_tree(plan.decisions, plan.model_class),
        bars=coverage_bars(plan.decisions, measure_coverage(plan)),
        parity=None,
        meters=(),
        recipe=None,
        reasons=reasons,
        anchors=anchors,
        sites=_without_run(folded_sites_table(plan.decisions)),
        count=len(plan.decisions),
        environment=(),
        timings=(),
        doctor=Table(()),
        doctor_verdict="",
        estimate=blocks_of(estimate),
        command=clean(command),
    )


def _without_run(table: Table) -> Table:
    """A table of sites without the columns that only a run can fill: executed and SQNR."""
    keep = [index for index in range(len(table.header)) if index not in (6, 7)]
    rows = tuple(tuple(row[index] for index in keep) for row in table.rows)
    return Table(tuple(table.header[index] for index in keep), rows, frozenset({0}), frozenset({5}))


def _reasons(sites: Sequence[AnySite]) -> tuple[tuple[ReasonSection, ...], dict[tuple[Outcome, str], str]]:
    passed_over = [site for site in sites if site.outcome is Outcome.NO_MATCH and site.reasons]
    parts = (
        ("refused", "Not converted", "", sites, (Outcome.REFUSED, Outcome.EXCLUDED)),
        ("advice", "Converted, with advice", "", sites, CONVERTING),
        (
            "larger",
            "Larger replacements that did not apply",
            "What kept a whole module from becoming one TE module; the sites inside it were decided one by one.",
            passed_over,
            (Outcome.NO_MATCH,),
        ),
    )
    sections: list[ReasonSection] = []
    anchors: dict[tuple[Outcome, str], str] = {}
    for slug, title, intro, among, outcomes in parts:
        groups = [(f"{slug}-{index}", group) for index, group in enumerate(reason_groups(among, outcomes), 1)]
        anchors.update({(outcome, group.code): anchor for outcome in outcomes for anchor, group in groups})
        if groups:
            sections.append(ReasonSection(title, intro, tuple(groups)))
    return tuple(sections), anchors


def _doctor(checks: Sequence[Mapping[str, Any]]) -> tuple[str, Table]:
    """A verdict and a table of doctor's checks; a check that neither holds nor fails only states a fact."""
    if not checks:
        return "", Table(())
    marks = {True: "holds", False: "FAILED"}
    rows = tuple(
        (
            clean(check.get("name", "")),
            marks.get(check["ok"], "fact") if isinstance(check.get("ok"), bool) else "fact",
            *(clean(check.get(key, "")) or "–" for key in ("fact", "consequence", "fix")),
        )
        for check in checks
    )
    failed = [row[0] for row in rows if row[1] == "FAILED"]
    verdict = f"{len(failed)} of {len(rows)} checks failed: {', '.join(failed)}" if failed else f"none of {len(rows)} checks failed"
    return verdict, Table(("check", "verdict", "fact", "consequence", "fix"), rows)
