"""Attention that is written out is refused with what stands between its products, or becomes part of a proved block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import te_convert
from te_convert.plan.model import Outcome


class Manual(nn.Module):
    """Causal attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril())
        self.mask: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 4, 8).transpose(1, 2) for part in self.qkv(x).split(width, -1))
        scores = (q @ k.transpose(-2, -1)) / 8**0.5
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        y: torch.Tensor = self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))
        return y


class Block(nn.Module):
    """Pre-norm around it."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.n1, self.attn, self.n2 = nn.LayerNorm(32), Manual(), nn.LayerNorm(32)
        self.up, self.act, self.down = nn.Linear(32, 64), act, nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.n1(x))
        y: torch.Tensor = x + self.down(self.act(self.up(self.n2(x))))
        return y


def perturbed(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.eval()


def test_alone_it_is_refused_and_says_what_it_does() -> None:
    plan = te_convert.analyze(Manual(), (torch.randn(2, 6, 32),))
    site = plan.get("")
    assert site.outcome is Outcome.REFUSED
    assert site.kind == "Attention"
    assert [reason.code for reason in site.reasons] == ["attention.eager-region"]
    assert "masked_fill" in site.reasons[0].detail


@pytest.mark.parametrize(("act", "whole"), [(nn.ReLU(), True), (nn.GELU(approximate="tanh"), True), (nn.GELU(), False)])
def test_as_part_of_a_proved_block_it_converts(act: nn.Module, whole: bool) -> None:
    model, x = perturbed(nn.Sequential(Block(act), nn.Linear(32, 3))), torch.randn(2, 6, 32)
    converted, report = te_convert.convert(model, (x,))
    assert report.parity.passed
    names = {fusion.fqn for fusion in te_convert.analyze(model, (x,)).fusions}
    assert ("0" in names) == whole
    with torch.no_grad():
        assert (converted(x) - model(x)).abs().max() <= 1e-5
    assert te_convert.original_state_dict(converted).keys() == model.state_dict().keys()


def test_nothing_is_said_with_fusions_off() -> None:
    with pytest.raises(KeyError):
        te_convert.analyze(Manual(), (torch.randn(2, 6, 32),), fuse=False).get("")
