"""Does a norm of a bf16 or fp16 site compute its statistics in float32, as TE's do?

Statistics in the low precision cost a site about one more rounding.  Behind a matrix, an activation and a bias that is inside any
bound on accuracy, so it is looked for where it shows: a norm gives the same result for ``s * x`` as for ``x``.  Rows of small
integers times a few factors of so few bits that every product is exact reach a norm without any rounding.  Float32 statistics
then agree to 2⁻²² or so and are rounded to the same numbers, but for a rare tie.  Statistics in low precision are rounded
differently for every factor, and the whole row with them: through matrices and activations to the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.verify.tolerance import rounding_floor

ROWS, FACTORS = 8, 8
_LOW = {torch.bfloat16: 8, torch.float16: 11}
"""Bits of the significand, the leading one included."""
_EPS_SHARE = 1e-8
"""What eps may be of the mean square, so that it does not change the result either."""
_LARGEST_POWER = 10
"""fp16 ends at 2¹⁶, and the integers times their factors stay below 2⁷."""


def statistics_spread(site: nn.Module) -> float | None:
    """The largest spread over the norms of a site; None where there is nothing to see.

    Args:
        site: a converted module; its own parameters are used, with gamma 1 and no biases for the time being.

    Returns:
        Mean absolute deviation of the outputs for scaled rows from their mean over the scales, relative to the mean absolute
        output, in units of one rounding (:func:`rounding_floor`); infinite for outputs that are not finite.

    Raises:
        Exception: whatever a module raises.
    """
    found = [spread for module in _norms(site) if (spread := _spread(module)) is not None]
    return max(found, default=None)


def _norms(site: nn.Module) -> Iterator[Any]:
    """The site's TE modules that normalise: those with a gamma in bf16 or fp16."""
    for module in site.modules():
        gamma = _gamma(module)
        if gamma is not None and gamma.dtype in _LOW and not gamma.is_meta and gamma.numel() > 1:
            yield module


def _gamma(module: nn.Module) -> nn.Parameter | None:
    """TE's fused modules call it ``layer_norm_weight``, its norms ``weight``."""
    if not hasattr(module, "zero_centered_gamma"):
        return None
    gamma = module._parameters.get("layer_norm_weight", module._parameters.get("weight"))
    return gamma if gamma is not None and gamma.dim() == 1 else None


def _spread(module: Any) -> float | None:
    gamma = _gamma(module)
    assert gamma is not None  # it is one of _norms
    x = scaled_rows(gamma.numel(), gamma.dtype, float(module.eps)).to(gamma.device)
    run = getattr(module, "te_forward", module)
    with torch.no_grad(), _neutral(module):
        y = run(x.flatten(0, 1))
    y = (y[0] if isinstance(y, tuple) else y).double().view(ROWS, FACTORS, -1)
    if not bool(torch.isfinite(y).all()):
        return math.inf
    size = float(y.abs().mean())
    deviation = float((y - y.mean(1, keepdim=True)).abs().mean())
    if size > 0.0:
        return deviation / size / rounding_floor(gamma.dtype)
    blind = any(p is not None and p.dim() > 1 and not bool(p.any()) for p in module._parameters.values())
    return None if blind else math.inf  # the square of an input overflowed


def scaled_rows(width: int, dtype: torch.dtype, eps: float) -> Tensor:
    """[ROWS, FACTORS, width]: rows of integers, half of them of one sign (a large mean), each times every factor; all exact."""
    bits = _LOW[dtype] // 2
    largest, first = (1 << (_LOW[dtype] - bits)) - 1, 1 << (bits - 1)
    random = torch.Generator().manual_seed(0)
    around_zero = torch.randint(-largest, largest + 1, (ROWS // 2, width), generator=random)
    positive = torch.randint(largest // 2 + 1, largest + 1, (ROWS - ROWS // 2, width), generator=random)
    factors = torch.linspace(first, 2 * first - 1, FACTORS, dtype=torch.float32).round() / first
    rows = torch.cat((around_zero, positive)).float()[:, None] * factors[:, None]
    power = math.ceil(math.log2(max(math.sqrt(eps / _EPS_SHARE) / largest, 1.0)))
    return (rows * (1 << min(power, _LARGEST_POWER))).to(dtype)


@contextmanager
def _neutral(module: nn.Module) -> Iterator[None]:
    """Gamma 1 and no biases for the time being: a large bias would hide the rest.  Values are put back bit for bit."""
    gamma, zero_centered = _gamma(module), bool(getattr(module, "zero_centered_gamma", False))
    saved = [(p, p.detach().clone()) for name, p in module._parameters.items() if p is not None and (p is gamma or "bias" in name)]
    try:
        with torch.no_grad():
            for parameter, _ in saved:
                parameter.fill_(0.0 if zero_centered or parameter is not gamma else 1.0)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)
