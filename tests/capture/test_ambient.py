"""Modes around a call do not decide what it finds, and are in force again after it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_convert
from te_convert.capture.ambient import plain_modes
from te_convert.errors import InputError
from tests.estimate.models import Block, tokens
from tests.invariants.variants import X, block
from tests.verify.model_zoo import build


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


class NoInputs(nn.Module):
    """Nobody says what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))
        return out


MODELS: dict[str, Callable[[], tuple[nn.Module, Any, dict[str, Any]]]] = {
    "written-out attention": lambda: (Block(eager=True), (tokens(),), {}),
    "a recipe": lambda: (Block(), (tokens(),), {"recipe": "fp8-delayed"}),
    "bfloat16": lambda: (Block().bfloat16(), (tokens().bfloat16(),), {}),
    "no inputs": lambda: (NoInputs(), None, {}),
    "transformers": lambda: (*build("mixtral"), {}),
}


def found(model: nn.Module, inputs: Any, options: dict[str, Any]) -> list[Any]:
    """Everything that a conversion and an analysis of the same model without weights say, figures included."""
    result = te_convert.convert(model, inputs, **options)
    report = result.report.to_dict()
    for of_this_run in ("timings_s", "environment", "doctor"):
        report.pop(of_this_run)
    tensors = [(name, t.dtype, t.device.type, t.is_inference()) for name, t in result.model.state_dict().items()]
    return [report, tensors, te_convert.analyze(copy.deepcopy(model).to("meta"), inputs).to_dict()]


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "bfloat16_by_default") for name in MODELS]
    + [("no inputs", "meta_by_default"), ("written-out attention", "float64_by_default")],
)
def test_defaults_change_no_figure(name: str, mode: str) -> None:
    """Not one: probes and perturbations draw the same numbers."""
    torch.manual_seed(0)
    model, inputs, options = MODELS[name]()
    plain = found(model.eval(), inputs, options)
    with MODES[mode]():
        before = in_force()
        inside = found(model, inputs, options)
        assert in_force() == before
    assert inside == plain


class ReliesOnTheDefault(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x + torch.full((32,), 0.5))
        return out


def test_a_forward_that_relies_on_the_default_dtype_runs_as_it_does_for_its_owner() -> None:
    with default_dtype(torch.bfloat16):
        model, x = ReliesOnTheDefault(), torch.randn(4, 32)
        result = te_convert.convert(model, (x,))
        assert result.converted
        assert result.report.parity.passed
        assert result.model(x).dtype is torch.bfloat16


@pytest.mark.parametrize("mode", MODES)
def test_what_is_made_of_a_converted_model_can_be_trained(mode: str, tmp_path: Path) -> None:
    """The other public functions that make tensors; transposed weights are new ones on the way back."""
    source = tmp_path / "model.py"
    source.write_text(
        "import torch\nfrom transformers.pytorch_utils import Conv1D\n\n"
        "def build_model():\n    torch.manual_seed(0)\n    return torch.nn.Sequential(torch.nn.LayerNorm(32), Conv1D(48, 32))\n"
    )
    opened = te_convert.open_model(str(source))
    result = te_convert.convert(opened.model, (X,))
    te_convert.save(result, tmp_path / "out", source=opened.source)
    optimizer = torch.optim.Adam(opened.model.parameters())
    opened.model(X).sum().backward()
    optimizer.step()
    with torch.no_grad():
        expected = result.model(X)
    converted = copy.deepcopy(result.model)
    with MODES[mode]():
        before = in_force()
        loaded = te_convert.load(tmp_path / "out")
        moved = te_convert.remap_optimizer(optimizer, result)
        back = te_convert.revert(converted)
        verdict = te_convert.estimate(opened.model, (X,), gpu="h100").verdict
        assert in_force() == before
    assert verdict == te_convert.estimate(opened.model, (X,), gpu="h100").verdict
    for model in (loaded, back):
        assert {(p.device.type, p.dtype, p.is_inference()) for p in model.parameters()} == {("cpu", torch.float32, False)}
        assert torch.allclose(model(X), expected, atol=1e-6)
        model(X).sum().backward()
    assert not any(value.is_inference() for state in moved.state.values() for value in state.values())
    moved.step()
