"""What a report says, once, for every renderer: the verdict in words, the lists, and the tables of :mod:`.tables`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from te_convert.plan.model import CONVERTING, Outcome, Plan
from te_convert.reasons import ReasonCode
from te_convert.report.format import clean, collapse_names, format_count, format_percent, format_value, plural
from te_convert.report.model import Report, measure_coverage
from te_convert.report.tables import (
    AnySite,
    ReasonGroup,
    Table,
    converted_table,
    coverage_table,
    reason_groups,
    recipe_sites_table,
    recipe_table,
    reverted_table,
    scenario_table,
    sites_table,
    worst_sites_table,
)
from te_convert.verify.model import Parity
from te_convert.verify.recipe_figures import RecipeFigures

NOTHING_RUNS = "0 sites would run on Transformer Engine"
PLAN_VERIFIES_NOTHING = "a plan changes nothing and verifies nothing; converting the model checks parity"
NO_TABLE = Table(())
_STOPPED = (Outcome.REFUSED, Outcome.EXCLUDED)


@dataclass(frozen=True)
class Summary:
    """The content of a report or a plan, as clean text.

    Attributes:
        tone: "good", "warn" or "bad", for the headline's colour.
        facts: label and value of what was converted, how and where.
        refused: reasons of the sites that stay as they are.
        advice: what to know about sites that were converted.
        parity_lines: the verdict and what the tables cannot say; empty for a plan.
        recipe_lines: what emulating the recipe means and proposes; empty without it.
    """

    title: str
    headline: str
    tone: str
    warnings: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    coverage: Table
    outcomes: tuple[tuple[str, int], ...]
    converted: Table
    refused: tuple[ReasonGroup, ...]
    advice: tuple[ReasonGroup, ...]
    no_match: tuple[tuple[str, int], ...]
    parity_lines: tuple[str, ...]
    scenarios: Table
    worst_sites: Table
    reverted: Table
    not_verified: tuple[str, ...]
    notes: tuple[str, ...]
    environment: str
    timings: str
    sites: Table
    recipe_lines: tuple[str, ...] = ()
    recipe: Table = NO_TABLE
    recipe_sites: Table = NO_TABLE

    @property
    def outcome_line(self) -> str:
        """``CONVERTED 72 · REFUSED 2``: outcomes that occur."""
        return " · ".join(f"{name} {format_count(number)}" for name, number in self.outcomes if number) or "no sites"


def summarise(report: Report) -> Summary:
    """The content of a conversion's report."""
    parity = report.parity
    return Summary(
        title=f"te_convert report: {clean(report.model_class)}",
        headline=headline(report),
        tone=_tone(report),
        facts=(
            ("model", clean(report.model_class)),
            ("recipe", recipe_words(report.recipe)),
            ("backend", " – ".join(filter(None, (clean(report.backend), clean(report.backend_reason))))),
            ("scenarios", _scenario_words(report.scenarios)),
        ),
        coverage=coverage_table(report.coverage),
        parity_lines=_parity_lines(report),
        scenarios=scenario_table(parity),
        worst_sites=worst_sites_table(parity),
        reverted=reverted_table(parity),
        warnings=_lines(report.warnings),
        not_verified=_lines(report.not_verified),
        notes=_lines(tuple(dict.fromkeys((*report.notes, *parity.notes)))),
        environment=" · ".join(f"{clean(key)} {format_value(value)}" for key, value in report.environment.items()),
        timings=" · ".join(f"{clean(stage)} {seconds:.1f} s" for stage, seconds in report.timings_s.items()),
        **_site_parts(report.sites, report.recipe),
        **_recipe_parts(report.recipe_figures),
    )


def summarise_plan(plan: Plan) -> Summary:
    """The content of a plan: what a conversion would do."""
    coverage = measure_coverage(plan)
    if coverage.sites:
        verdict = f"would convert {format_count(coverage.sites)} of {plural(coverage.sites_total, 'site')}"
    else:
        verdict = _nothing_runs(plan.decisions)
    summary = Summary(
        title=f"te_convert plan: {clean(plan.model_class)}",
        headline=f"{verdict} · nothing was changed, nothing was verified",
        tone="good" if coverage.sites else "warn",
        facts=(
            ("model", clean(plan.model_class)),
            ("recipe", recipe_words(plan.recipe)),
            ("scenarios", _scenario_words(plan.scenarios)),
        ),
        coverage=coverage_table(coverage),
        parity_lines=(),
        scenarios=Table(()),
        worst_sites=Table(()),
        reverted=Table(()),
        warnings=(),
        not_verified=(PLAN_VERIFIES_NOTHING,),
        notes=_lines(plan.notes),
        environment="",
        timings="",
        **_site_parts(plan.decisions, plan.recipe),
    )
    table = summary.converted  # without the columns that only a run can fill
    return replace(summary, converted=replace(table, header=table.header[:4], rows=tuple(row[:4] for row in table.rows)))


def headline(report: Report) -> str:
    """The verdict in one line: what was converted, on which backend it was compared, what did not run."""
    reverted = len(report.parity.reverted)
    put_back = [f"{plural(reverted, 'site')} put back after failing parity"] if reverted else []
    if not report.converted:
        return " · ".join([_nothing_runs(report.sites), "the model was left unchanged", *put_back])
    done = f"converted {format_count(report.coverage.sites)} of {plural(report.coverage.sites_total, 'site')}"
    ran_te = report.parity.backend == "te" and report.parity.status != "not-verified"
    kernels = [] if ran_te else ["nothing ran on TE kernels"]
    return " · ".join([done, parity_words(report.parity), *put_back, *kernels])


def parity_words(parity: Parity) -> str:
    """The verdict of verification with the backend that it was reached on."""
    where = f"{'Transformer Engine' if parity.backend == 'te' else 'reference twins'} ({clean(parity.device)})"
    if parity.status == "passed":
        return f"parity passed on {where}"
    if parity.status == "failed":
        return f"parity FAILED on {where}"
    if parity.status == "slice":
        return f"parity of a shallow model passed on {where}, the whole model did not run"
    if parity.status == "sites-only":
        failed = sum(not site.passed for site in parity.sites)
        sites = f"{plural(failed, 'site')} FAILED alone" if failed else "each site passed alone"
        return f"{sites} on {where}, the whole model was not verified"
    return "not verified"


def recipe_words(recipe: str | None) -> str:
    """The recipe's name; no recipe means high precision."""
    return "none (high precision)" if recipe is None else clean(recipe)


def _nothing_runs(sites: Sequence[AnySite]) -> str:
    already = sum(any(why.code == ReasonCode.MODULE_ALREADY_TE.value for why in site.reasons) for site in sites)
    if not already:
        return NOTHING_RUNS
    return f"0 further sites would run on Transformer Engine · {plural(already, 'site')} already Transformer Engine's"


def _tone(report: Report) -> str:
    if report.parity.status == "failed":
        return "bad"
    clear = report.converted and report.parity.passed and not report.warnings and not report.parity.reverted
    return "good" if clear else "warn"


def _parity_lines(report: Report) -> tuple[str, ...]:
    parity = report.parity
    if not report.converted and not (parity.scenarios or parity.sites or parity.reverted):
        return ("nothing was converted, so there is nothing to compare",)
    lines = [parity_words(parity)]
    if parity.sites:
        compared = f"{plural(len(parity.sites), 'site')} compared one by one with the original module"
        equal = sum(site.figures.bit_equal for site in parity.sites)
        passed = sum(site.passed for site in parity.sites)
        lines.append(f"{compared}: {format_count(passed)} passed, {format_count(equal)} bit-equal")
        if any(site.random_input for site in parity.sites):
            lines.append(f"{plural(sum(site.random_input for site in parity.sites), 'site')} compared on random input")
    never = [site.fqn for site in report.sites if site.executed == 0]
    if never:
        names = ", ".join(map(str, collapse_names(never)))
        lines.append(f"{plural(len(never), 'converted site')} never ran during verification: {names}")
    return tuple(lines)


class _RecipeParts(TypedDict, total=False):
    recipe_lines: tuple[str, ...]
    recipe: Table
    recipe_sites: Table


def _recipe_parts(figures: RecipeFigures | None) -> _RecipeParts:
    if figures is None:
        return {}
    total, high = sum(site.flops for site in figures.sites), sum(site.flops for site in figures.high)
    kept = len(figures.sites) - len(figures.high)
    lines = [
        f"{figures.emulated} emulated in float32, forward only, against high precision",
        f"{format_count(kept)} of {plural(len(figures.sites), 'site')} with matrix products run in it, "
        f"with {format_percent(total - high, total)} of their FLOPs"
        + ("; the others stay in high precision" if figures.high else ""),
        f"bounds: model {figures.min_sqnr_db:g} dB, each site {figures.min_site_sqnr_db:g} dB (min_sqnr)",
    ]
    return {
        "recipe_lines": _lines((*lines, *figures.notes)),
        "recipe": recipe_table(figures),
        "recipe_sites": recipe_sites_table(figures),
    }


class _SiteParts(TypedDict):
    outcomes: tuple[tuple[str, int], ...]
    converted: Table
    refused: tuple[ReasonGroup, ...]
    advice: tuple[ReasonGroup, ...]
    no_match: tuple[tuple[str, int], ...]
    sites: Table


def _site_parts(sites: Sequence[AnySite], recipe: str | None) -> _SiteParts:
    no_match = Counter(clean(site.class_name) for site in sites if site.outcome is Outcome.NO_MATCH)
    return {
        "outcomes": tuple((o.value, sum(site.outcome is o for site in sites)) for o in Outcome),
        "converted": converted_table(sites, recipe),
        "refused": reason_groups(sites, _STOPPED),
        "advice": reason_groups(sites, CONVERTING),
        "no_match": tuple(no_match.most_common()),
        "sites": sites_table(sites),
    }


def _scenario_words(scenarios: Sequence[str]) -> str:
    return ", ".join(map(clean, scenarios)) or "none: no run of the model was recorded"


def _lines(items: Sequence[str]) -> tuple[str, ...]:
    return tuple(clean(item) for item in items)
