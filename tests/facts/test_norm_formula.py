"""Every choice that the formula of a norm leaves is recovered from its numbers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from te_convert.facts.norm_formula import Kind
from te_convert.facts.norms import looks_like_norm, probe_norm
from tests.facts.norm_samples import norm


class ByHand(nn.Module):
    """A norm with every choice that the formula leaves."""

    def __init__(self, width: int, eps: float, *, centred: bool, one_plus: bool, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.small = eps
        self.centred, self.one_plus = centred, one_plus
        self.gain = nn.Parameter(torch.rand(width, dtype=dtype))
        self.shift = nn.Parameter(torch.rand(width, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y - y.mean(-1, keepdim=True) if self.centred else y
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.small)
        y = y * (self.gain.float() + self.one_plus)
        return (y if self.shift is None else y + self.shift.float()).to(x.dtype)


@settings(max_examples=40, deadline=None)
@given(
    width=st.one_of(st.integers(2, 9), st.integers(2, 600)),
    exponent=st.floats(-12.0, -2.0),
    centred=st.booleans(),
    one_plus=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_every_choice_is_recovered(
    width: int, exponent: float, centred: bool, one_plus: bool, bias: bool, dtype: torch.dtype
) -> None:
    eps = 10.0**exponent
    module = ByHand(width, eps, centred=centred, one_plus=one_plus, bias=bias, dtype=dtype)
    kind: Kind = "LayerNorm" if centred else "RMSNorm"
    shift = "shift" if bias else None
    assert looks_like_norm(module)
    assert probe_norm(module) == norm(kind, width, eps, zero_centered_gamma=one_plus, weight="gain", bias=shift)


@settings(max_examples=25, deadline=None)
@given(eps=st.floats(1e-12, 1e-2), width=st.integers(2, 300), bias=st.booleans(), rms_norm=st.booleans())
def test_torch_norms_with_any_eps(eps: float, width: int, bias: bool, rms_norm: bool) -> None:
    module = nn.RMSNorm(width, eps=eps) if rms_norm else nn.LayerNorm(width, eps=eps, bias=bias)
    expected = norm("RMSNorm", width, eps) if rms_norm else norm("LayerNorm", width, eps, bias="bias" if bias else None)
    assert probe_norm(module) == expected
