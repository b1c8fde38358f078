"""Emulated recipes of whole models: figures, proposals, and that the result, its plan and its directory honour them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_convert
from te_convert.errors import InputError
from te_convert.plan.model import SITE_ATTRIBUTE, Plan
from te_convert.reasons import ReasonCode
from te_convert.reference.emulation import EMULATED, emulate
from te_convert.rewrite.fused import fused_record
from te_convert.verify import recipes
from te_convert.verify.recipe_figures import RecipeFigures
from te_convert.verify.tolerance import recipe_bounds

WIDTH = 64
LOW = ReasonCode.RECIPE_LOW_SQNR.value


class Block(nn.Module):
    """A norm, two Linears and a residual: te.LayerNormLinear and te.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.silu(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def model(sick: str = "", depth: int = 3) -> Model:
    """With ``sick``, that Linear has a large weight for an input that is 0: one scale for the tensor loses all others."""
    torch.manual_seed(0)
    made = Model(depth)
    if sick:
        module = made.get_submodule(sick)
        assert isinstance(module, nn.Linear)
        with torch.no_grad():
            module.weight[:, 5] = 1e4
            if sick.endswith("up"):
                norm = made.get_submodule(sick.removesuffix("up") + "norm")
                assert isinstance(norm, nn.LayerNorm)
                norm.weight[5] = norm.bias[5] = 0
            else:
                up = made.get_submodule(sick.removesuffix("down") + "up")
                assert isinstance(up, nn.Linear)
                up.weight[5] = up.bias[5] = 0
    return made


def inputs() -> tuple[Tensor]:
    return (torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(1)),)


def figures_of(result: te_convert.Result) -> RecipeFigures:
    figures = result.report.recipe_figures
    assert figures is not None
    return figures


def sqnr(original: Tensor, other: Tensor) -> float:
    return float(10 * torch.log10(original.square().sum() / (original - other).square().sum()))


@pytest.mark.parametrize("recipe", EMULATED)
def test_every_recipe_is_measured(recipe: str) -> None:
    original = model()
    result = te_convert.convert(original, inputs(), recipe=recipe)
    figures = figures_of(result)
    assert figures.passed
    assert not figures.high
    assert (figures.min_sqnr_db, figures.min_site_sqnr_db) == ((11, 8) if recipe == "nvfp4" else (20, 18))
    assert {site.fqn for site in figures.sites} == {
        "head",
        *(f"blocks.{index}.{name}" for index in range(3) for name in ("down", "layernorm_up")),
    }
    low, high = (12, 22) if recipe == "nvfp4" else (24, 40)
    assert all(low < site.sqnr_db < high for site in figures.sites)
    assert [site.sqnr_db for site in figures.sites] == sorted(site.sqnr_db for site in figures.sites)
    assert sum(site.flops for site in figures.sites) == sum(site.flops for site in result.report.sites)
    (scenario,) = figures.scenarios
    assert low - 6 < scenario.sqnr_db < high
    assert result.report.parity.passed
    if recipe != "fp8-delayed":  # whose scales come from the figures' own pass
        with torch.no_grad(), emulate(recipe):
            moved = result.model(*inputs())
        assert sqnr(original(*inputs()).detach(), moved) == pytest.approx(scenario.sqnr_db, abs=0.01)


@pytest.mark.parametrize("recipe", [None, "bf16"])
def test_high_precision_has_no_figures(recipe: str | None) -> None:
    report = te_convert.convert(model(), inputs(), recipe=recipe).report
    assert report.recipe_figures is None
    assert report.to_dict()["recipe_figures"] is None


@pytest.mark.parametrize(("sick", "site"), [("blocks.1.down", "blocks.1.down"), ("blocks.2.up", "blocks.2.layernorm_up")])
def test_a_site_below_its_bound_stays_in_high_precision(sick: str, site: str, tmp_path: Path) -> None:
    """In the report, the plan, the model, a copy of it, and the directory loaded again."""
    original = model(sick)
    result = te_convert.convert(original, inputs(), recipe="fp8-current")
    figures = figures_of(result)
    (kept,) = figures.high
    assert kept.fqn == site
    assert kept.sqnr_db < 18
    assert "below 18 dB" in kept.why
    (scenario,) = figures.scenarios
    assert scenario.sqnr_db < scenario.proposed_sqnr_db
    assert figures.passed
    entry = result.report.site(sick)
    assert entry.precision == "high"
    assert [why.detail for why in entry.reasons if why.code == LOW] == [kept.why]
    assert result.report.site("head").precision == "recipe"
    assert "the others stay in high precision" in " ".join(str(result.report).split())
    assert kept.fqn in result.report.to_markdown()
    assert kept.why in result.report.to_html()
    check_honoured(result.model, original, site, scenario.proposed_sqnr_db)
    assert Plan.from_dict(result.plan.to_dict()) == result.plan
    source = tmp_path / "source.py"
    source.write_text("from tests.verify.test_recipes import model as _model\n\n\ndef build_model():\n    return _model()\n")
    opened = te_convert.open_model(f"{source}")
    opened.model.load_state_dict(original.state_dict())
    again = te_convert.convert(opened.model, inputs(), recipe="fp8-current")
    loaded = te_convert.load(te_convert.save(again, tmp_path / "out", source=opened.source))
    check_honoured(loaded, original, site, scenario.proposed_sqnr_db)


def check_honoured(converted: nn.Module, original: nn.Module, site: str, expected: float) -> None:
    record: Any = converted.get_submodule(site).__dict__[SITE_ATTRIBUTE]
    assert record.decision.precision == "high"
    with torch.no_grad(), emulate("fp8-current"):
        moved = converted(*inputs())
    assert sqnr(original(*inputs()).detach(), moved) == pytest.approx(expected, abs=0.01)
    with torch.no_grad():
        assert sqnr(original(*inputs()), converted(*inputs())) > 100


def test_a_second_conversion_keeps_the_precision() -> None:
    first = te_convert.convert(model("blocks.1.down"), inputs(), recipe="fp8-current")
    second = te_convert.convert(first.model, inputs(), recipe="fp8-current")
    assert second.report.site("blocks.1.down").precision == "high"
    assert not figures_of(second).high  # it is not asked about again
    assert figures_of(second).passed


def test_sites_follow_until_the_model_reaches_its_bound() -> None:
    """Those with the most noise for their operations first; one fewer would not be enough."""
    original = model(depth=4)
    plain = figures_of(te_convert.convert(original, inputs(), recipe="mxfp8"))
    bound = plain.scenarios[0].sqnr_db + 2
    result = te_convert.convert(original, inputs(), recipe="mxfp8", min_sqnr=bound)
    figures = figures_of(result)
    assert figures.passed
    assert 0 < len(figures.high) < len(figures.sites)
    assert figures.scenarios[0].proposed_sqnr_db >= bound
    assert all(f"below {bound:g} dB" in site.why for site in figures.high)
    assert sum(site.share or 0.0 for site in figures.sites) == pytest.approx(1.0)
    noise = {site.fqn: (site.share or 0.0) / site.flops for site in figures.sites}
    order = sorted(figures.high, key=lambda site: noise[site.fqn])
    assert all(noise[site.fqn] <= noise[order[0].fqn] for site in figures.sites if not site.high)
    record: Any = result.model.get_submodule(order[0].fqn).__dict__[SITE_ATTRIBUTE]
    record.decision = replace(record.decision, precision="recipe")
    with torch.no_grad(), emulate("mxfp8"):
        assert sqnr(original(*inputs()), result.model(*inputs())) < bound


def test_shares_of_the_noise_are_those_that_are_measured() -> None:
    """Each site alone in the recipe gives its part; their sum is what all of them give."""
    original = model(depth=4)
    with torch.no_grad():
        last = original.blocks[3]
        assert isinstance(last, Block)
        last.down.weight *= 20.0  # most of the output comes through it
    result = te_convert.convert(original, inputs(), recipe="mxfp8", min_sqnr=29.0)
    figures = figures_of(result)
    exact = original(*inputs()).detach()
    records: dict[str, Any] = {site.fqn: result.model.get_submodule(site.fqn).__dict__[SITE_ATTRIBUTE] for site in figures.sites}
    measured: dict[str, float] = {}
    for name in records:
        for other, record in records.items():
            record.decision = replace(record.decision, precision="recipe" if other == name else "high")
        with torch.no_grad(), emulate("mxfp8"):
            measured[name] = float((result.model(*inputs()) - exact).square().sum())
    total = sum(measured.values())
    shares = {site.fqn: site.share or 0.0 for site in figures.sites}
    large = [name for name in measured if measured[name] > 0.1 * total]
    assert large
    assert set(large) <= set(sorted(shares, key=lambda name: shares[name], reverse=True)[: len(large) + 1])
    for name in large:
        assert shares[name] == pytest.approx(measured[name] / total, rel=1.0)


def test_a_frozen_model_has_shares_and_stays_frozen() -> None:
    original = model().requires_grad_(requires_grad=False)
    result = te_convert.convert(original, inputs(), recipe="mxfp8", min_sqnr=29.0)
    assert all(site.share is not None for site in figures_of(result).sites)
    assert not any(parameter.requires_grad for parameter in result.model.parameters())


@pytest.mark.parametrize(("above", "enough"), [(2, True), (60, False)])
def test_a_slow_model_is_searched_with_few_runs(above: float, enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_convert.verify.reference.SLOW_S", -1.0)
    runs: list[Any] = []
    real = recipes._run_all

    def counted(*args: Any) -> Any:
        runs.append(args)
        return real(*args)

    monkeypatch.setattr(recipes, "_run_all", counted)
    original = model(depth=8)
    bound = figures_of(te_convert.convert(original, inputs(), recipe="mxfp8")).scenarios[0].sqnr_db + above
    runs.clear()
    figures = figures_of(te_convert.convert(original, inputs(), recipe="mxfp8", min_sqnr=bound))
    assert len(runs) <= 1 + recipes._FEW_TRIES + 1
    assert figures.passed
    assert (len(figures.high) < len(figures.sites)) == enough


def test_an_unreachable_bound_keeps_everything_in_high_precision() -> None:
    result = te_convert.convert(model(), inputs(), recipe="nvfp4", min_sqnr=80.0)
    figures = figures_of(result)
    assert len(figures.high) == len(figures.sites)
    assert figures.sqnr_db == math.inf
    assert result.report.parity.passed


def test_min_sqnr_moves_both_bounds() -> None:
    assert recipe_bounds("fp8-current", 30.0) == (30.0, 28.0)
    assert recipe_bounds("nvfp4", None) == (11.0, 8.0)
    loose = figures_of(te_convert.convert(model("blocks.1.down"), inputs(), recipe="fp8-current", min_sqnr=-10.0))
    assert not loose.high
    for value in (math.nan, math.inf, "20"):
        with pytest.raises(InputError, match="min_sqnr"):
            te_convert.convert(model(), inputs(), recipe="fp8", min_sqnr=value)  # type: ignore[arg-type]


def test_each_scenario_counts() -> None:
    first, second = inputs()[0], 3 * inputs()[0][:, :8]
    figures = figures_of(te_convert.convert(model(), [(first,), (second,)], recipe="fp8-block"))
    assert len(figures.scenarios) == 2
    assert all(site.calls == 2 for site in figures.sites)


def test_bfloat16_and_integer_outputs() -> None:
    class Tagger(Model):
        def forward(self, x: Tensor) -> Any:
            logits = super().forward(x)
            return {"classes": logits.argmax(-1), "logits": logits}

    torch.manual_seed(0)
    figures = figures_of(te_convert.convert(Tagger().bfloat16(), (inputs()[0].bfloat16(),), recipe="mxfp8"))
    assert figures.scenarios[0].output == "['logits']"
    assert 20 < figures.scenarios[0].sqnr_db < 40


def test_what_does_not_reproduce_itself_is_judged_by_its_sites() -> None:
    class Noisy(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0.1 * torch.from_numpy(_noise(x.shape)))

    figures = figures_of(te_convert.convert(Noisy(), inputs(), recipe="mxfp8"))
    assert not figures.scenarios
    assert figures.sites
    assert any("does not reproduce itself" in note for note in figures.notes)


def _noise(shape: torch.Size) -> Any:
    import numpy

    return numpy.random.default_rng().standard_normal(tuple(shape)).astype("float32")


def test_without_verification_nothing_is_emulated() -> None:
    report = te_convert.convert(model(), inputs(), recipe="mxfp8", verify=False).report
    assert report.recipe_figures is None


def test_the_model_is_left_as_it_is() -> None:
    """No state of delayed scaling, no hook, no attribute stays behind."""
    original = model()
    result = te_convert.convert(original, inputs(), recipe="fp8-delayed")
    for module in result.model.modules():
        assert "forward" not in module.__dict__ or fused_record(module) is not None or SITE_ATTRIBUTE not in module.__dict__
        record = fused_record(module)
        assert record is None or record.observer is None
    with torch.no_grad(), emulate("fp8-delayed"):
        first = result.model(*inputs())
    assert sqnr(original(*inputs()).detach(), first) < figures_of(result).sqnr_db  # scale 1 again


def test_round_trip_of_the_figures() -> None:
    report = te_convert.convert(model("blocks.1.down"), inputs(), recipe="fp8").report
    data = report.to_dict()["recipe_figures"]
    assert data["recipe"] == "fp8"
    assert data["emulated"] == "fp8-current"
    assert any("the GPU's choice" in note for note in data["notes"])
    assert data["passed"] is True
    assert {site["fqn"] for site in data["sites"] if site["high"]} == {"blocks.1.down"}
    assert "in the recipe" not in " ".join(report.warnings)
