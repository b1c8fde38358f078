from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from te_convert.plan.model import Outcome
from te_convert.report.charts import (
    ELSEWHERE,
    MAX_LABELS,
    Bar,
    Plot,
    coverage_bars,
    parity_plot,
    recipe_plot,
    scenario_meter,
    sqnr_bound,
)
from te_convert.report.html import render_html
from te_convert.report.model import Coverage, Report
from te_convert.verify import tolerance
from te_convert.verify.model import Figures, Parity, ScenarioParity
from te_convert.verify.recipe_figures import RecipeFigures, RecipeSite
from tests.report.sample_reports import BOUND, CLOSE, EQUAL, FAR, SAMPLES, linear, other, parity_failed, site_parity, success


def bars(report: Report) -> dict[str, Bar]:
    return {bar.name: bar for bar in coverage_bars(report.sites, report.coverage)}


def points(plot: Plot) -> dict[str, list[tuple[float, float]]]:
    """The places of each series' points."""
    found = {}
    for series in plot.series:
        pairs = re.findall(r"M(\S+) (\S+?)h0", series.path)
        assert len(pairs) == series.count
        found[series.style] = [(float(x), float(y)) for x, y in pairs]
    return found


@pytest.mark.parametrize("name", SAMPLES)
def test_bars_add_up_to_the_totals_of_the_report(name: str) -> None:
    report = SAMPLES[name]()
    coverage = report.coverage
    for bar, covered, total in zip(
        bars(report).values(),
        (coverage.sites, coverage.params, coverage.flops),
        (coverage.sites_total, coverage.params_total, coverage.flops_total),
        strict=True,
    ):
        assert sum(part.amount for part in bar.segments) == bar.total == total
        assert sum(part.amount for part in bar.segments if part.name in ("CONVERTED", "FUSED")) == covered
        assert sum(part.width for part in bar.segments) == pytest.approx(100 if total else 0, abs=0.01)
        lefts = [part.left for part in bar.segments]
        assert lefts == sorted(lefts)


def test_the_page_draws_the_amounts_of_the_bars() -> None:
    report = SAMPLES["refusals"]()
    drawn = [int(amount) for amount in re.findall(r'data-amount="(\d+)"', render_html(report))]
    assert drawn == [part.amount for bar in bars(report).values() for part in bar.segments]


def test_parameters_in_no_site_are_drawn_as_such() -> None:
    bar = coverage_bars([linear("a", params=30)], Coverage(1, 1, 30, 100, 0, 0))[1]
    assert [(part.name, part.amount, part.share) for part in bar.segments] == [
        ("CONVERTED", 30, "30.0 %"),
        (ELSEWHERE, 70, "70.0 %"),
    ]
    assert bar.note == "ELSEWHERE belongs to no site"


def test_tied_parameters_are_said_to_be_drawn_twice() -> None:
    sites = [linear("head", params=80), replace(other("embed", "Embedding"), params=80)]
    bar = coverage_bars(sites, Coverage(1, 1, 80, 100, 0, 0))[1]
    assert [(part.amount, part.share, part.width) for part in bar.segments] == [(80, "", 50.0), (80, "", 50.0)]
    assert bar.note == "at least 60 belong to several sites (tied or shared) and are drawn at each of them"
    assert bar.verdict == "80 of 100 (80.0 %)"


def test_points_lie_on_the_side_of_the_bound_that_their_figures_say() -> None:
    figures = [EQUAL, CLOSE, FAR, replace(FAR, sqnr_db=math.nan), replace(FAR, sqnr_db=-math.inf), replace(CLOSE, sqnr_db=90.0)]
    passed = [True, True, False, False, False, True]
    sites = [linear(f"layers.{i}.fc") for i in range(6)]
    parity = Parity(
        "failed", "reference", sites=tuple(site_parity(s.fqn, f, p) for s, f, p in zip(sites, figures, passed, strict=True))
    )
    plot = parity_plot(sites, parity)
    assert plot is not None
    (line,) = plot.lines
    assert line.label == "bound 90 dB"
    found = points(plot)
    assert all(0 < x < 100 and 0 < y < 100 for series in found.values() for x, y in series)
    assert all(y <= line.top for _, y in found["point"])
    assert all(y > line.top for _, y in found["failed"])
    assert found["point"][0][1] < found["point"][1][1] < found["point"][2][1] == line.top
    assert [x for series in found.values() for x, _ in series] == pytest.approx(
        [100 * (i + 0.5) / 6 for i in (0, 1, 5, 2, 3, 4)], abs=0.01
    )
    assert plot.summary == "6 sites compared one by one: 1 bit-equal, 3 failed; lowest nan dB at layers.3.fc"
    assert plot.x_ticks[1] == (16.67, "1")


def test_ticks_are_where_their_numbers_are() -> None:
    sites = [linear("a"), linear("b"), linear("c")]
    figures = [replace(CLOSE, sqnr_db=db) for db in (100.0, 120.0, 140.0)]
    plot = parity_plot(sites, Parity("passed", "te", sites=tuple(map(site_parity, ("a", "b", "c"), figures))))
    assert plot is not None
    ticks = {text: top for top, text in plot.y_ticks}
    tops = [y for _, y in points(plot)["point"]]
    assert [ticks[text] for text in ("100", "120", "140")] == pytest.approx(tops, abs=0.01)
    assert 3 <= len(ticks) <= 8
    assert plot.x_ticks == ()


def test_a_fused_site_is_one_point_in_module_order() -> None:
    sites = [linear(name, Outcome.FUSED, fused_into="attn.qkv") for name in ("attn.q", "attn.k")]
    sites.append(linear("head"))
    parity = Parity("passed", "te", sites=(site_parity("head", CLOSE), site_parity("attn.qkv")))
    plot = parity_plot(sites, parity)
    assert plot is not None
    (first, last) = points(plot)["point"]
    assert first[1] < last[1]  # the fused one is bit-equal, and comes first


def test_layer_numbers_are_thinned_out() -> None:
    sites = [linear(f"layers.{i}.fc") for i in range(100)]
    plot = parity_plot(sites, Parity("passed", "te", sites=tuple(site_parity(site.fqn) for site in sites)))
    assert plot is not None
    assert len(plot.x_ticks) <= MAX_LABELS
    assert plot.x_ticks[1] == (12.0, "12")
    assert plot.summary == "100 sites compared one by one: 100 bit-equal, 0 failed"


def test_nothing_compared_is_no_plot() -> None:
    assert parity_plot([linear("a")], Parity("not-verified", "reference")) is None
    assert recipe_plot([linear("a")], RecipeFigures("fp8", "fp8-current", 20, 18)) is None


def test_recipe_plot_has_both_bounds_and_tells_what_stays_high() -> None:
    names = ("a", "b", "c")
    found = (RecipeSite("c", 12.0, 1, 10, high=True), RecipeSite("b", 19.0, 1, 10), RecipeSite("a", 30.0, 1, 10))
    plot = recipe_plot([linear(name) for name in names], RecipeFigures("fp8", "fp8-current", 20.0, 18.0, found))
    assert plot is not None
    tops = {line.label: line.top for line in plot.lines}
    assert set(tops) == {"each site ≥ 18 dB", "--min-sqnr 20 dB (model)"}
    places = points(plot)
    (a, b), (c,) = places["point"], places["high"]
    assert a[0] < b[0] < c[0]
    assert a[1] < tops["--min-sqnr 20 dB (model)"] < b[1] < tops["each site ≥ 18 dB"] < c[1]
    assert "lowest 12.0 dB at c" in plot.summary


def run(figures: Figures, bound: str, passed: bool, ratio: float | None = None) -> ScenarioParity:
    return ScenarioParity("inputs", "float32", True, figures, ratio, bound, passed)


@pytest.mark.parametrize("figures", [EQUAL, CLOSE, FAR, replace(FAR, sqnr_db=math.nan)])
def test_meters_end_beyond_the_mark_when_sqnr_holds(figures: Figures) -> None:
    verdict = tolerance.judge_float32(figures)
    meter = scenario_meter(run(figures, verdict.bound, verdict.passed))
    assert meter is not None
    assert (meter.value >= meter.bound) is verdict.passed


@pytest.mark.parametrize("ratio", [0.9, 1.2, 1.3, 99.0])
def test_meters_end_before_the_mark_when_a_ratio_holds(ratio: float) -> None:
    verdict = tolerance.judge_ratio(ratio, 10_000)
    meter = scenario_meter(run(CLOSE, verdict.bound, verdict.passed, ratio))
    assert meter is not None
    assert (meter.value <= meter.bound) is verdict.passed


@pytest.mark.parametrize("error", [1e-6, 1.0])
@pytest.mark.parametrize("low", [False, True])
def test_meters_know_the_bounds_of_gradients_and_losses(error: float, low: bool) -> None:
    figures = replace(FAR, max_rel=error)
    for judge in (tolerance.judge_gradient, tolerance.judge_steps):
        verdict = judge(figures, low)
        meter = scenario_meter(run(figures, verdict.bound, verdict.passed))
        assert meter is not None
        assert (meter.value <= meter.bound) is verdict.passed


def test_every_bound_in_db_is_read_from_its_words() -> None:
    assert sqnr_bound(tolerance.judge_float32(CLOSE).bound) == tolerance.SQNR_DB_FLOAT32
    assert sqnr_bound(tolerance.judge_float64(CLOSE).bound) == tolerance.SQNR_DB_FLOAT64
    assert sqnr_bound(tolerance.judge_approximate(CLOSE, "gelu-tanh").bound) == tolerance.SQNR_DB_APPROXIMATE
    with tolerance.products_in_tf32():
        assert sqnr_bound(tolerance.judge_float32(CLOSE).bound) == tolerance.SQNR_DB_TF32
    assert sqnr_bound(BOUND) == 90
    assert sqnr_bound("the original's parameters, each once") is None
    assert scenario_meter(run(CLOSE, "tokens equal", True)) is None


def test_every_scenario_has_a_meter_in_the_page() -> None:
    for report in (success(), parity_failed()):
        assert render_html(report).count('<svg class="meter"') == len(report.parity.scenarios)
    assert ": FAILED</title>" in render_html(parity_failed())
