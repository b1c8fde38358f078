"""The tables of a report as plain text cells, shared by every renderer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from te_convert.plan.model import CONVERTING, Decision, Outcome
from te_convert.reasons import REASONS, Reason, ReasonCode
from te_convert.report.format import (
    NameGroup,
    clean,
    collapse_names,
    format_count,
    format_db,
    format_decibel,
    format_error,
    format_figures,
    format_name,
    format_percent,
    format_quantity,
    format_ratio,
    format_shapes,
)
from te_convert.report.model import Coverage, Site
from te_convert.verify.model import Figures, Parity, SiteParity
from te_convert.verify.recipe_figures import RecipeFigures, RecipeSite

AnySite: TypeAlias = Site | Decision
WORST = 5


@dataclass(frozen=True)
class Table:
    """Cells of clean text; ``code`` and ``right`` name the columns that hold identifiers and figures."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = ()
    code: frozenset[int] = frozenset()
    right: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ReasonEntry:
    """Sites that share one reason word for word."""

    kind: str
    names: tuple[NameGroup, ...]
    detail: str
    hint: str


@dataclass(frozen=True)
class ReasonGroup:
    """Every site that carries one reason code."""

    code: str
    meaning: str
    count: int
    entries: tuple[ReasonEntry, ...]


def without_empty_columns(table: Table) -> Table:
    """The table without the columns in which no row has a figure; the first column stays."""
    keep = [i for i in range(len(table.header)) if i == 0 or not table.rows or any(row[i] != "–" for row in table.rows)]
    places = {old: new for new, old in enumerate(keep)}
    return Table(
        tuple(table.header[i] for i in keep),
        tuple(tuple(row[i] for i in keep) for row in table.rows),
        frozenset(places[i] for i in table.code if i in places),
        frozenset(places[i] for i in table.right if i in places),
    )


def coverage_table(coverage: Coverage) -> Table:
    """Converted share by sites, parameters and FLOPs."""
    c = coverage
    cells = tuple(
        (name, show(part), show(total), format_percent(part, total))
        for name, show, part, total in (
            ("sites", format_count, c.sites, c.sites_total),
            ("parameters", format_quantity, c.params, c.params_total),
            ("FLOPs", format_quantity, c.flops, c.flops_total),
        )
    )
    return Table(("by", "converted", "of", "share"), cells, right=frozenset({1, 2, 3}))


def converted_table(sites: Sequence[AnySite], recipe: str | None) -> Table:
    """Converted sites grouped by kind and replacement, repeated layers collapsed."""
    groups: dict[tuple[str, str], dict[str, AnySite]] = {}
    for site in sites:
        if site.outcome in CONVERTING:
            suffix = " (high precision)" if recipe is not None and site.precision == "high" else ""
            groups.setdefault((clean(site.kind), clean(site.replacement) + suffix), {})[site.fqn] = site
    rows: list[tuple[str, ...]] = []
    for (kind, replacement), members in groups.items():
        for group in collapse_names(members):
            found = [members[fqn] for fqn in group.members]
            params = format_quantity(sum(site.params for site in found))
            rows.append((kind, replacement, str(group), params, ran_words(found), worst_db(found)))
    header = ("kind", "replacement", "sites", "params", "ran", "SQNR dB")
    return Table(header, tuple(rows), frozenset({2}), frozenset({3, 4, 5}))


def reason_groups(sites: Sequence[AnySite], outcomes: Sequence[Outcome]) -> tuple[ReasonGroup, ...]:
    """Reasons of the sites with these outcomes, by code, most frequent first."""
    pairs: list[tuple[AnySite, Reason]] = []
    for site in sites:
        if site.outcome in outcomes:
            reasons = site.reasons or (() if site.outcome in CONVERTING else (Reason("no reason recorded", "", ""),))
            pairs.extend((site, why) for why in reasons)
    order = Counter(why.code for _, why in pairs).most_common()
    return tuple(_reason_group(code, [pair for pair in pairs if pair[1].code == code]) for code, _ in order)


def scenario_table(parity: Parity) -> Table:
    """Whole-model comparisons."""
    rows = tuple(
        (
            clean(f"{run.name} → {run.output}" if run.output else run.name),
            clean(run.dtype),
            "yes" if run.perturbed else "no",
            format_db(run.figures),
            format_error(run.figures.max_rel),
            format_ratio(run.error_ratio),
            clean(run.bound),
            verdict_word(run.passed),
        )
        for run in parity.scenarios
    )
    header = ("scenario", "dtype", "perturbed", "SQNR dB", "max rel", "error ratio", "bound", "verdict")
    return Table(header, rows, right=frozenset({3, 4, 5}))


def worst_sites_table(parity: Parity) -> Table:
    """The site comparisons that are farthest from equal, failed ones first."""
    rows = tuple(
        (
            format_name(site.fqn),
            clean(site.dtype),
            format_count(site.calls),
            format_db(site.figures),
            format_error(site.figures.max_rel),
            format_ratio(site.error_ratio),
            clean(site.bound),
            verdict_word(site.passed),
        )
        for site in sorted(parity.sites, key=_badness)[:WORST]
        if not (site.figures.bit_equal and site.passed)
    )
    header = ("site", "dtype", "calls", "SQNR dB", "max rel", "error ratio", "bound", "verdict")
    return Table(header, rows, frozenset({0}), frozenset({2, 3, 4, 5}))


def reverted_table(parity: Parity) -> Table:
    """Sites that verification put back, with the figures that condemned them."""
    rows = tuple((format_name(site.fqn), format_figures(site.figures), clean(site.why)) for site in parity.reverted)
    return Table(("site", "figures", "why"), rows, frozenset({0}))


def recipe_table(figures: RecipeFigures) -> Table:
    """The whole model in the emulated recipe."""
    rows = tuple(
        (
            clean(f"{run.name} → {run.output}" if run.output else run.name),
            format_decibel(run.sqnr_db),
            format_decibel(run.proposed_sqnr_db),
            f"SQNR >= {figures.min_sqnr_db:g} dB",
            verdict_word(run.proposed_sqnr_db >= figures.min_sqnr_db),
        )
        for run in figures.scenarios
    )
    header = ("scenario", "every site in it: SQNR dB", "as planned: SQNR dB", "bound", "verdict")
    return Table(header, rows, right=frozenset({1, 2}))


def recipe_sites_table(figures: RecipeFigures) -> Table:
    """The sites that lose most in the emulated recipe, repeated layers collapsed among those that stay out of it."""
    kept = [site for site in figures.sites if not site.high][:WORST]
    rows = [(format_name(s.fqn), *_recipe_cells([s]), "the recipe") for s in kept]
    high = {site.fqn: site for site in figures.high}
    for group in collapse_names(high):
        rows.append((str(group), *_recipe_cells([high[fqn] for fqn in group.members]), "high precision"))
    return Table(("site", "SQNR dB", "of the noise", "FLOPs", "runs in"), tuple(rows), frozenset({0}), frozenset({1, 2, 3}))


def _recipe_cells(sites: Sequence[RecipeSite]) -> tuple[str, str, str]:
    """Worst SQNR, and the sums of shares and of FLOPs."""
    shares = [site.share for site in sites if site.share is not None]
    share = f"{100 * sum(shares):.1f} %" if shares else "–"
    return format_decibel(min(site.sqnr_db for site in sites)), share, format_quantity(sum(site.flops for site in sites))


def sites_table(sites: Sequence[AnySite]) -> Table:
    """Every site on a row of its own."""
    rows = tuple(
        (
            format_name(site.fqn) + "".join(f" = {format_name(alias)}" for alias in site.aliases),
            clean(site.kind),
            site.outcome.value,
            clean(site.replacement or "–"),
            format_shapes(site.shapes) or "–",
            format_count(site.calls),
            ran_words([site]),
            "; ".join(_phrase(why) for why in site.reasons) or "–",
        )
        for site in sites
    )
    header = ("site", "kind", "outcome", "replacement", "shapes", "calls", "executed", "reasons")
    return Table(header, rows, frozenset({0}), frozenset({5, 6}))


def folded_sites_table(sites: Sequence[AnySite]) -> Table:
    """Every site, those that differ only in the numbers of their layers on one row; its names stand for exactly these sites.

    Reasons show as their codes: details often name a layer, and are listed by :func:`reason_groups`.
    """
    groups: dict[tuple[str, ...], dict[str, AnySite]] = {}
    plain = sites_table(sites)
    for site, row in zip(sites, plain.rows, strict=True):
        codes = ", ".join(dict.fromkeys(clean(why.code) for why in site.reasons)) or "–"
        key = (*row[1:7], codes, "" if not site.aliases else row[0])  # a site with several names keeps its row
        groups.setdefault(key, {})[site.fqn] = site
    rows: list[tuple[str, ...]] = []
    for key, members in groups.items():
        if key[-1]:
            rows.append((key[-1], *key[:-1], worst_db(list(members.values()))))
            continue
        for group in collapse_names(members):
            rows.append((str(group), *key[:-1], worst_db([members[fqn] for fqn in group.members])))
    header = (*plain.header[:7], "SQNR dB", plain.header[7])
    return Table(header, tuple((*row[:7], row[8], row[7]) for row in rows), frozenset({0}), frozenset({5, 6, 7}))


def verdict_word(passed: bool) -> str:
    """``passed`` or, loudly, ``FAILED``."""
    return "passed" if passed else "FAILED"


def _phrase(why: Reason) -> str:
    detail = clean(why.detail)
    return f"{clean(why.code)}: {detail}" if detail else clean(why.code)


def _reason_group(code: str, pairs: Sequence[tuple[AnySite, Reason]]) -> ReasonGroup:
    entries: dict[tuple[str, str, str], list[str]] = {}
    for site, why in pairs:
        key = (clean(site.kind), clean(why.detail), clean(why.hint))
        entries.setdefault(key, []).append(site.fqn)
    try:
        meaning = REASONS[ReasonCode(code)].meaning
    except ValueError:
        meaning = ""
    return ReasonGroup(
        code=clean(code),
        meaning=meaning,
        count=len({site.fqn for site, _ in pairs}),
        entries=tuple(ReasonEntry(kind, collapse_names(fqns), detail, hint) for (kind, detail, hint), fqns in entries.items()),
    )


def ran_words(sites: Sequence[AnySite]) -> str:
    """Executions during verification: their sum, or how many sites never ran."""
    counts = [site.executed for site in sites if isinstance(site, Site) and site.executed is not None]
    if not counts:
        return "–"
    never = counts.count(0)
    if not never:
        return format_count(sum(counts))
    return "never" if never == len(counts) else f"{never} never"


def worst_db(sites: Sequence[AnySite]) -> str:
    """The lowest SQNR among the sites that were compared."""
    compared = [site.parity for site in sites if isinstance(site, Site) and site.parity is not None]
    return format_db(min(compared, key=_badness).figures) if compared else "–"


def _badness(site: SiteParity) -> tuple[bool, bool, float]:
    return (site.passed, site.figures.bit_equal, _sortable_db(site.figures))


def _sortable_db(figures: Figures) -> float:
    return -math.inf if math.isnan(figures.sqnr_db) else figures.sqnr_db
