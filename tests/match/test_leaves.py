"""Which modules the tracer keeps whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from te_convert.capture.leaves import is_builtin_leaf
from te_convert.match.leaves import LeafPolicy


class Act(nn.Module):
    def __init__(self, slope: float = 0.0) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope)


class Adds(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.matrix = nn.Parameter(torch.ones(4, 4))
        self.other = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix @ self.other * self.gain


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nn.Linear(4, 4), True),
        (lambda: nn.LSTM(4, 4), True),
        (nn.Identity, True),
        (lambda: Act(0.01), True),
        (lambda: Act(0.2), False),
        (Adds, False),
        (Gain, False),
        (lambda: nn.Sequential(nn.Linear(4, 4)), False),
        (lambda: nn.MultiheadAttention(4, 2), False),
        (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), True),
    ],
)
def test_policy(make: Callable[[], nn.Module], expected: bool) -> None:
    assert LeafPolicy()(make()) is expected


def test_equal_activations_are_probed_once_and_others_again(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[nn.Module] = []

    def probe(module: nn.Module) -> str | None:
        probed.append(module)
        return "leaky_relu" if module.slope == 0.01 else None

    monkeypatch.setattr("te_convert.match.leaves.probe_activation", probe)
    policy = LeafPolicy()
    assert [policy(Act(slope)) for slope in (0.01, 0.2, 0.01, 0.2)] == [True, False, True, False]
    assert [module.slope for module in probed] == [0.01, 0.2]


def test_builtin_leaves_have_no_children() -> None:
    assert is_builtin_leaf(nn.LeakyReLU(0.2))
    assert not is_builtin_leaf(nn.TransformerEncoderLayer(4, 2))
    assert not is_builtin_leaf(Act())
