"""Options, inputs and the report of convert(), and the functions around it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.errors import InputError
from te_convert.rewrite.site import is_converted
from tests.rewrite.rewrite_samples import FUSE, floats, perturb

X = floats(4, 32)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 30)

    def forward(self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(self.norm(x)))) * scale
        return y if mask is None else y * mask


def net() -> Net:
    model = Net()
    perturb(model)
    return model


def outcomes(report: Any) -> dict[str, str]:
    return {site.fqn: str(site.outcome) for site in report.sites}


# ---- inputs ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("inputs", "scenarios"),
    [
        (X, ["inputs"]),
        ((X, 2.0), ["inputs"]),
        ({"x": X}, ["inputs"]),
        (((X,), {"scale": 3.0}), ["inputs"]),
        ([(X,), {"x": X, "mask": torch.ones(4, 30)}], ["inputs[0]", "inputs[1]"]),
    ],
    ids=["tensor", "args", "kwargs", "args and kwargs", "several"],
)
def test_inputs_in_every_form(inputs: Any, scenarios: list[str]) -> None:
    report = te_convert.convert(net(), inputs).report
    assert report.parity.passed
    assert [name for name in report.scenarios if "train" not in name and "eval" not in name] == scenarios
    compared = {scenario.name for scenario in report.parity.scenarios}
    assert set(scenarios) <= compared
    assert {f"{name}[batch doubled]" for name in scenarios} <= compared


def test_inputs_are_not_written_to() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.proj(x.mul_(2))
            return y

    x = X.clone()
    assert te_convert.convert(Writes(), (x,)).report.parity.passed
    assert torch.equal(x, X)


def test_inputs_on_which_the_model_fails_show_its_own_error() -> None:
    for function in (te_convert.convert, te_convert.analyze):
        with pytest.raises(InputError, match=r"normalized_shape|mat1 and mat2") as caught:
            function(net(), (floats(4, 7),))
        assert caught.value.hint
    with pytest.raises(InputError, match="unexpected keyword argument 'y'"):
        te_convert.convert(net(), {"y": X})


@pytest.mark.parametrize("inputs", [[], 3, "x", {1: X}])
def test_inputs_of_no_known_form_are_an_input_error(inputs: Any) -> None:
    with pytest.raises(InputError, match="example_inputs"):
        te_convert.convert(net(), inputs)


def test_without_inputs_they_are_derived_and_the_report_says_so() -> None:
    report = te_convert.convert(net()).report
    assert report.parity.passed
    assert any("no example inputs were given" in note for note in report.notes)


def test_where_none_can_be_derived_each_site_is_compared_alone() -> None:
    class Needs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8)

        def forward(self, batch: dict[str, Any]) -> torch.Tensor:
            y: torch.Tensor = self.proj(batch["values"][0])
            return y

    result = te_convert.convert(Needs())
    assert result.report.parity.status == "sites-only"
    assert result.report.parity.sites[0].random_input
    assert any("each site was compared alone" in line for line in result.report.not_verified)
    assert is_converted(result.model.proj)  # type: ignore[arg-type]


# ---- options ---------------------------------------------------------------------------------------------------------
@pytest.mark.report("peer:default-filter")
def test_include_and_exclude_are_globs() -> None:
    def chosen(**options: Any) -> list[str]:
        result = te_convert.convert(net(), (X,), **options)
        assert result.report.parity.passed or not result.converted
        return [name for name, m in result.model.named_modules() if is_converted(m)]

    for fuse in (False, True):
        assert chosen(fuse=fuse) == (["down", "layernorm_up"] if fuse else ["norm", "up", "down"])
        assert chosen(fuse=fuse, include="*o*") == ["norm", "down"]
        assert chosen(fuse=fuse, exclude=["up", "no*"]) == ["down"]
        assert chosen(fuse=fuse, exclude=["norm"]) == ["up", "down"]
        assert chosen(fuse=fuse, include=["up", "down"], exclude="down") == ["up"]
    assert chosen(include=["norm", "up"]) == ["layernorm_up"]
    assert outcomes(te_convert.convert(net(), (X,), exclude="up").report)["up"] == "EXCLUDED"


@pytest.mark.parametrize(
    "options",
    [{"recipe": "fp7"}, {"backend": "cuda"}, {"allow": "gelu"}, {"include": [1]}, {"exclude": (None,)}],
    ids=lambda options: next(iter(options)),
)
def test_an_unknown_option_is_an_input_error_before_anything_runs(options: dict[str, Any]) -> None:
    def never(*_: object) -> None:
        raise AssertionError("ran")

    with pytest.raises(InputError):
        te_convert.convert(net(), (X,), progress=never, **options)


def test_verify_false_is_said() -> None:
    result = te_convert.convert(net(), (X,), verify=False)
    assert result.converted
    assert not result.report.parity.passed
    assert result.report.parity.status == "not-verified"
    assert any("verify=False" in line for line in result.report.not_verified)
    assert "verify=False" in str(result.report)


@FUSE
def test_a_recipe_is_recorded_with_its_advice(fuse: bool) -> None:
    result = te_convert.convert(net(), (X,), recipe="mxfp8", fuse=fuse)
    assert result.plan.recipe == result.report.recipe == "mxfp8"
    assert result.report.parity.passed
    by_name = {site.fqn: {reason.code for reason in site.reasons} for site in result.report.sites}
    assert "alignment.features" in by_name["down"]
    assert "alignment.features" not in by_name["up"]
    assert {"alignment.rows"} <= by_name["up"]
    assert (result.plan.get("down").precision, result.plan.get("up").precision) == ("high", "recipe")
    assert [fusion.precision for fusion in result.plan.fusions] == ["recipe"] * fuse
    assert any("mxfp8" in line for line in result.report.not_verified)


def test_autocast_is_a_null_context_on_twins() -> None:
    result = te_convert.convert(net(), (X,), recipe="fp8", backend="reference")
    expected = result.model(X)
    with te_convert.autocast(result.model) as entered:
        assert torch.equal(result.model(X), expected)
    assert entered is None
    with te_convert.autocast(net()):
        pass


@FUSE
def test_progress_reports_every_stage_to_its_end(fuse: bool) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        seen.setdefault(stage, []).append((done, total))

    te_convert.convert(net(), (X,), fuse=fuse, progress=progress)
    assert list(seen) == ["capture", "plan", "rewrite", "verify"]
    for steps in seen.values():
        assert [done for done, _ in steps] == list(range(1, len(steps) + 1))
        assert {total for _, total in steps} == {len(steps)}


# ---- the report ------------------------------------------------------------------------------------------------------
@FUSE
def test_a_result_unpacks_and_its_report_is_json(fuse: bool) -> None:
    result = te_convert.convert(net(), (X,), fuse=fuse)
    model, report = result
    assert model is result.model
    assert report is result.report
    data = json.loads(report.to_json())
    assert data["parity"]["status"] == "passed"
    assert [site["fqn"] for site in data["sites"]] == ["norm", "up", "down"]
    one = "FUSED" if fuse else "CONVERTED"
    assert [site["outcome"] for site in data["sites"]] == [one, one, "CONVERTED"]
    assert all(count > 0 for count in report.parity.executed.values())
    assert report.backend == "reference"
    assert report.backend_reason
    assert any("twins" in line for line in report.not_verified)
    assert all(seconds >= 0 for seconds in report.timings_s.values())
    assert "passed" in report.to_markdown()
    assert "<" in report.to_html()


def test_analyze_agrees_with_convert_and_leaves_the_model_alone() -> None:
    model = net()
    plan = te_convert.analyze(model, (X,), exclude="up")
    assert {d.fqn: str(d.outcome) for d in plan} == outcomes(te_convert.convert(model, (X,), exclude="up").report)
    assert not any(map(is_converted, model.modules()))
    assert te_convert.Plan.from_dict(json.loads(plan.to_json())) == plan


# ---- verify() --------------------------------------------------------------------------------------------------------
@FUSE
def test_verify_passes_the_right_pair_and_leaves_both_alone(fuse: bool) -> None:
    original = net()
    converted: Any = te_convert.convert(original, (X,), fuse=fuse).model
    states = [{k: v.clone() for k, v in m.state_dict().items()} for m in (original, converted)]
    parity = te_convert.verify(original, converted, (X,))
    assert parity.passed
    assert [site.fqn for site in parity.sites] == (["down", "layernorm_up"] if fuse else ["norm", "up", "down"])
    for module, state in zip((original, converted), states, strict=True):
        assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
    assert is_converted(converted.layernorm_up if fuse else converted.up)


@FUSE
@pytest.mark.parametrize("name", ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verify_fails_a_pair_that_differs_in_one_element(name: str, dtype: torch.dtype, fuse: bool) -> None:
    torch.manual_seed(0)  # where ReLU is zero on every row, a changed weight changes nothing
    original = net().to(dtype)
    converted = te_convert.convert(original, (X.to(dtype),), fuse=fuse).model
    with torch.no_grad():
        parameter = converted.get_parameter(name)
        parameter.flatten()[3] += 0.1
    parity = te_convert.verify(original, converted, (X.to(dtype),))
    assert parity.status == "failed"
    assert not parity
    assert not parity.reverted
    assert any(not scenario.passed and scenario.bound for scenario in parity.scenarios)


def test_verify_needs_inputs_that_the_original_takes() -> None:
    with pytest.raises(InputError, match="needs inputs"):
        te_convert.verify(net(), net(), None)
    with pytest.raises(InputError, match="original fails"):
        te_convert.verify(net(), net(), (floats(2, 5),))


def test_verify_compares_any_two_models() -> None:
    model = net()
    assert te_convert.verify(model, model, (X,)).passed
    assert te_convert.verify(model, net().double().float(), (X,)).status in ("passed", "failed")
    other = net()
    with torch.no_grad():
        other.down.weight.mul_(2)
    assert te_convert.verify(model, other, (X,)).status == "failed"
