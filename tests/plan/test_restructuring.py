"""A model that puts other modules into itself when it runs keeps every module that a fusion would add, so nothing fuses."""

from __future__ import annotations

import torch
from torch import nn

import te_convert


class Inner(nn.Module):
    """Two Linears that share an input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.q(x) + self.k(x)
        return y


class Restructures(nn.Module):
    """Replaces its inner module by another that takes over the Linears, as BigBird's attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = Inner()
        new.q, new.k = self.inner.q, self.inner.k
        self.inner = new
        y: torch.Tensor = self.inner(x)
        return y


def test_nothing_is_fused_and_no_parameter_is_lost() -> None:
    model, x = Restructures(), torch.randn(3, 8)
    converted, report = te_convert.convert(model, (x,))
    assert report.parity.passed
    assert {str(site.outcome) for site in report.sites} == {"CONVERTED"}
    assert any("puts other modules into itself" in note for note in report.notes)
    converted(x)
    assert len(list(converted.parameters())) == 4
