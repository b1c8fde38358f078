"""The model under test: a small classifier of token sequences, with attention and an MLP, each behind a norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEADS, CLASSES = 256, 64, 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return out


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x).mean(dim=1))
        return logits


def build_model() -> Classifier:
    """What te-convert calls.  Load your weights here; without the seed every run would check other ones."""
    torch.manual_seed(0)
    return Classifier().eval()


def example_inputs() -> tuple[torch.Tensor]:
    """What te-convert runs the model on."""
    return (torch.randint(0, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(0)),)
