"""The norms that te.MultiheadAttention can put on queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from te_convert.reference.module import TwinModule, compute_dtype, without_autocast
from te_convert.reference.norms import LayerNorm, RMSNorm
from te_convert.reference.unsupported import require

QK_NORM_TYPES = (None, "L2Normalization", "RMSNorm", "LayerNorm")


class L2Normalization(TwinModule):
    """``x / sqrt(sum(x²) + eps)`` over the last dimension, in float32, rounded once; no parameters.

    Source: ``ops/basic/l2normalization.py``, ``jit.py``.
    """

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Input [..., d] → the same shape and dtype."""
        with without_autocast(x):
            wide = x.to(compute_dtype(x.dtype))
            return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        """Constructor facts for printing."""
        return f"eps={self.eps}"


def build_qk_norms(
    qk_norm_type: str | None,
    eps: float,
    head_dim: int,
    params_dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[nn.Module | None, nn.Module | None]:
    """Norms of queries and keys over one head each, ``weight`` [head_dim]; the parameterless one is shared.

    Raises:
        NotSupportedError: none of :data:`QK_NORM_TYPES`.
    """
    require(qk_norm_type in QK_NORM_TYPES, f"qk_norm_type {qk_norm_type!r} is none of {', '.join(map(str, QK_NORM_TYPES))}")
    if qk_norm_type is None:
        return None, None
    if qk_norm_type == "L2Normalization":
        shared = L2Normalization(eps=eps)
        return shared, shared
    kind = RMSNorm if qk_norm_type == "RMSNorm" else LayerNorm
    return kind(head_dim, eps, dtype=params_dtype, device=device), kind(head_dim, eps, dtype=params_dtype, device=device)
