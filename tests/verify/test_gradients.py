"""Gradients are compared without being kept, by original name, and a wrong one fails the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import te_convert
from te_convert.capture.scenario import Scenario
from te_convert.verify.gradients import PERIOD, compare_gradients, gradient_outputs, sketch
from te_convert.verify.run import Setting
from tests.verify.model_zoo import build


@given(st.integers(1, 3 * PERIOD), st.floats(1e-6, 1e-1), st.integers(0, 2**16))
@settings(deadline=None, max_examples=40)
def test_a_sketch_measures_the_relative_error(size: int, error: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(size, generator=generator)
    other = gradient + error * gradient.norm() / size**0.5 * torch.randn(size, generator=generator)
    true = float((gradient - other).norm() / gradient.norm())
    _, figures = compare_gradients([("w", sketch(gradient))], [("w", sketch(other))])
    assert true / 8 <= figures.max_rel <= 8 * true + 1e-6


@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 100))
@settings(deadline=None, max_examples=30)
def test_sketches_of_blocks_of_rows_add_up(rows: int, columns: int, seed: int) -> None:
    gradient = torch.randn(2 * rows, columns, generator=torch.Generator().manual_seed(seed))
    parts = sketch(gradient[:rows]) + sketch(gradient[rows:], offset=rows * columns)
    assert torch.allclose(parts, sketch(gradient), rtol=1e-4, atol=1e-4)


def test_exchanged_rows_are_seen() -> None:
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    swapped = torch.cat([gradient[32:], gradient[:32]])
    assert compare_gradients([("w", sketch(gradient))], [("w", sketch(swapped))])[1].max_rel > 0.1


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral", "pre_norm_encoder"])
def test_names_are_those_of_the_original(name: str) -> None:
    model, inputs = build(name)
    scenario = Scenario("inputs", (), inputs, False) if isinstance(inputs, dict) else Scenario("inputs", tuple(inputs), {}, False)
    converted = te_convert.convert(copy.deepcopy(model), inputs).model
    one, other = (gradient_outputs(each, scenario, Setting(perturb=True)) for each in (model, converted))
    assert dict(one).keys() <= dict(other).keys()
    assert compare_gradients(one, other)[1].max_rel <= 1e-4


def test_gradients_of_the_caller_are_left_alone() -> None:
    model = nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    before = model.weight.grad
    gradient_outputs(model, Scenario("inputs", (torch.randn(2, 4),), {}), Setting())
    assert model.weight.grad is before
    assert not model.weight._post_accumulate_grad_hooks


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 1.01 * grad


def test_a_wrong_backward_fails_where_every_forward_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_convert import reference

    own = reference.Linear.forward
    monkeypatch.setattr(reference.Linear, "forward", lambda self, x: own(self, _Wrong.apply(x)))
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    report = te_convert.convert(net, (torch.randn(3, 8),)).report
    assert report.parity.reverted
    assert "gradients" in report.parity.reverted[-1].why
    assert not report.converted


def test_frozen_models_say_that_nothing_was_compared() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).requires_grad_(False)
    report = te_convert.convert(net, (torch.randn(3, 8),)).report
    assert report.parity.passed
    assert any("no parameter requires a gradient" in note for note in report.parity.notes)
    assert "gradients" in report.not_verified
