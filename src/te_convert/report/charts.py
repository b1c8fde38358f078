"""What the plots of a page show, as numbers: bars whose segments add up to the report's totals, and points against their bounds.

Positions are per cent of the drawing area, from its left and its top.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from te_convert.plan.model import Outcome
from te_convert.report.format import clean, format_count, format_decibel, format_name, format_percent, format_quantity, plural
from te_convert.report.model import Coverage
from te_convert.report.tables import AnySite
from te_convert.verify.model import Figures, Parity, ScenarioParity
from te_convert.verify.recipe_figures import RecipeFigures

T = TypeVar("T")
ELSEWHERE = "ELSEWHERE"
"""Parameters or FLOPs of the model that belong to no site."""

MAX_LABELS = 9
_SQNR_BOUND = re.compile(r"SQNR (?:>=|≥) (\d+(?:\.\d+)?) dB")
_MOST = re.compile(r"(?:error ratio|relative error of every gradient|relative difference of every loss) (?:<=|≤) (\d\S*)")
_METER_DB = 160.0  # float32 itself is 144 dB: what is above is equal for every purpose


@dataclass(frozen=True)
class Segment:
    """A part of a bar: its outcome (or :data:`ELSEWHERE`), its amount and share of the total, and where it is drawn.

    ``share`` is empty where parts overlap, since they would add up to more than everything.
    """

    name: str
    amount: int
    shown: str
    share: str
    left: float
    width: float


@dataclass(frozen=True)
class Bar:
    """One measure of coverage; the segments' amounts add up to ``total``, or to more where ``note`` says why."""

    name: str
    verdict: str
    total: int
    segments: tuple[Segment, ...]
    note: str = ""


@dataclass(frozen=True)
class Line:
    """A bound, drawn across the plot."""

    top: float
    label: str
    style: str


@dataclass(frozen=True)
class Series:
    """Points of one appearance: ``path`` draws each as a stroke of no length, which a round or square cap makes visible."""

    style: str
    label: str
    count: int
    path: str


@dataclass(frozen=True)
class Plot:
    """Points in module order against dB."""

    title: str
    summary: str
    y_ticks: tuple[tuple[float, str], ...]
    x_ticks: tuple[tuple[float, str], ...]
    lines: tuple[Line, ...]
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Meter:
    """One figure as a bar with its bound as a mark; ``better`` says on which side of the mark it should end."""

    value: float
    bound: float
    passed: bool
    label: str


@dataclass(frozen=True)
class _Point:
    name: str
    db: float
    style: str


def coverage_bars(sites: Sequence[AnySite], coverage: Coverage) -> tuple[Bar, ...]:
    """Sites that a rule looked at, parameters and FLOPs, by outcome."""
    looked_at = {outcome: sum(site.outcome is outcome for site in sites) for outcome in Outcome}
    looked_at[Outcome.NO_MATCH] = 0
    params = {outcome: sum(site.params for site in sites if site.outcome is outcome) for outcome in Outcome}
    flops = {outcome: sum(site.flops for site in sites if site.outcome is outcome) for outcome in Outcome}
    return (
        _bar("sites", looked_at, coverage.sites, coverage.sites_total),
        _bar("parameters", params, coverage.params, coverage.params_total),
        _bar("FLOPs", flops, coverage.flops, coverage.flops_total),
    )


def _bar(name: str, amounts: dict[Outcome, int], covered: int, total: int) -> Bar:
    show = format_count if name == "sites" else format_quantity
    counted = sum(amounts.values())
    rows = [*((outcome.value, amount) for outcome, amount in amounts.items()), (ELSEWHERE, max(total - counted, 0))]
    whole = max(total, counted)
    segments: list[Segment] = []
    before = 0
    for label, amount in rows:
        if amount:
            left, width = 100 * before / whole, 100 * amount / whole
            share = format_percent(amount, total) if counted <= total else ""
            segments.append(Segment(label, amount, show(amount), share, round(left, 3), round(width, 3)))
            before += amount
    verdict = f"{show(covered)} of {show(total)} ({format_percent(covered, total)})" if total else "none counted"
    twice = f"at least {show(counted - total)} belong to several sites (tied or shared) and are drawn at each of them"
    note = twice if counted > total else f"{ELSEWHERE} belongs to no site" if counted < total else ""
    return Bar(name, verdict, total, tuple(segments), note)


def parity_plot(sites: Sequence[AnySite], parity: Parity) -> Plot | None:
    """SQNR of each site that was compared, in module order, against the bound; None when there is none to show."""
    found = _in_order(sites, {site.fqn: site for site in parity.sites})
    if not found:
        return None
    points = [_Point(site.fqn, _decibel(site.figures), "point" if site.passed else "failed") for site in found]
    bounds = sorted({bound for site in found if (bound := sqnr_bound(site.bound)) is not None})
    failed = sum(not site.passed for site in found)
    equal = sum(site.figures.bit_equal for site in found)
    worst = _worst(points)
    summary = f"{plural(len(found), 'site')} compared one by one: {format_count(equal)} bit-equal, {format_count(failed)} failed"
    if worst.db != math.inf:
        summary += f"; lowest {format_decibel(worst.db)} dB at {format_name(worst.name)}"
    labels = {"point": "passed", "failed": "FAILED"}
    lines = [(bound, f"bound {bound:g} dB", "bound") for bound in bounds]
    return _plot("SQNR of each site against its own original", summary, points, lines, labels)


def recipe_plot(sites: Sequence[AnySite], figures: RecipeFigures) -> Plot | None:
    """SQNR of each site in the emulated recipe, in module order, against the bounds of ``min_sqnr``."""
    found = _in_order(sites, {site.fqn: site for site in figures.sites})
    if not found:
        return None
    points = [_Point(site.fqn, site.sqnr_db, "high" if site.high else "point") for site in found]
    worst = _worst(points)
    summary = (
        f"{plural(len(found), 'site')} emulated in {clean(figures.emulated)}, {format_count(len(figures.high))} to stay in high "
        f"precision; lowest {format_decibel(worst.db)} dB at {format_name(worst.name)}"
    )
    lines = [
        (figures.min_site_sqnr_db, f"each site ≥ {figures.min_site_sqnr_db:g} dB", "bound"),
        (figures.min_sqnr_db, f"--min-sqnr {figures.min_sqnr_db:g} dB (model)", "wanted"),
    ]
    labels = {"point": "runs in the recipe", "high": "stays in high precision"}
    return _plot(f"SQNR of each site in {clean(figures.emulated)}", summary, points, lines, labels)


def scenario_meter(run: ScenarioParity) -> Meter | None:
    """How far a run of the whole model is from its bound; None where the bound is no single number.

    SQNR is drawn on 0 to 160 dB.  An error is drawn as a share of twice its bound, so the mark is in the middle.
    """
    bound = sqnr_bound(run.bound)
    if bound is not None:
        value = _METER_DB if run.figures.bit_equal else run.figures.sqnr_db
        return _meter(value, bound, _METER_DB, run.passed, f"{_db_words(run.figures)}, bound {bound:g} dB")
    match = _MOST.search(run.bound)
    figure = run.error_ratio if run.error_ratio is not None else run.figures.max_rel
    if match is None or figure is None:
        return None
    most = float(match[1].rstrip(",;"))
    return _meter(figure, most, 2 * most, run.passed, f"{figure:.3g} of at most {most:g}")


def _meter(value: float, bound: float, whole: float, passed: bool, label: str) -> Meter:
    share = 0.0 if math.isnan(value) else min(max(value / whole, 0.0), 1.0)
    return Meter(round(100 * share, 1), round(100 * bound / whole, 1), passed, label)


def sqnr_bound(bound: str) -> float | None:
    """The number of dB in a bound's words, or None when it is not about SQNR."""
    match = _SQNR_BOUND.search(bound)
    return None if match is None else float(match[1])


def _in_order(sites: Sequence[AnySite], found: dict[str, T]) -> list[T]:
    """Comparisons in module order; those of names that no site has come last."""
    places = dict.fromkeys(place for site in sites for place in (site.fused_into, site.fqn) if place is not None)
    return [found[fqn] for fqn in dict.fromkeys((*places, *found)) if fqn in found]


def _worst(points: Sequence[_Point]) -> _Point:
    return min(points, key=lambda point: -math.inf if math.isnan(point.db) else point.db)


def _decibel(figures: Figures) -> float:
    return math.inf if figures.bit_equal else figures.sqnr_db


def _db_words(figures: Figures) -> str:
    return "bit-equal" if figures.bit_equal else f"{format_decibel(figures.sqnr_db)} dB"


def _plot(
    title: str, summary: str, points: Sequence[_Point], bounds: Sequence[tuple[float, str, str]], labels: dict[str, str]
) -> Plot:
    finite = [point.db for point in points if math.isfinite(point.db)] + [bound for bound, _, _ in bounds]
    scale = _Scale.over(finite, equal=any(point.db == math.inf for point in points))
    step = 100 / len(points)
    paths: dict[str, list[str]] = {style: [] for style in labels}
    for index, point in enumerate(points):
        paths[point.style].append(f"M{(index + 0.5) * step:.4g} {scale.top(point.db):.4g}h0")
    return Plot(
        title,
        summary,
        scale.ticks(),
        _layer_ticks([point.name for point in points]),
        tuple(Line(scale.top(bound), clean(label), style) for bound, label, style in bounds),
        tuple(Series(style, labels[style], len(path), "".join(path)) for style, path in paths.items() if path),
    )


@dataclass(frozen=True)
class _Scale:
    """dB to per cent from the top; the topmost part is for what is bit-equal, and has no dB."""

    low: float
    high: float
    equal: bool

    @classmethod
    def over(cls, values: Iterable[float], equal: bool) -> _Scale:
        """A scale in round tens around the values."""
        known = list(values) or [0.0, 100.0]
        low, high = math.floor(min(known) / 10) * 10 - 5, math.ceil(max(known) / 10) * 10 + 5
        return cls(low, high, equal)

    def top(self, db: float) -> float:
        """Where a number of dB is drawn; NaN and minus infinity lie at the bottom."""
        if db == math.inf:
            return 4.0
        start = 14.0 if self.equal else 3.0
        share = 0.0 if not math.isfinite(db) else (db - self.low) / (self.high - self.low)
        return round(97.0 - share * (97.0 - start), 2)

    def ticks(self) -> tuple[tuple[float, str], ...]:
        """Round numbers, at most seven."""
        step = next(width for width in (5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if (self.high - self.low) / width <= 6)
        first = math.ceil(self.low / step) * step
        found = [(self.top(value), f"{value:g}") for value in range(int(first), int(self.high) + 1, step)]
        return tuple([(self.top(math.inf), "equal"), *found] if self.equal else found)


def _layer_ticks(names: Sequence[str]) -> tuple[tuple[float, str], ...]:
    """Where a layer's first site is, and the layer's number; evenly thinned out to :data:`MAX_LABELS`."""
    starts: list[tuple[float, str]] = []
    before = None
    for index, name in enumerate(names):
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.isascii() and part.isdigit()), None)
        layer = None if place is None else parts[: place + 1]
        if layer is not None and layer != before:
            starts.append((round(100 * index / len(names), 2), clean(layer[-1])))
        before = layer
    return tuple(starts[:: max(1, math.ceil(len(starts) / MAX_LABELS))])
