"""A live model goes from twins to real TE modules and back: the same objects, numbers and training."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.errors import EnvironmentLacksError
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.replacements.build import new_module
from te_convert.replacements.experts import GroupedExperts
from te_convert.rewrite import portable
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu
from tests.te_contract.test_converted_models import (
    CASES,
    TOLERANCE,
    Case,
    assert_ran_on_te,
    backward,
    counters,
    every_case,
    run,
    te_modules,
)

pytestmark = needs_te


@pytest.fixture(autouse=True)
def te() -> Iterator[Any]:
    with te_on_cpu() as package:
        yield package


def on_twins(case: Case) -> nn.Module:
    result = te_convert.convert(case.model(), case.inputs, backend="reference", allow=case.allow)
    assert result.report.parity.passed
    return result.model


def identities(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters(remove_duplicate=False)}


def real(model: nn.Module) -> list[bool]:
    """Of each converted module, whether it is TE's; experts are two of TE's."""
    found: list[Any] = [module for module in model.modules() if SITE_ATTRIBUTE in module.__dict__]
    found = [module.fc1 if isinstance(module, GroupedExperts) else module for module in found]
    return [any(cls.__module__.startswith("transformer_engine.") for cls in type(module).__mro__) for module in found]


@every_case
def test_there_and_back(case: Case) -> None:
    model = on_twins(case)
    expected, keys, before = run(model, case.inputs), list(model.state_dict()), identities(model)
    modules = {name: id(module) for name, module in model.named_modules() if SITE_ATTRIBUTE in module.__dict__}
    random = torch.get_rng_state()
    assert te_convert.materialize(model, "te") is model
    assert torch.equal(torch.get_rng_state(), random)
    assert all(real(model))
    assert te_modules(model) == case.modules
    assert identities(model) == before
    assert list(model.state_dict()) == keys
    counted = counters(model)
    torch.testing.assert_close(run(model, case.inputs), expected, **TOLERANCE)
    assert_ran_on_te(model, counted)
    te_convert.materialize(model, "reference")
    assert not any(real(model))
    assert {name: id(module) for name, module in model.named_modules() if SITE_ATTRIBUTE in module.__dict__} == modules
    assert identities(model) == before
    assert torch.equal(run(model, case.inputs), expected)


@every_case
def test_a_materialized_model_is_one_converted_there(case: Case) -> None:
    """State dicts, copies, pickles, gradients, and the way back to the original."""
    model = te_convert.materialize(on_twins(case), "te")
    direct = te_convert.convert(case.model(), case.inputs, backend="te", allow=case.allow).model
    assert [type(module) for module in model.modules()] == [type(module) for module in direct.modules()]
    assert list(te_convert.te_state_dict(model)) == list(te_convert.te_state_dict(direct))
    for module, other in zip(model.modules(), direct.modules(), strict=True):
        assert module.__dict__.keys() == other.__dict__.keys(), type(module)
    for each in (model, direct):
        backward(each, case.inputs)
    gradients = [{name: p.grad for name, p in each.named_parameters() if p.grad is not None} for each in (model, direct)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(real(copied))
        assert torch.equal(run(copied, case.inputs), run(model, case.inputs))
    original = case.model()
    state = te_convert.revert(model).state_dict()
    assert all(torch.equal(state[name], value) for name, value in original.state_dict().items())


@pytest.mark.parametrize("name", ["gpt2", "blocks", "mixtral"])
def test_an_optimizer_goes_on(name: str) -> None:
    """Adam's next step after a switch is its next step without one."""
    losses = []
    for switch in (False, True):
        model = on_twins(CASES[name]).eval()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        seen = []
        for step in range(4):
            if switch and step in (1, 3):
                te_convert.materialize(model, "te" if step == 1 else "reference")
            optimizer.zero_grad()
            loss = run(model, CASES[name].inputs).pow(2).mean()
            loss.backward()
            optimizer.step()
            seen.append(float(loss.detach()))
        losses.append(seen)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][0] > losses[0][-1]


def test_hooks_and_attributes_stay() -> None:
    model: Any = on_twins(CASES["blocks"])
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append("hook"))
    model[0].note = "mine"
    te_convert.materialize(model, "te")
    run(model, CASES["blocks"].inputs)
    assert seen == ["hook"]
    assert model[0].note == "mine"
    assert (model[0].in_features, model[-1].eps, model[-1].normalized_shape) == (8, 1e-5, (32,))


def test_a_failure_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_twins(CASES["gpt2"])
    expected, count, build = run(model, CASES["gpt2"].inputs), [0], new_module

    def fails_late(*args: Any) -> Any:
        count[0] += 1
        if count[0] > 9:
            raise EnvironmentLacksError("the installed Transformer Engine is too old")
        return build(*args)

    monkeypatch.setattr(portable, "new_module", fails_late)
    with pytest.raises(EnvironmentLacksError):
        te_convert.materialize(model, "te")
    assert not any(real(model))
    assert torch.equal(run(model, CASES["gpt2"].inputs), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_a_directory_written_on_twins_is_loaded_on_te(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    result = te_convert.convert(case.model(), case.inputs, backend="reference")
    result.save(tmp_path / "out")
    loaded = te_convert.load(tmp_path / "out", backend="te")
    assert all(real(loaded))
    assert te_modules(loaded) == case.modules
    torch.testing.assert_close(run(loaded, case.inputs), run(result.model, case.inputs), **TOLERANCE)
