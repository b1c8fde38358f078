"""The whole way with TE's modules, on a stand-in for the package: convert, train, save, load, revert, autocast.

The stand-in has no fused modules: everything here is converted site by site.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.errors import EnvironmentLacksError, InputError
from te_convert.rewrite.site import get_record
from tests.replacements import fake_te
from tests.rewrite.rewrite_samples import TiedLM, gpt2, ids, perturb

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
convert = partial(te_convert.convert, fuse=False)


@pytest.fixture(params=["2.0", "2.20"])
def te(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    fake_te.install(monkeypatch, request.param)
    return str(request.param)


def net() -> nn.Module:
    return perturb(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 10, bias=False)))


@pytest.mark.usefixtures("te")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_runs_on_te_with_its_own_parameters(dtype: torch.dtype) -> None:
    model = perturb(TiedLM()).to(dtype)
    before = {name: id(p) for name, p in model.named_parameters()}
    keys, expected, state = list(model.state_dict()), model(ids()), torch.get_rng_state()
    result = convert(model, (ids(),), backend="te", inplace=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert result.report.parity.passed, result.report
    assert result.report.parity.backend == "te"
    assert {type(m).__name__ for m in result.model.modules() if hasattr(m, "_te_convert")} == {
        "TELinear",
        "TELayerNorm",
        "TERMSNorm",
    }
    assert {name: id(p) for name, p in result.model.named_parameters() if name in before} == before
    assert list(result.model.state_dict()) == keys
    torch.testing.assert_close(result.model(ids()), expected)
    assert fake_te.STATE["seen"]


@pytest.mark.usefixtures("te")
def test_gradients_are_the_originals() -> None:
    model = perturb(TiedLM())
    twin = copy.deepcopy(model)
    root = convert(model, (ids(),), backend="te", inplace=True).model
    for module in (root, twin):
        module(ids()).pow(2).sum().backward()
    grads = dict(root.named_parameters())
    for name, parameter in twin.named_parameters():
        if parameter.grad is None:
            assert grads[name].grad is None
        else:
            torch.testing.assert_close(grads[name].grad, parameter.grad)


@pytest.mark.usefixtures("te")
def test_state_moves_between_te_twins_and_the_original() -> None:
    original = gpt2()
    on_te = convert(original, (ids(),), backend="te").model
    on_twins = convert(original, (ids(),), backend="reference").model
    on_twins.load_state_dict(te_convert.te_state_dict(on_te))
    on_te.load_state_dict(original.state_dict())
    for key, value in te_convert.original_state_dict(on_te).items():
        assert torch.equal(value, original.state_dict()[key])
    assert torch.equal(te_convert.revert(on_te)(ids()).logits, original(ids()).logits)


@pytest.mark.usefixtures("te")
def test_copies_stay_on_te() -> None:
    model = convert(net(), (X,), backend="te").model
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(X), model(X))
        assert type(other[1]) is type(model[1])  # type: ignore[index]


@pytest.mark.usefixtures("te")
def test_a_one_dimensional_input_keeps_its_rank() -> None:
    model = convert(net(), (X,), backend="te").model
    assert model[1](X[0]).shape == (32,)  # type: ignore[index]


def test_sites_that_the_recipe_cannot_take_leave_its_autocast(te: str) -> None:
    result = convert(net(), (X.repeat(8, 1),), backend="te", recipe="fp8")
    model = result.model
    precisions = {fqn: get_record(model.get_submodule(fqn)).decision.precision for fqn in ("1", "2")}
    assert precisions == {"1": "recipe", "2": "high"}
    fake_te.STATE["seen"].clear()
    fake_te.STATE["calls"].clear()
    with te_convert.autocast(model):
        recipe = fake_te.STATE["recipe"]
        model(X)
        assert fake_te.STATE["enabled"]
    assert [enabled for _, enabled in fake_te.STATE["seen"]] == [True, True, False]
    assert isinstance(recipe, fake_te.DelayedScaling if te == "2.0" else fake_te.Float8CurrentScaling)
    assert set(fake_te.STATE["calls"]) == {"fp8_autocast" if te == "2.0" else "autocast"}
    assert not fake_te.STATE["enabled"]


@pytest.mark.usefixtures("te")
def test_autocast_does_nothing_in_high_precision() -> None:
    model = convert(net(), (X,), backend="te").model
    fake_te.STATE["calls"].clear()
    with te_convert.autocast(model):
        model(X)
    assert not fake_te.STATE["calls"]


def test_a_recipe_that_this_te_lacks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_te.install(monkeypatch, "2.0")
    model = convert(net(), (X.repeat(8, 1),), backend="te", recipe="mxfp8").model
    with pytest.raises(EnvironmentLacksError, match="MXFP8BlockScaling"):
        te_convert.autocast(model)


def test_a_te_module_that_computes_something_else_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_te.install(monkeypatch)
    forward = fake_te.Linear.forward
    monkeypatch.setattr(fake_te.Linear, "forward", lambda self, x: forward(self, x) * (1.001 if self.out_features == 10 else 1))
    parity = convert(net(), (X,), backend="te").report.parity
    assert [site.fqn for site in parity.reverted] == ["2"]
    assert parity.passed


def test_te_without_its_constructor_working_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_te.install(monkeypatch)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("TransformerEngine needs CUDA.")

    monkeypatch.setattr(fake_te.Linear, "__init__", fails)
    model = net()
    result = convert(model, (X,), backend="te", inplace=True)
    assert result.model is model
    assert not result.converted
    assert type(model[0]) is nn.LayerNorm  # type: ignore[index]
    assert all("needs CUDA" in site.reasons[-1].detail for site in result.report.sites)


@pytest.mark.usefixtures("te")
def test_a_live_model_goes_to_te_and_back() -> None:
    model = convert(perturb(TiedLM()), (ids(),), backend="reference").model
    before, expected = {name: id(p) for name, p in model.named_parameters()}, model(ids())
    assert te_convert.materialize(model, "te") is model
    assert {type(m).__name__ for m in model.modules() if hasattr(m, "_te_convert")} == {"TELinear", "TELayerNorm", "TERMSNorm"}
    assert {name: id(p) for name, p in model.named_parameters()} == before
    torch.testing.assert_close(model(ids()), expected)
    assert fake_te.STATE["seen"]
    te_convert.materialize(model, "reference")
    assert torch.equal(model(ids()), expected)


def test_materialize_where_te_cannot_run() -> None:
    model = convert(net(), (X,), backend="reference").model
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(EnvironmentLacksError, match="backend 'te' cannot run here"):
        te_convert.materialize(model, "te")
    assert te_convert.materialize(model) is model
    assert [type(module) for module in model.modules()] == kinds
    plain = net()
    assert te_convert.materialize(plain, "reference") is plain
    wrong: Any
    for wrong in ((plain, "cuda"), (3, "te")):
        with pytest.raises(InputError):
            te_convert.materialize(*wrong)
