"""A formula that differs in one detail is no norm, and the reason says what was seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from te_convert.facts.norms import looks_like_norm
from tests.facts.norm_samples import Formula, detail, layer, rms

NEAR_MISSES: dict[str, tuple[Callable[..., object], int, str]] = {
    "unbiased variance": (
        lambda x, a: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-6).sqrt() * a,
        1,
        "it differs from LayerNorm(eps=",
    ),
    "eps outside the root": (lambda x, a: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-3) * a, 1, "RMSNorm(eps=1e-06)"),
    "variance floor": (lambda x, a: x / x.pow(2).mean(-1, keepdim=True).clamp_min(1e-6).sqrt() * a, 1, "RMSNorm(eps=1e-06)"),
    "unit length": (lambda x, a: functional.normalize(x, dim=-1) * a, 1, "differs from RMSNorm(eps="),
    "root of width times unit length": (lambda x, a: functional.normalize(x, dim=-1) * 24**0.5 * a, 1, "differs from RMSNorm"),
    "floor below the tiny inputs": (
        lambda x, a: x / x.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-18) * a,
        1,
        "its divisor has a floor in place of an eps",
    ),
    "l1": (lambda x, a: x / (x.abs().mean(-1, keepdim=True) + 1e-6) * a, 1, "differs from RMSNorm"),
    "partial": (lambda x, a: x * torch.rsqrt(x[..., :12].pow(2).mean(-1, keepdim=True) + 1e-6) * a, 1, "differs from RMSNorm"),
    "channels first": (lambda x, a: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * a, 1, "is not a multiple"),
    "grouped": (
        lambda x, a: rms(x.unflatten(-1, (2, -1))).flatten(-2) * a,
        1,
        "its output is not a multiple of the (centred) input",
    ),
    "softmax": (lambda x, a: torch.softmax(x, -1) * a, 1, "it does not normalise"),
    "affine": (lambda x, a, b: x * a + b, 2, "it does not normalise: an input 1e4 times larger gives an output 1e+04 times"),
    "two weights": (lambda x, a, b: rms(x) * (a + b), 2, "a and b act alike"),
    "two weights that multiply": (lambda x, a, b: rms(x) * a * (1 + b), 2, "differs from RMSNorm"),
    "two biases": (lambda x, a, b: rms(x) + a + b, 2, "a and b act alike"),
    "exponential gamma": (lambda x, a: rms(x) * a.exp(), 1, "differs from RMSNorm"),
    "doubled bias": (lambda x, a, b: layer(x) * a + 2 * b, 2, "differs from LayerNorm"),
    "clamped output": (lambda x, a: (rms(x) * a).clamp(-500.0, 500.0), 1, "differs from RMSNorm"),
    "clamped input": (lambda x, a: rms(x.clamp(-65504.0, 65504.0)) * a, 1, "differs from RMSNorm"),
    "returns a tuple": (lambda x, a: (rms(x) * a, x), 1, "forward returns a tuple, not one tensor"),
    "returns NaN": (lambda x, a: rms(x) * a * float("nan"), 1, "NaN or infinity"),
    "another shape": (lambda x, a: (rms(x) * a).flatten(), 1, "it maps shape [3, 5, 24] to [360]"),
    "edits its input": (lambda x, a: x.mul_(torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * a, 1, "changes its input"),
    "hard-coded dimension": (
        lambda x, a: x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + 1e-6) * a,
        1,
        "differs from RMSNorm",
    ),
    "half precision inside": (lambda x, a: rms(x.bfloat16()).to(x.dtype) * a, 1, "is not a multiple"),
}


@pytest.mark.parametrize("case", sorted(NEAR_MISSES))
def test_near_misses_say_what_was_seen(case: str) -> None:
    formula, count, expected = NEAR_MISSES[case]
    module = Formula(formula, count=count)
    assert looks_like_norm(module)
    assert expected in detail(module)
