"""Modes around a call do not decide what it finds, and are in force again after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

import te_convert
from te_convert.capture.ambient import plain_modes
from te_convert.errors import InputError
from tests.invariants.variants import X, block


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "meta_device": lambda: torch.device("meta"),
    "meta_by_default": lambda: default_device("meta"),
    "float64_by_default": lambda: default_dtype(torch.float64),
    "bfloat16_by_default": lambda: default_dtype(torch.bfloat16),
}


def in_force() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_device().type,
        torch.get_default_dtype(),
    )


@pytest.mark.parametrize("name", MODES)
def test_a_conversion_is_the_same_in_any_mode(name: str) -> None:
    model = block()
    plain = te_convert.convert(model, (X,))
    with MODES[name]():
        before = in_force()
        result = te_convert.convert(model, (X,))
        parity = te_convert.verify(model, result.model, (X,))
        plan = te_convert.analyze(model, (X,))
        assert in_force() == before
    assert result.report.parity.passed
    assert parity.passed
    assert plan.decisions == te_convert.analyze(model, (X,)).decisions
    outcomes = [[(s.fqn, s.outcome, s.reasons) for s in each.report.sites] for each in (plain, result)]
    assert outcomes[0] == outcomes[1]
    scenarios = [[s.name for s in each.report.parity.scenarios] for each in (plain, result)]
    assert scenarios[0] == scenarios[1]
    for parameter in result.model.parameters():
        assert (parameter.device.type, parameter.dtype, parameter.is_inference()) == ("cpu", torch.float32, False)
    result.model(X).sum().backward()


@plain_modes()
def interrupted(outside: tuple[Any, ...]) -> None:
    assert in_force() != outside
    raise KeyboardInterrupt


def test_modes_are_back_after_an_error() -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        before = in_force()
        with pytest.raises(KeyboardInterrupt):
            interrupted(before)
        assert in_force() == before


def test_inside_a_transform_is_an_error() -> None:
    model = block()
    for call in (te_convert.convert, te_convert.analyze):
        with pytest.raises(InputError, match=r"torch\.func"):
            torch.func.vmap(lambda x, call=call: call(model, (x,)))(X)
    with pytest.raises(InputError, match=r"torch\.func"):
        torch.func.grad(lambda x: te_convert.verify(model, model, (x,)))(X)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_inside_a_trace_is_an_error() -> None:
    model = block()
    with pytest.raises(InputError, match=r"torch\.jit\.trace"):
        torch.jit.trace(lambda x: te_convert.convert(model, (x,)).model(x), X)
