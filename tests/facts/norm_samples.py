"""Norms and look-alikes that the tests of norm probes share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from te_convert.facts.norm_formula import Kind, NormFacts
from te_convert.facts.norms import NotANorm, probe_norm

FLOAT32_EPS = 1.1920928955078125e-07
MODELS = "transformers.models."


def load(path: str, *args: Any, **kwargs: Any) -> nn.Module:
    """Build ``package.module:Class``."""
    module, name = path.split(":")
    built: nn.Module = getattr(importlib.import_module(module), name)(*args, **kwargs)
    return built


def norm(kind: Kind, width: int, eps: float, **changes: Any) -> NormFacts:
    """Facts of a norm with weight, bias if a LayerNorm, all in float32; ``changes`` replace any of them."""
    bias = "bias" if kind == "LayerNorm" else None
    defaults: dict[str, Any] = {"zero_centered_gamma": False, "weight": "weight", "bias": bias, "rounding": "float32"}
    return NormFacts(kind, width, eps, **{**defaults, "keeps_dtype": True, **changes})


def detail(module: nn.Module, **kwargs: Any) -> str:
    facts = probe_norm(module, **kwargs)
    assert isinstance(facts, NotANorm), facts
    return facts.detail


class Formula(nn.Module):
    """Applies a formula to its input and its parameters, under names that say nothing."""

    def __init__(self, formula: Callable[..., object], width: int = 24, count: int = 1) -> None:
        super().__init__()
        self.formula = formula
        self.width = width
        for name in "ab"[:count]:
            self.register_parameter(name, nn.Parameter(torch.rand(width)))

    def forward(self, x: Tensor) -> Any:
        return self.formula(x, *self.parameters())


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def layer(x: Tensor, eps: float = 1e-6) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=eps)


class LN(nn.Module):
    """The norm of nanoGPT: a LayerNorm with an optional bias."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)
