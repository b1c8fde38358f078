"""Twins of te.LayerNorm and te.RMSNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from te_convert.reference.module import TwinModule, compute_dtype, output_dtype, without_autocast


class _Norm(TwinModule):
    """Shared constructor: ``weight`` of ``normalized_shape``, kept as ``1 + weight`` when ``zero_centered_gamma``."""

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = (normalized_shape,)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = nn.Parameter(start(normalized_shape, dtype=dtype, device=device))

    def _gamma(self, dtype: torch.dtype) -> torch.Tensor:
        gamma = self.weight.to(dtype)
        return gamma + 1 if self.zero_centered_gamma else gamma

    def extra_repr(self) -> str:
        """Constructor facts for printing."""
        return f"{self.normalized_shape[0]}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Norm):
    """``(x − mean) / sqrt(var + eps) · gamma + bias`` over the last dimension, in float32, rounded once.

    Shapes: input and output [..., normalized_shape]; ``weight`` and ``bias`` [normalized_shape].
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, zero_centered_gamma=zero_centered_gamma, dtype=dtype, device=device)
        self.bias = nn.Parameter(torch.zeros(normalized_shape, dtype=dtype, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Input [..., normalized_shape] → the same shape in the weight's dtype (autocast's under autocast)."""
        wide = compute_dtype(x.dtype)
        with without_autocast(x):
            y = F.layer_norm(x.to(wide), self.normalized_shape, self._gamma(wide), self.bias.to(wide), self.eps)
        return y.to(output_dtype(x, self.weight))


class RMSNorm(_Norm):
    """``x / sqrt(mean(x²) + eps) · gamma`` over the last dimension, in float32, rounded once.

    TE's default ``eps`` is 1e-5, unlike torch's (finfo.eps) and most models' (1e-6).
    Shapes: input and output [..., normalized_shape]; ``weight`` [normalized_shape].
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Input [..., normalized_shape] → the same shape in the weight's dtype (autocast's under autocast)."""
        wide = compute_dtype(x.dtype)
        with without_autocast(x):
            values = x.to(wide)
            scale = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.eps)
            y = values * scale * self._gamma(wide)
        return y.to(output_dtype(x, self.weight))
