"""Norms under misleading names, and MLPs, for the tests of traps and of fusion rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rewrite.trap_samples import MLP, WIDTH


class LN(nn.Module):
    """nanoGPT's, under a name that says nothing."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.scale, self.shift, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.scale.shape, self.scale, self.shift, self.eps)


class LayerNorm(nn.Module):
    """ImageGPT's: called LayerNorm, an RMS norm."""

    def __init__(self, width: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.ones(width) - offset), eps, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * (self.offset + self.weight)).to(x.dtype)


class Llama(LayerNorm):
    """Rounds before it multiplies by the weight."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Feed(nn.Module):
    """A norm and an MLP; ``use`` may be replaced after the conversion."""

    def __init__(self, mlp: nn.Module, use: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mlp
        self.use = use or (lambda m, x: x + m.mlp(m.norm(x)))

    def forward(self, x: Tensor) -> Any:
        return self.use(self, x)


class WithResidual(MLP):
    """Bloom's MLP takes the residual too."""

    def forward(self, x: Tensor, residual: Tensor | None = None, scale: float = 1.0) -> Tensor:
        y: Tensor = self.fc2(self.act(self.fc1(x)))
        return y if residual is None else y * scale + residual


def with_residual(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.mlp(m.norm(x), x)
    return out
