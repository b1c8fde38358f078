"""A small GPT written by hand, as many are: its own LayerNorm and RMSNorm, a fused qkv, SDPA, and a tied output layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 128, 64, 64, 4, 2  # ASCII characters; windows of 64 of them


class LN(nn.Module):
    """LayerNorm by hand, with weight and without bias."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, self.eps)


class RMS(nn.Module):
    """RMSNorm by hand."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.scale


class Attention(nn.Module):
    """Causal attention over all heads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a norm and with a residual around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = RMS(WIDTH), Attention()
        self.norm2 = RMS(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        hidden = F.gelu(self.fc1(self.norm2(x)), approximate="tanh")
        out: torch.Tensor = x + self.fc2(hidden)
        return out


class GPT(nn.Module):
    """Logits of the next character at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = LN(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight  # one matrix for both

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def build_model() -> GPT:
    """What te-convert calls; the same weights each time."""
    torch.manual_seed(0)
    return GPT()


def example_inputs() -> tuple[torch.Tensor]:
    """What te-convert runs the model on."""
    return (torch.randint(0, VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(0)),)
