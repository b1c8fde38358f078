"""A model in which something stands against each kind of fusion."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMS(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Written(nn.Module):
    """Attention as two products; k has no bias, ``twist`` puts something between them that TE does not know."""

    def __init__(self, width: int, twist: bool) -> None:
        super().__init__()
        self.twist = twist
        self.q, self.v, self.o = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.k = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = (f(x).view(b, n, 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-2, -1)) * 0.25
        scores = scores.tanh() if self.twist else scores
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """The second norm is read by a mean too; ``idle`` never runs."""

    def __init__(self, width: int, twist: bool) -> None:
        super().__init__()
        self.norm1, self.attention = RMS(width), Written(width, twist)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.idle = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        n = self.norm2(x)
        return x + self.fc2(torch.relu(self.fc1(n))) + n.mean()  # type: ignore[no-any-return]


class Scaled(nn.Linear):
    """A Linear in name only."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def sample() -> tuple[nn.Module, Any]:
    """Embedding, a layer that TE can attend for, one that it cannot, and a Scaled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), Layer(32, False), Layer(32, True), Scaled(32, 8))
    return model, (torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0)),)
