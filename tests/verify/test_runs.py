"""How verification runs a model: perturbed, widened, at other shapes, and what it says of originals that are odd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import te_convert
from te_convert.capture.scenario import Scenario, normalize_inputs
from te_convert.errors import InputError
from te_convert.verify.compare import compare
from te_convert.verify.perturb import original_parameters, perturbed
from te_convert.verify.reference import record_reference
from te_convert.verify.run import Setting, run
from te_convert.verify.variants import other_values, shape_variants
from tests.rewrite.rewrite_samples import FUSE
from tests.verify.model_zoo import build, perturb


# ---- perturbation ----------------------------------------------------------------------------------------------------
def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def originals(model: nn.Module) -> dict[str, torch.Tensor]:
    """The original's tensors by name, whatever they are part of."""
    return {
        name: part.clone() for found in original_parameters(model) for name, part in zip(found.names, found.parts(), strict=True)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_perturbation_moves_every_1d_parameter_and_puts_the_bits_back(dtype: torch.dtype) -> None:
    model, _ = build("bert", dtype)
    before, objects = values_of(model), [id(p) for p in model.parameters()]
    with perturbed(model):
        for name, value in values_of(model).items():
            assert torch.equal(value, before[name]) is (value.dim() != 1), name
    with pytest.raises(KeyError, match="planted"), perturbed(model):
        raise KeyError("planted")
    assert all(torch.equal(value, before[name]) for name, value in values_of(model).items())
    assert [id(p) for p in model.parameters()] == objects


@FUSE
@pytest.mark.parametrize("name", ["gpt2", "llama", "sequential"])
def test_original_and_converted_get_the_same_noise(name: str, fuse: bool) -> None:
    model, inputs = build(name)
    before, converted = values_of(model), te_convert.convert(copy.deepcopy(model), inputs, fuse=fuse).model
    assert set(originals(converted)) == set(originals(model))
    assert fuse or list(originals(converted)) == list(originals(model))
    with perturbed(model), perturbed(converted):
        found = originals(converted)
        for name, value in originals(model).items():
            assert torch.equal(value, found[name]), name
            assert torch.equal(value, before[name]) is (value.dim() != 1), name


def test_the_filled_in_bias_is_not_perturbed() -> None:
    converted = te_convert.convert(nn.Sequential(nn.LayerNorm(8, bias=False)), (torch.randn(2, 8),)).model
    with perturbed(converted):
        assert torch.equal(converted[0].bias, torch.zeros(8))  # type: ignore[index]
        assert not torch.equal(converted[0].weight, torch.ones(8))  # type: ignore[index]


def test_the_filled_in_bias_of_a_fusion_is_not_perturbed_and_its_parts_come_back() -> None:
    model = nn.Sequential(nn.LayerNorm(8, bias=False), nn.Linear(8, 8))
    converted: Any = te_convert.convert(model, (torch.randn(2, 8),)).model
    before, fused = values_of(converted), converted[1].layernorm_1
    with perturbed(converted):
        assert torch.equal(fused.layer_norm_bias, torch.zeros(8))
        assert not torch.equal(fused.layer_norm_weight, torch.ones(8))
        assert not torch.equal(fused.bias, before["1.layernorm_1.bias"])
    assert all(torch.equal(value, before[name]) for name, value in values_of(converted).items())


# ---- widening --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "vit", "mamba", "t5"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_widened_run_gives_the_float32_result(name: str, dtype: torch.dtype) -> None:
    model, inputs = build(name, dtype)
    perturb(model)
    (scenario,) = normalize_inputs(inputs)
    before = values_of(model)
    wide = run(model, scenario, Setting(widen=torch.float32))
    narrow = run(model, scenario, Setting())
    float32 = copy.deepcopy(model).float()
    cast = {key: v.float() if v.is_floating_point() else v for key, v in inputs.items()}
    exact = run(float32, Scenario("", (), cast), Setting())
    for (path, a), (_, b), (_, c) in zip(exact, wide, narrow, strict=True):
        assert b.dtype is torch.float32 or not b.is_floating_point(), path
        assert compare(a, b).sqnr_db > 100, path
        assert not a.is_floating_point() or compare(a, c.float()).sqnr_db < 80, path
    assert all(torch.equal(value, before[key]) and value.dtype is dtype for key, value in values_of(model).items())


def test_buffers_are_widened_and_put_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
    buffer = model[1].running_mean
    assert isinstance(buffer, torch.Tensor)
    outputs = run(model, Scenario("", (torch.randn(8, 4).bfloat16(),), {}, training=True), Setting(widen=torch.float32))
    assert outputs[0][1].dtype is torch.float32
    assert model[1].running_mean is buffer
    assert torch.equal(buffer, torch.zeros(4, dtype=torch.bfloat16))


# ---- variants --------------------------------------------------------------------------------------------------------
def test_variants_double_the_batch_with_other_rows_and_shorten_the_sequence() -> None:
    ids, mask = torch.arange(12).view(2, 6), torch.ones(2, 6)
    scale = torch.tensor(3.0)
    doubled, single, shorter = shape_variants(Scenario("inputs", (ids, scale), {"mask": mask, "flag": True}))
    assert doubled.args[0].shape == (4, 6)
    assert torch.equal(doubled.args[0][:2], ids)
    assert not torch.equal(doubled.args[0][2:], ids)
    assert doubled.kwargs["mask"].shape == (4, 6)
    assert (doubled.args[1], doubled.kwargs["flag"]) == (scale, True)
    assert (shorter.args[0].shape, shorter.kwargs["mask"].shape) == ((2, 3), (2, 3))
    assert [v.name for v in (doubled, single, shorter)] == ["inputs[batch doubled]", "inputs[one sample]", "inputs[shorter]"]
    assert torch.equal(single.args[0], ids[:1])
    assert torch.equal(single.kwargs["mask"], mask[:1])
    assert single.args[1].shape == scale.shape
    assert shape_variants(Scenario("inputs", (3,), {})) == []
    assert len(shape_variants(Scenario("inputs", (torch.ones(2, 3, 4, 4),), {}))) == 2
    assert len(shape_variants(Scenario("inputs", (torch.ones(1, 3, 4, 4),), {}))) == 1


def test_other_values_keep_shapes_and_dtypes() -> None:
    inputs = (torch.arange(6).view(2, 3), torch.randn(2, 3).bfloat16(), torch.tensor(1))
    changed = other_values(Scenario("inputs", inputs, {}))
    for old, new in zip(inputs, changed.args, strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
        assert torch.equal(old, new) is (old.dim() == 0)


# ---- odd originals ---------------------------------------------------------------------------------------------------
class Odd(nn.Module):
    """A Linear and something odd."""

    def __init__(self, odd: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.odd = odd
        self.state = [0]

    def forward(self, x: torch.Tensor) -> Any:
        return self.odd(self, self.proj(x))


def count_up(model: Any, y: torch.Tensor) -> torch.Tensor:
    COUNTER[0] += 1
    return y + COUNTER[0]


COUNTER = [0]


@pytest.mark.parametrize(
    "odd", [lambda m, y: y + float(np.random.default_rng().normal()), count_up], ids=["unseeded generator", "counter"]
)
def test_an_original_that_does_not_reproduce_itself_is_seen(odd: Callable[[nn.Module, torch.Tensor], Any]) -> None:
    model = Odd(odd)
    parity = te_convert.convert(model, (torch.randn(2, 8),)).report.parity
    assert parity.status == "sites-only"
    assert not parity.passed
    assert [site.fqn for site in parity.sites] == ["proj"]
    assert any("does not reproduce itself" in note for note in parity.notes)


def test_numpys_global_generator_is_seeded() -> None:
    parity = te_convert.convert(Odd(lambda m, y: y + float(np.random.rand())), (torch.randn(2, 8),)).report.parity
    assert parity.passed


def test_an_output_that_ignores_its_input_is_noted() -> None:
    parity = te_convert.convert(Odd(lambda m, y: y * 0 + 1), (torch.randn(2, 8),)).report.parity
    assert any("does not depend on the input" in note for note in parity.notes)


def test_an_output_without_a_finite_value_is_noted() -> None:
    parity = te_convert.convert(Odd(lambda m, y: y * float("nan")), (torch.randn(2, 8),)).report.parity
    assert any("no finite value" in note for note in parity.notes)
    assert parity.status == "sites-only"


NO_EVIDENCE = {"nan": torch.full((2, 8), float("nan")), "inf": torch.full((2, 8), float("inf")), "empty": torch.randn(0, 8)}


@pytest.mark.parametrize("name", NO_EVIDENCE)
@pytest.mark.parametrize("planted", [False, True])
def test_inputs_without_a_finite_value_prove_nothing(name: str, planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN equals NaN whatever the weights are: the sites are compared on random input instead, and a mistake still shows."""
    from te_convert import reference

    forward = reference.Linear.forward
    if planted:
        monkeypatch.setattr(reference.Linear, "forward", lambda self, x: forward(self, x) * 2)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parity = te_convert.convert(model, (NO_EVIDENCE[name],), backend="reference").report.parity
    assert parity.status == ("failed" if planted else "sites-only")
    assert [site.fqn for site in parity.reverted] == (["0", "2"] if planted else [])
    assert not parity.scenarios
    with pytest.raises(InputError, match="no finite value"):
        te_convert.verify(model, model, (NO_EVIDENCE[name],))


def test_a_scenario_without_a_finite_value_does_not_count_for_another() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parity = te_convert.convert(model, [(NO_EVIDENCE["nan"],), (torch.randn(2, 8),)]).report.parity
    assert parity.passed
    assert {scenario.name.partition("[")[2][:1] for scenario in parity.scenarios} == {"1"}
    assert any(scenario.name.endswith("[gradients]") for scenario in parity.scenarios)


def test_a_site_that_saw_nothing_is_compared_on_random_input(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_convert import reference

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.full, self.empty = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.full(x) + self.empty(x[:0]).sum()
            return y

    parity = te_convert.convert(Skips(), (torch.randn(2, 8),)).report.parity
    assert {site.fqn: site.random_input for site in parity.sites} == {"full": False, "empty": True}
    forward = reference.Linear.forward
    monkeypatch.setattr(reference.Linear, "forward", lambda self, x: forward(self, x) * (2 if self.out_features == 4 else 1))
    parity = te_convert.convert(Skips(), (torch.randn(2, 8),), backend="reference").report.parity
    assert [site.fqn for site in parity.reverted] == ["empty"]


def test_an_original_that_raises_in_eval_is_compared_site_by_site() -> None:
    def only_in_training(model: nn.Module, y: torch.Tensor) -> torch.Tensor:
        if not model.training:
            raise ValueError("train only")
        return y

    parity = te_convert.convert(Odd(only_in_training), (torch.randn(2, 8),)).report.parity
    assert parity.status == "sites-only"
    assert parity.sites[0].random_input
    assert any("train only" in note for note in parity.notes)


def test_an_original_that_raises_the_second_time_is_noted() -> None:
    budget = [4]

    def spends(model: nn.Module, y: torch.Tensor) -> torch.Tensor:
        budget[0] -= 1
        if budget[0] < 0:
            raise ValueError("spent")
        return y

    for start in range(1, 6):  # wherever the run is that fails, convert does not
        budget[0] = start + 2
        parity = te_convert.convert(Odd(spends), (torch.randn(2, 8),)).report.parity
        assert not parity.passed


def test_a_model_without_tensors_to_compare_is_not_called_verified() -> None:
    parity = te_convert.convert(Odd(lambda m, y: float(y.sum())), (torch.randn(2, 8),)).report.parity
    assert parity.status == "sites-only"
    assert any("returned no tensor" in note for note in parity.notes)


def test_the_reference_leaves_model_and_random_state_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    reference = record_reference(model, normalize_inputs((torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)))
    assert reference.reproducible
    assert len(reference.runs) >= 4
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_scripted_child_does_not_stop_the_perturbed_runs() -> None:
    scripted: nn.Module = torch.jit.script(nn.Linear(8, 8))
    report = te_convert.convert(nn.Sequential(scripted, nn.Linear(8, 8)), torch.randn(2, 8)).report
    assert report.parity.passed
    assert any(scenario.perturbed for scenario in report.parity.scenarios)
    assert not any("did not run" in note for note in report.parity.notes)
