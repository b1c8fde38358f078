"""Rows are added for a recipe and cut off again, whatever their number, without a trace in the gradients."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_convert.rewrite import rows
from te_convert.rewrite.rows import run_padded


@pytest.fixture
def multiple(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(rows, "rows_multiple", lambda: 16)
    return 16


class Picky(nn.Module):
    """Takes multiples of 16 rows; returns what TE's modules do: output, bias, normalised input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(8, 12), list[int]()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = x.numel() // x.shape[-1]
        assert count % 16 == 0
        self.seen.append(count)
        return self.linear(x), self.linear.bias, x * 2


@pytest.mark.usefixtures("multiple")
@pytest.mark.parametrize(
    ("shape", "seen"),
    [((1, 8), 16), ((1, 1, 8), 16), ((16, 8), 16), ((17, 8), 32), ((2, 3, 5, 8), 32), ((0, 8), 0), ((4, 4, 8), 16)],
)
@pytest.mark.report("NVIDIA/TransformerEngine#1422", "NVIDIA/TransformerEngine#1571", "NVIDIA/TransformerEngine#232")
def test_outputs_and_gradients_are_those_without_rows_added(shape: tuple[int, ...], seen: int) -> None:
    module, x = Picky(), torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    module.double()
    y, bias, normed = run_padded(module, x)
    assert module.seen == [seen]
    assert bias is module.linear.bias
    assert torch.equal(normed, x * 2)
    expected = module.linear(x)
    torch.testing.assert_close(y, expected)
    weights = torch.randn_like(y)
    parts = (x, module.linear.weight, module.linear.bias)
    for actual, wanted in zip(torch.autograd.grad(y, parts, weights), torch.autograd.grad(expected, parts, weights), strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.usefixtures("multiple")
def test_rows_added_change_no_scale() -> None:
    """They repeat a row: zeros, too, would move the largest of what follows a bias."""
    seen: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    x = torch.randn(5, 8)
    run_padded(forward, x)
    assert {tuple(row.tolist()) for row in seen[0]} == {tuple(row.tolist()) for row in x}


def test_nothing_is_added_in_high_precision() -> None:
    x = torch.randn(5, 8)
    assert run_padded(lambda given: given, x) is x


@pytest.mark.usefixtures("multiple")
def test_further_arguments_reach_the_module() -> None:
    y = run_padded(lambda x, scale, *, shift: x * scale + shift, torch.ones(3, 8), 2.0, shift=1.0)
    assert torch.equal(y, torch.full((3, 8), 3.0))


def test_a_compiled_model_sees_the_recipe_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph without breaks, as te.Linear has it."""
    home, state = ModuleType("transformer_engine.pytorch.quantization"), SimpleNamespace(enabled=False)

    class Float8CurrentScaling: ...

    class Manager:
        @classmethod
        def is_fp8_enabled(cls) -> bool:
            return bool(state.enabled)

        @classmethod
        def get_fp8_recipe(cls) -> Any:
            return Float8CurrentScaling()

    home.FP8GlobalStateManager = Manager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home.__name__, home)

    def forward(x: Tensor) -> Tensor:
        return x * x.shape[0]  # shows how many rows there were

    compiled = torch.compile(lambda x: run_padded(forward, x), backend="eager", fullgraph=True)
    for enabled, rows_seen in ((False, 3.0), (True, 16.0), (False, 3.0)):
        state.enabled = enabled
        assert torch.equal(compiled(torch.ones(3, 8)), torch.full((3, 8), rows_seen))
