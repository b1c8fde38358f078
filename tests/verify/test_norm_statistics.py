"""Norms of bf16 and fp16 models whose statistics are not in float32: exact in float32, and caught however little they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.reference import (
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    RMSNorm,
    TransformerLayer,
    layer_norm_linear,
    layer_norm_mlp,
)
from te_convert.verify import gate
from te_convert.verify.norm_statistics import FACTORS, ROWS, scaled_rows, statistics_spread
from te_convert.verify.tolerance import STATISTICS_SPREAD
from tests.verify.model_zoo import build, perturb

LOW = (torch.bfloat16, torch.float16)
Make = Callable[[int, torch.dtype], nn.Module]


def all_low(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    eps: float,
    normalization: str,
    zero_centered_gamma: bool,
) -> torch.Tensor:
    """Everything in the dtype of ``x``, where Transformer Engine computes in float32."""
    gamma = weight + 1 if zero_centered_gamma else weight
    centred = x - x.mean(-1, keepdim=True) if normalization == "LayerNorm" else x
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * gamma
    return (y if bias is None else y + bias).to(x.dtype)


def statistics_low(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    eps: float,
    normalization: str,
    zero_centered_gamma: bool,
) -> torch.Tensor:
    """Mean and mean square alone are rounded: the least that can be wrong."""
    wide, gamma = x.float(), weight.float() + zero_centered_gamma
    centred = wide - wide.mean(-1, keepdim=True).to(x.dtype).float() if normalization == "LayerNorm" else wide
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True).to(x.dtype).float() + eps) * gamma
    return (y if bias is None else y + bias.float()).to(x.dtype)


WRONG = {"everything": all_low, "statistics": statistics_low}


def plant(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    """In all norms that a conversion can put in place."""
    monkeypatch.setattr(layer_norm_linear, "normalize", wrong)
    monkeypatch.setattr(layer_norm_mlp, "normalize", wrong)
    for kind in (LayerNorm, RMSNorm):

        def forward(self: Any, x: torch.Tensor, name: str = kind.__name__) -> torch.Tensor:
            facts = {"eps": self.eps, "normalization": name, "zero_centered_gamma": self.zero_centered_gamma}
            y: torch.Tensor = wrong(x, self.weight, getattr(self, "bias", None), **facts)
            return y

        monkeypatch.setattr(kind, "forward", forward)


MODULES: dict[str, Make] = {
    "LayerNorm": lambda width, dtype: LayerNorm(width, dtype=dtype),
    "RMSNorm": lambda width, dtype: RMSNorm(width, 1e-6, dtype=dtype),
    "RMSNorm, zero-centered": lambda width, dtype: RMSNorm(width, zero_centered_gamma=True, dtype=dtype),
    "LayerNormLinear": lambda width, dtype: LayerNormLinear(width, width, params_dtype=dtype),
    "LayerNormLinear of RMSNorm": lambda width, dtype: LayerNormLinear(
        width, 64, 1e-6, normalization="RMSNorm", zero_centered_gamma=True, params_dtype=dtype
    ),
    "LayerNormMLP": lambda width, dtype: LayerNormMLP(width, 2 * width, params_dtype=dtype),
    "LayerNormMLP of RMSNorm": lambda width, dtype: LayerNormMLP(
        width, width, normalization="RMSNorm", activation="swiglu", bias=False, params_dtype=dtype
    ),
}


def made(name: str, width: int, dtype: torch.dtype) -> nn.Module:
    """With large biases and gammas, behind which statistics hide."""
    torch.manual_seed(0)
    module = MODULES[name](width, dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape).to(dtype))
    return module


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("width", [8, 32, 768])
@pytest.mark.parametrize("name", MODULES)
def test_right_and_wrong_statistics_are_far_apart(
    name: str, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = made(name, width, dtype)
    right = statistics_spread(module)
    assert right is not None
    assert right < STATISTICS_SPREAD / 3
    for wrong in WRONG.values():
        plant(monkeypatch, wrong)
        spread = statistics_spread(module)
        assert spread is not None
        assert spread > 1.5 * STATISTICS_SPREAD


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-3, 1.0])
def test_eps_is_no_obstacle(eps: float, dtype: torch.dtype) -> None:
    spread = statistics_spread(RMSNorm(64, eps, dtype=dtype))
    assert spread is not None
    assert spread < STATISTICS_SPREAD / 3


@pytest.mark.parametrize("dtype", LOW)
def test_the_rows_are_exact_multiples_of_one_another(dtype: torch.dtype) -> None:
    x = scaled_rows(100, dtype, 1e-3)
    assert (x.shape, x.dtype) == ((ROWS, FACTORS, 100), dtype)
    wide = x.double()
    largest = wide.abs().amax(-1, keepdim=True)
    assert torch.allclose(wide / largest, (wide / largest)[:, :1].expand_as(wide), rtol=0, atol=1e-15)
    assert len(set(largest[0].flatten().tolist())) == FACTORS


def test_parameters_are_as_they_were() -> None:
    module = made("LayerNormMLP", 32, torch.bfloat16)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    statistics_spread(module)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


def test_nothing_to_see() -> None:
    """float32 has bounds of its own; zeros stay zeros; a Linear has no statistics."""
    assert statistics_spread(LayerNorm(32)) is None
    assert statistics_spread(nn.Linear(8, 8, dtype=torch.bfloat16)) is None
    module: Any = made("LayerNormLinear", 32, torch.bfloat16)
    with torch.no_grad():
        module.weight.zero_()
    assert statistics_spread(module) is None


def test_squares_that_overflow_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, all_low)
    assert statistics_spread(RMSNorm(64, 1.0, dtype=torch.float16)) == float("inf")


def test_a_norm_inside_a_whole_layer_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = TransformerLayer(32, 64, 4, params_dtype=torch.bfloat16)
    right = statistics_spread(layer)
    assert right is not None
    assert right < STATISTICS_SPREAD / 3
    plant(monkeypatch, statistics_low)
    wrong = statistics_spread(layer)
    assert wrong is not None
    assert wrong > 1.5 * STATISTICS_SPREAD


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.bfloat16), ("gpt2", torch.float16), ("vit", torch.bfloat16), ("vit", torch.float16), ("bert", torch.bfloat16)],
)
def test_every_norm_of_a_model_is_put_back(name: str, dtype: torch.dtype, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(name, dtype)
    perturb(model)
    plan = te_convert.convert(model, inputs, backend="reference").plan
    norms = {fusion.fqn for fusion in plan.fusions if hasattr(fusion.spec, "normalization")}
    norms |= {site.fqn for site in plan.swaps if hasattr(site.spec, "zero_centered_gamma")}
    plant(monkeypatch, WRONG[wrong])
    parity = te_convert.convert(model, inputs, backend="reference").report.parity
    assert {site.fqn for site in parity.reverted} == norms
    assert parity.passed
    assert all(site.figures is not None and site.figures.sqnr_db > 100 for site in parity.reverted)  # the mapping is right


def test_an_original_with_such_statistics_is_converted() -> None:
    """The replacement is more accurate, and its own statistics are what is judged."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return all_low(x, self.weight, None, eps=1e-6, normalization="RMSNorm", zero_centered_gamma=False)

    model = nn.Sequential(Norm(), nn.Linear(64, 64)).to(torch.bfloat16).eval()
    result = te_convert.convert(model, (torch.randn(16, 64).bfloat16(),), backend="reference")
    assert result.report.parity.passed
    assert not result.report.parity.reverted


def test_a_module_that_raises_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(site: nn.Module) -> float:
        raise RuntimeError("planted")

    monkeypatch.setattr(gate, "statistics_spread", raises)
    parity = te_convert.convert(*build("sequential"), backend="reference").report.parity
    assert parity.passed
    assert any("statistics was not judged: RuntimeError: planted" in note for note in parity.notes)
