"""A second call with other weights: whatever is computed from a weight has to follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import te_convert
from te_convert.capture.scenario import Scenario
from te_convert.verify import reference
from te_convert.verify.model import ScenarioParity
from te_convert.verify.moved import moved_outputs, shown_parameters
from te_convert.verify.run import Setting
from tests.rewrite.block_samples import X, encoder_layer
from tests.verify.model_zoo import build, perturb

NAME = "inputs[other weights]"
SECOND = Scenario("second", (X.flip(0),), {})


def shared_layer() -> nn.Module:
    layer = encoder_layer()
    return perturb(nn.Sequential(layer, nn.Identity(), layer).eval())


def shared_attention() -> nn.Module:
    model: Any = nn.Sequential(encoder_layer(), encoder_layer())
    model[1].self_attn = model[0].self_attn
    return perturb(model.eval())


def shared_norm() -> nn.Module:
    norm = nn.LayerNorm(X.shape[-1])
    return perturb(nn.Sequential(norm, nn.Linear(X.shape[-1], X.shape[-1]), norm, nn.Linear(X.shape[-1], 8)).eval())


def moved(parity: te_convert.Parity) -> ScenarioParity:
    (found,) = [scenario for scenario in parity.scenarios if scenario.name == NAME]
    return found


@pytest.mark.parametrize("make", [shared_layer, shared_attention, shared_norm])
def test_what_is_shared_is_shown_under_each_of_its_names(make: Callable[[], nn.Module]) -> None:
    model = make()
    result = te_convert.convert(model, (X,), backend="reference")
    assert moved(result.report.parity).passed
    assert not result.report.parity.reverted
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for either in (model, result.model):
        shown = list(shown_parameters(either))
        assert {name for name, _ in shown} == names
        for name, tensor in shown:
            assert torch.equal(tensor, model.get_parameter(name)), name


def test_weights_change_for_the_second_call_and_are_put_back() -> None:
    model = shared_attention()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = Scenario("first", (X,), {})
    result = dict(moved_outputs(model, first, SECOND, Setting()))
    with torch.no_grad():
        same = model(*SECOND.args)
    output = next(tensor for name, tensor in result.items() if not name.startswith("parameter"))
    assert (output - same).abs().max() > 0.1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_a_weight_from_the_first_call_is_caught(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other run sees it: each weight has the value there that it had in the first."""
    from te_convert.reference.linear import Linear

    def forward(self: Any, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        kept = self.__dict__.setdefault("_kept", {})
        weight = kept.setdefault(self.weight.dtype, self.weight.detach().clone())
        return functional.linear(x, weight + (self.weight - self.weight.detach()), self.bias)

    model = perturb(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))).eval().to(dtype)
    inputs = (torch.randn(3, 16, generator=torch.Generator().manual_seed(1)).to(dtype),)
    monkeypatch.setattr(Linear, "forward", forward)
    result = te_convert.convert(model, inputs, backend="reference")
    assert not result.converted
    assert len(result.report.parity.reverted) == 2
    assert all(NAME in site.why for site in result.report.parity.reverted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "vit"])
def test_a_slow_model_is_run_three_times_on_each_side(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SLOW_S", -1.0)
    model, inputs = build(name, dtype)
    converted = te_convert.convert(model, inputs, backend="reference").model
    runs: dict[int, int] = {}
    own = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs[id(self)] = runs.get(id(self), 0) + 1
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", forward)
    parity = te_convert.verify(model, converted, inputs)
    assert parity.passed
    assert runs == {id(model): 3, id(converted): 3}
    assert any("other weights" in note for note in parity.notes)
