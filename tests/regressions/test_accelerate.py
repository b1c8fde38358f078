"""The column of accelerate in docs/regressions.md, seen by running its own conversion code with a stand-in for TE.

A failure here means that accelerate does something else now: correct the table in defects.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    """te.Linear as far as accelerate uses it."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, params_dtype: torch.dtype | None = None) -> None:
        super().__init__(in_features, out_features, bias, dtype=params_dtype)


class LayerNorm(nn.Module):
    """te.LayerNorm: always a bias, one dimension."""

    def __init__(self, width: int, eps: float = 1e-5, params_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width, dtype=params_dtype)), nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """accelerate's conversion, in place, as Accelerator.prepare calls it."""
    module: Any = pytest.importorskip("accelerate.utils.transformer_engine")
    package: Any = ModuleType("transformer_engine")
    package.pytorch = ModuleType("transformer_engine.pytorch")
    package.pytorch.Linear, package.pytorch.LayerNorm = Linear, LayerNorm
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package.pytorch)
    monkeypatch.setattr(module, "is_transformer_engine_available", lambda: True)
    monkeypatch.setattr(module, "GatheredParameters", lambda *_, **__: nullcontext())  # for DeepSpeed alone; wants an Accelerator

    def run(model: Any, **options: Any) -> Any:
        with torch.no_grad():
            module.convert_model(model, **options)
        return model

    return run


def kinds(model: nn.Module) -> list[type]:
    return [type(module) for module in model.children()]


def test_it_stops_at_the_first_odd_layer(convert: Callable[..., Any]) -> None:
    sizes = ((16, 16), (16, 10), (10, 16), (16, 16))
    model = convert(nn.Sequential(*(nn.Linear(*pair) for pair in sizes), nn.LayerNorm(16)))
    assert kinds(model) == [Linear, nn.Linear, nn.Linear, nn.Linear, nn.LayerNorm]


def test_ties_names_flags_and_hooks(convert: Callable[..., Any]) -> None:
    model: Any = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)).eval()
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    model[2].register_forward_hook(lambda *_: None)
    model.add_module("again", model[0])
    convert(model)
    assert model[1].weight is not model[0].weight
    assert (type(model[0]), type(model.again)) == (Linear, nn.Linear)
    assert model[2].weight.requires_grad
    assert model[2].training
    assert not model[2]._forward_hooks


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_subclasses_parametrizations_and_roots(convert: Callable[..., Any]) -> None:
    x = torch.randn(4, 16)
    model: Any = nn.Sequential(Doubled(16, 16))
    expected = model(x)
    assert not torch.allclose(convert(model)(x), expected)
    parametrized = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)))
    assert len(list(parametrized.parameters())) == 3
    assert len(list(convert(parametrized).parameters())) == 2
    root = nn.Linear(16, 16)
    assert type(convert(root)) is nn.Linear


def test_norms(convert: Callable[..., Any]) -> None:
    with pytest.raises(AttributeError):
        convert(nn.Sequential(nn.LayerNorm(16, elementwise_affine=False)))
    with pytest.raises(RuntimeError):
        convert(nn.Sequential(nn.LayerNorm((4, 16))))
    model: Any = convert(nn.Sequential(nn.LayerNorm(16, bias=False)))
    assert model[0].bias.requires_grad
    assert kinds(convert(nn.Sequential(nn.RMSNorm(16)))) == [nn.RMSNorm]


def test_out_proj_is_replaced_and_never_runs(convert: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = convert(nn.MultiheadAttention(16, 4, batch_first=True))
    assert type(model.out_proj) is Linear
    calls: list[int] = []
    monkeypatch.setattr(Linear, "forward", lambda self, x: calls.append(1))
    x = torch.randn(2, 3, 16)
    model(x, x, x)
    assert not calls


def test_the_way_back_raises(convert: Callable[..., Any]) -> None:
    model = convert(nn.Sequential(nn.Linear(16, 16)))
    with pytest.raises(TypeError, match="params_dtype"):
        convert(model, to_transformer_engine=False)
