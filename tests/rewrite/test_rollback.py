"""A revert that fails half-way leaves model and optimizer as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_convert
from te_convert.errors import InputError
from te_convert.rewrite import state
from te_convert.rewrite.site import is_converted
from tests.integration.language_models import build, ids


def prepared(name: str) -> tuple[Any, torch.optim.Optimizer]:
    """A converted model and its optimizer after a step."""
    model = te_convert.convert(build(name), {"input_ids": ids()}, verify=False, backend="reference").model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    return model, optimizer


def step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    loss = model(input_ids=ids(), labels=ids()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def facts(model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Identities and classes of all modules and parameters, and what the optimizer holds."""
    modules = [(name, id(module), type(module)) for name, module in model.named_modules()]
    parameters = [(name, id(parameter)) for name, parameter in model.named_parameters()]
    hooks = [len(module._forward_hooks) + len(module._load_state_dict_pre_hooks) for module in model.modules()]
    held = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    return modules, parameters, hooks, held, sorted(map(id, optimizer.state)), model.config._attn_implementation


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("after", [0, 4])
def test_a_site_that_fails(name: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on as a copy does that nobody tried to revert, and can be reverted afterwards."""
    (model, optimizer), (twin, other) = prepared(name), prepared(name)
    before = facts(model, optimizer)
    module_: Any = state
    right, calls = module_.restore_site, 0

    def fails(root: Any, module: Any) -> Any:
        nonlocal calls
        calls += 1
        root = right(root, module)
        if calls > after:
            raise RuntimeError("injected")
        return root

    with monkeypatch.context() as patch:
        patch.setattr(state, "restore_site", fails)
        with pytest.raises(RuntimeError, match="injected"):
            te_convert.revert(model, optimizer)
    assert calls == after + 1
    assert facts(model, optimizer) == before
    assert [step(model, optimizer) for _ in range(2)] == [step(twin, other) for _ in range(2)]
    back = te_convert.revert(model, optimizer)
    assert not any(map(is_converted, back.modules()))
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in back.parameters()}


def test_an_optimizer_that_cannot_be_moved() -> None:
    model, _ = prepared("llama")
    optimizer = torch.optim.LBFGS(model.parameters())
    before = facts(model, optimizer)
    saved = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(InputError, match="LBFGS"):
        te_convert.revert(model, optimizer)
    assert facts(model, optimizer) == before
    assert all(torch.equal(tensor, saved[key]) for key, tensor in model.state_dict().items())
