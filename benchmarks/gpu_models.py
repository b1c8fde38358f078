"""The models that benchmarks/gpu.py compares: a decoder in plain PyTorch, and the same one by hand on te.TransformerLayer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder in the manner of Llama: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases."""

    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    groups: int = 8
    layers: int = 4
    vocab: int = 32000
    batch: int = 4
    length: int = 2048

    @property
    def channels(self) -> int:
        return self.hidden // self.heads


TINY = Shape(hidden=64, ffn=128, heads=4, groups=2, layers=2, vocab=96, batch=2, length=32)


def angles(shape: Shape, device: torch.device) -> Tensor:
    """[length, channels], float32: each angle for both halves of a head."""
    steps = torch.arange(0, shape.channels, 2, device=device, dtype=torch.float32) / shape.channels
    half = torch.outer(torch.arange(shape.length, device=device, dtype=torch.float32), 1.0 / 10000.0**steps)
    return torch.cat([half, half], -1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """[b, h, s, d], turned by [s, d]."""
    first, second = x.float().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return (x.float() * table.cos() + turned * table.sin()).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner = shape.groups * shape.channels
        self.shape = shape
        self.q_proj, self.k_proj = nn.Linear(shape.hidden, shape.hidden, bias=False), nn.Linear(shape.hidden, inner, bias=False)
        self.v_proj, self.o_proj = nn.Linear(shape.hidden, inner, bias=False), nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            p(x).view(batch, length, -1, self.shape.channels).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(rotate(q, table), rotate(k, table), v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.hidden, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden, eps=1e-6), nn.RMSNorm(shape.hidden, eps=1e-6)
        self.attention, self.mlp = Attention(shape), MLP(shape)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), table)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Token ids [b, s] → logits [b, s, vocab]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.hidden, eps=1e-6), nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, table = self.embed(ids), angles(self.shape, ids.device)[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, table)
        return self.head(self.norm(x))


class HandWritten(nn.Module):
    """The same decoder of te.TransformerLayer, te.RMSNorm and te.Linear, as somebody who knows Transformer Engine writes it."""

    def __init__(self, te: Any, shape: Shape, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden, dtype=dtype, device=device)
        options: dict[str, Any] = {"params_dtype": dtype, "device": device, "bias": False, "normalization": "RMSNorm"}
        options |= {"num_gqa_groups": shape.groups, "layernorm_epsilon": 1e-6, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        options |= {"activation": "swiglu", "attn_input_format": "bshd", "fuse_qkv_params": True}
        self.blocks = nn.ModuleList(
            te.TransformerLayer(shape.hidden, shape.ffn, shape.heads, **options) for _ in range(shape.layers)
        )
        self.norm = te.RMSNorm(shape.hidden, eps=1e-6, dtype=dtype, device=device)
        self.head = te.Linear(shape.hidden, shape.vocab, bias=False, params_dtype=dtype, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        x, table = self.embed(ids), angles(self.shape, ids.device)[: ids.shape[1], None, None]
        for block in self.blocks:
            x = block(x, rotary_pos_emb=table)
        return self.head(self.norm(x))
