"""Attention that is written out converts, alone or in a proved block, or is refused with what stands in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.plan.model import Outcome
from te_convert.replacements.specs import DotProductAttentionSpec
from tests.estimate.models import Block as PartsOfABlock
from tests.estimate.models import tokens


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


class Stack(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block])

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers[0](x)


def perturbed(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.eval()


@pytest.mark.parametrize("prefix", ["", "layers.0."])
def test_beside_a_fused_mlp_it_becomes_an_attention(prefix: str) -> None:
    """The MLP's norm is outside it, so what holds the whole fusion holds the attention, too, which the fusion does not do."""
    model = Stack(PartsOfABlock(eager=True)) if prefix else PartsOfABlock(eager=True)
    plan = te_convert.analyze(model, (tokens(),))
    assert [fusion.spec.name for fusion in plan.fusions if fusion.rule == "norm-mlp"] == ["te.LayerNormMLP"]
    assert (plan.get(f"{prefix}attn").outcome, plan.get(f"{prefix}attn").rule) == (Outcome.CONVERTED, "eager-attention")
    result = te_convert.convert(perturbed(model), (tokens(),))
    assert result.report.parity.passed
    assert next(site for site in result.report.sites if site.fqn == f"{prefix}attn").executed


def test_alone_it_becomes_an_attention() -> None:
    plan = te_convert.analyze(Manual(), (torch.randn(2, 6, 32),))
    site, (fusion,) = plan.get(""), plan.fusions
    assert site.outcome is Outcome.CONVERTED
    assert (site.kind, site.rule, site.fused_into) == ("Attention", "eager-attention", "core_attention")
    assert isinstance(fusion.spec, DotProductAttentionSpec)
    assert (fusion.spec.num_attention_heads, fusion.spec.kv_channels, fusion.spec.softmax_scale) == (4, (8, 8), None)


class Variant(nn.Module):
    """Attention with something about it that TE's has not."""

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.qkv, self.between, self.temperature = nn.Linear(32, 96), between, nn.Parameter(torch.ones(()))
        self.extra: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        weights = self.between(self, q @ k.transpose(-2, -1))
        y = (weights @ v).transpose(1, 2).flatten(-2)
        return (y, self.extra) if isinstance(self.extra, torch.Tensor) else y


def keep(self: Any, weights: torch.Tensor, extra: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    self.extra = extra(weights)
    return weights


NEAR_MISSES: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "softcap": (lambda _, s: (5 * torch.tanh(s / 5)).softmax(-1), "tanh does something to the scores"),
    "over the queries": (lambda _, s: s.softmax(-2), "softmax does something to the scores"),
    "multiplied mask": (lambda _, s: (s * torch.ones(6, 6).tril()).softmax(-1), "mul does something to the scores"),
    "weak fill": (lambda _, s: s.masked_fill(torch.ones(6, 6).triu(1) == 1, -50.0).softmax(-1), "masked_fill does something"),
    "scaled weights": (lambda _, s: s.softmax(-1) * 0.5, "mul does something to the scores"),
    "learnt temperature": (lambda self, s: (s * self.temperature.exp()).softmax(-1), "a number is computed by exp"),
    "read by another": (lambda self, s: keep(self, s.softmax(-1), lambda w: w.amax(-1)), "amax in the root reads its scores"),
    "returned": (lambda self, s: keep(self, s.softmax(-1), lambda w: w), "part of the model's output"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
@pytest.mark.report(
    "microsoft/onnxruntime#10359", "microsoft/onnxruntime#21208", "microsoft/onnxruntime#15225", "pytorch/pytorch#100452"
)
def test_near_misses_are_refused_with_what_is_in_the_way(name: str) -> None:
    between, detail = NEAR_MISSES[name]
    model = Variant(between)
    plan = te_convert.analyze(model, (torch.randn(2, 6, 32),))
    site = plan.get("")
    assert site.outcome is Outcome.REFUSED
    assert [reason.code for reason in site.reasons] == ["attention.eager-region"]
    assert detail in site.reasons[0].detail
    assert not any(fusion.rule == "eager-attention" for fusion in plan.fusions)


def test_attentions_of_two_scales_in_one_module_are_refused() -> None:
    class Twice(Variant):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(super().forward(x))

    scales = iter([0.5, 0.25] * 20)
    model = Twice(lambda _, s: (s * next(scales)).softmax(-1))
    (why,) = te_convert.analyze(model, (torch.randn(2, 6, 32),)).get("").reasons
    assert "its attentions differ in heads, sizes or scale" in why.detail


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
