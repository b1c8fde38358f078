"""A norm of a bf16 model whose statistics are in bf16: exact in float32, less accurate in bf16."""

from __future__ import annotations

import pytest
import torch

import te_convert
from te_convert.reference import layer_norm_linear, layer_norm_mlp
from tests.verify.model_zoo import build, perturb


def normalize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    eps: float,
    normalization: str,
    zero_centered_gamma: bool,
) -> torch.Tensor:
    """In the dtype of ``x``, where Transformer Engine computes in float32."""
    gamma = weight + 1 if zero_centered_gamma else weight
    centred = x - x.mean(-1, keepdim=True) if normalization == "LayerNorm" else x
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * gamma
    return (y if bias is None else y + bias).to(x.dtype)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_statistics_in_bf16_are_caught_by_the_error_ratio(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(name, torch.bfloat16)
    perturb(model)
    monkeypatch.setattr(layer_norm_linear, "normalize", normalize)
    monkeypatch.setattr(layer_norm_mlp, "normalize", normalize)
    parity = te_convert.convert(model, inputs, backend="reference").report.parity
    (site,) = [site for site in parity.reverted if site.fqn.endswith("layernorm_qkv")]
    assert "error ratio" in site.why
    assert site.figures is not None
    assert site.figures.sqnr_db > 100  # the mapping is right
    assert parity.passed
