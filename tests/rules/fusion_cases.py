"""Fusions one at a time: convert a small model, compare everything with the original, plant a mistake."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_convert
from te_convert.match.fusion import Fusion
from te_convert.plan.model import Outcome, Plan
from te_convert.rewrite import apply as rewrite_apply
from tests.rewrite.trap_samples import Pair, assert_trains_alike, pair, perturb, x_of

Mistake = Callable[[Any], None]
"""Changes a fused module after the rewrite."""


def proved(model: nn.Module, x: Tensor | None = None, fused: int | None = 1, bound: float = 3e-5, **options: Any) -> Plan:
    """Convert, and compare outputs, gradients, state dicts and the way back with the original; returns the plan."""
    perturb(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = te_convert.convert(copy.deepcopy(model), (x_of() if x is None else x,), backend="reference", **options).plan
    made = pair(model, x_of() if x is None else x, fused=fused, perturbed=True, **options)
    for fqn in made.fused:
        made.record(fqn).executed = made.record(fqn).fallbacks = 0
    made.model(x_of() if x is None else x)
    assert all(made.counts(fqn)[0] > 0 and made.counts(fqn)[1] == 0 for fqn in made.fused)
    _states_agree(made, before)
    assert_trains_alike(made, x, bound)
    _reverted_is_the_original(made, before)
    return plan


def _states_agree(made: Pair, before: dict[str, Tensor]) -> None:
    state = te_convert.original_state_dict(made.model)
    assert list(state) == list(before)
    for name, tensor in before.items():
        assert torch.equal(state[name], tensor), name
    other = {
        name: tensor + torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)) for name, tensor in before.items()
    }
    _tie(other, made.original)
    made.model.load_state_dict(other)
    found = te_convert.original_state_dict(made.model)
    assert list(found) == list(before)
    for name, tensor in other.items():
        assert torch.equal(found[name], tensor), name
    te_convert.load_original_state_dict(made.model, before)


def _tie(state: dict[str, Tensor], model: nn.Module) -> None:
    """One value for all names of a tied parameter."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        state[name] = state[first]


def _reverted_is_the_original(made: Pair, before: dict[str, Tensor]) -> None:
    """``assert_trains_alike`` has reverted it."""
    assert {name: type(module) for name, module in made.model.named_modules()} == {
        name: type(module) for name, module in made.original.named_modules()
    }
    assert list(made.model.state_dict()) == list(before)
    for name, tensor in made.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    flags = {name: p.requires_grad for name, p in made.original.named_parameters()}
    assert {name: p.requires_grad for name, p in made.model.named_parameters()} == flags


def fusion_of(plan: Plan, rule: str) -> Fusion:
    """The only fusion of a rule."""
    (fusion,) = [fusion for fusion in plan.fusions if fusion.rule == rule]
    return fusion


def planned(model: nn.Module, *inputs: Any, **options: Any) -> Plan:
    return te_convert.convert(model, inputs or (x_of(),), backend="reference", **options).plan


def codes_of(plan: Plan, fqn: str) -> list[str]:
    return [reason.code for reason in plan.get(fqn).reasons]


def outcomes_of(plan: Plan) -> dict[str, Outcome]:
    return {decision.fqn: decision.outcome for decision in plan.decisions}


def assert_caught(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, mistake: Mistake, fused: str, x: Tensor | None = None, **options: Any
) -> None:
    """The verifier puts a fusion with a planted mistake back, and it alone, and the result is the original's."""
    fuse: Any = vars(rewrite_apply)["fuse"]

    def wrong(root: nn.Module, fusion: Fusion, *args: Any) -> Any:
        module, own = fuse(root, fusion, *args)
        if fusion.fqn == fused:
            with torch.no_grad():
                mistake(module)
        return module, own

    monkeypatch.setattr(rewrite_apply, "fuse", wrong)
    example = x_of() if x is None else x
    result = te_convert.convert(perturb(model), (example,), backend="reference", **options)
    assert [site.fqn for site in result.report.parity.reverted] == [fused]
    assert fused not in {fusion.fqn for fusion in result.plan.fusions}
    torch.testing.assert_close(result.model(example), model(example), rtol=1e-4, atol=1e-5)


def rolled(name: str, rows: int) -> Mistake:
    """Blocks in another order."""

    def mistake(module: Any) -> None:
        _put(module, name, module._parameters[name].roll(rows, 0))

    return mistake


def zeroed(name: str) -> Mistake:
    return lambda module: _put(module, name, torch.zeros_like(module._parameters[name]))


def _put(module: Any, name: str, value: Tensor) -> None:
    """Another Parameter, so that the members' own show what is wrong."""
    module._parameters[name] = nn.Parameter(value.clone())


def attribute(name: str, change: Callable[[Any], Any]) -> Mistake:
    return lambda module: setattr(module, name, change(getattr(module, name)))
