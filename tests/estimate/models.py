from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm attention (torch's fused function, or written out) and a gated MLP."""

    def __init__(self, hidden: int = 64, heads: int = 4, eager: bool = False, scaled: bool = True) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attn, self.mlp = Attention(hidden, heads, eager), Mlp(hidden)
        self.scale = Scale() if scaled else None  # te.TransformerLayer has none: with one, the block stays in parts

    def forward(self, x: Tensor) -> Tensor:
        y = self.attn(self.norm(x))
        x = x + (y if self.scale is None else self.scale(y))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, eager: bool) -> None:
        super().__init__()
        self.heads, self.eager = heads, eager
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = (f(x).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.eager:
            scores = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5)
            y = scores.softmax(dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(batch, length, hidden))  # type: ignore[no-any-return]


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, 128), nn.Linear(hidden, 128)
        self.down = nn.Linear(128, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def tokens(batch: int = 2, length: int = 8, hidden: int = 64) -> Tensor:
    return torch.randn(batch, length, hidden)
