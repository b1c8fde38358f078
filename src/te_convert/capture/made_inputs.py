"""Seeded random tensors for models that came without inputs."""

from __future__ import annotations

import torch
from torch import nn

BATCH, LENGTH = 2, 8


def floats(model: nn.Module, *shape: int) -> torch.Tensor:
    """Normal numbers of the shape, in the dtype of the model's first floating-point parameter (float32 without one)."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)


def ids(count: int) -> torch.Tensor:
    """Token ids below ``count``, int64 [BATCH, LENGTH]."""
    return torch.randint(0, max(count, 1), (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
