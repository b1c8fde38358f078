"""Models for the tests of tensor parallelism, hand-written in the ways that people write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.integration.language_models import build

WIDTH, HEADS = 48, 4


def moved(model: Any) -> Any:
    """With biases and norms away from their defaults."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model.eval()


class Attention(nn.Module):
    """Separate projections; ``fixed`` names the number of heads in its reshape."""

    def __init__(self, fixed: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fixed = fixed

    def heads(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        return x.view(batch, length, HEADS if self.fixed else -1, WIDTH // HEADS).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(*x.shape) if self.fixed else y.transpose(1, 2).flatten(2)
        out: Tensor = self.out(y)
        return out


class Packed(nn.Module):
    """One projection for q, k and v; chunks take thirds of whatever there is, pieces of a fixed size do not."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.c_attn(x)
        parts = qkv.split(WIDTH, dim=-1) if self.fixed else qkv.chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """fc1 and fc2 around an activation."""

    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.activation = activation or nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.activation(self.fc1(x)))
        return out


class Block(nn.Module):
    """Pre-norm, both parts optional."""

    def __init__(self, attention: nn.Module | None, mlp: nn.Module | None) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        if self.attn is not None:
            x = x + self.attn(self.ln_1(x))
        return x if self.mlp is None else x + self.mlp(self.ln_2(x))


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 97, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False)


def make(name: str) -> Any:
    """A seeded model in eval mode."""
    torch.manual_seed(0)
    if name == "llama":
        return build("llama")
    if name == "llama-tied":
        return build("llama", tie_word_embeddings=True)
    if name == "llama-bf16":
        return build("llama").to(torch.bfloat16)
    if name in ("gpt2", "gpt_neox", "qwen3"):
        return build(name)
    if name == "bert":
        return moved(bert())
    made = {
        "separate": lambda: Net(Block(Attention(), Mlp()), Block(Attention(), Mlp())),
        "erf": lambda: Net(Block(Attention(), Mlp(nn.GELU()))),
        "packed": lambda: Net(Block(Packed(False), Mlp()), Block(Packed(False), Mlp())),
        "packed-fixed": lambda: Net(Block(Packed(True), Mlp())),
        "fixed": lambda: Net(Block(Attention(fixed=True), Mlp())),
        "mlp": lambda: Net(Block(None, Mlp()), Block(None, Mlp())),
        "lone": lambda: Net(Block(nn.Linear(WIDTH, WIDTH), None)),
    }
    return moved(made[name]())
