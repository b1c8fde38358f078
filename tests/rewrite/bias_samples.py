"""Models whose attention has a bias of its scores: learnt, of each sample, or a mask that hides keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rewrite import attention_models as zoo

HEADS, LENGTH = 4, 7


class Attention(nn.Module):
    """A vision model's: one learnt number for each head and distance."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.proj, self.dropout = nn.Linear(32, 96), nn.Linear(32, 32), dropout
        self.table = nn.Parameter(torch.randn(HEADS, 2 * LENGTH - 1))
        positions = torch.arange(LENGTH)
        self.register_buffer("index", positions[:, None] - positions[None] + LENGTH - 1, persistent=False)
        self.register_buffer("hidden", torch.full((LENGTH, LENGTH), -torch.inf).triu(1), persistent=False)

    def bias(self, x: Tensor) -> Tensor:
        index: Any = self.index
        return self.table[:, index[: x.shape[1], : x.shape[1]]][None]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, 8)).permute(2, 0, 3, 1, 4)
        bias = self.bias(x) if mask is None else mask
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=self.dropout if self.training else 0.0)
        y: Tensor = self.proj(heads.transpose(1, 2).flatten(-2))
        return y


class FromInput(Attention):
    def bias(self, x: Tensor) -> Tensor:
        return super().bias(x) + x.mean()


class OnePerSample(Attention):
    def bias(self, x: Tensor) -> Tensor:
        return super().bias(x).expand(x.shape[0], -1, -1, -1)


class OneForAllHeads(Attention):
    def bias(self, x: Tensor) -> Tensor:
        return super().bias(x)[:, :1]


class HidesByNumber(Attention):
    def bias(self, x: Tensor) -> Tensor:
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return super().bias(x).masked_fill(later, float("-inf"))


class HidesByBuffer(Attention):
    def bias(self, x: Tensor) -> Tensor:
        assert isinstance(self.hidden, Tensor)
        return super().bias(x) + self.hidden


class Boolean(Attention):
    def bias(self, x: Tensor) -> Tensor:
        seen: Tensor = super().bias(x) > 0
        return seen


class HidesAll(Attention):
    """Its first query sees no key."""

    def bias(self, x: Tensor) -> Tensor:
        return super().bias(x).masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(), -torch.inf)


class HidesAllByBoolean(Attention):
    def bias(self, x: Tensor) -> Tensor:
        return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1)


MASKS = [FromInput, OnePerSample, OneForAllHeads, HidesByNumber, HidesByBuffer, Boolean, HidesAll, HidesAllByBoolean]


def model(attention: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), attention or Attention()).eval()


def x(length: int = LENGTH) -> Tensor:
    return torch.randn(2, length, 32, generator=torch.Generator().manual_seed(1))


def mt5() -> Any:
    options = dict(zoo.t5().config.to_dict())
    return zoo.perturbed(zoo.transformers.MT5ForConditionalGeneration(zoo.transformers.MT5Config(**options)).eval())


def t5(implementation: str | None = None) -> Any:
    return zoo.perturbed(zoo.t5(implementation, num_layers=2))


def timm_model(name: str) -> Any:
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 4, "embed_dim": 32, "num_heads": 4}
    return zoo.perturbed(timm.create_model(name, **sizes).eval())


def layoutlm() -> Any:
    """Its bias depends on where the words of each page are."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    places: dict[str, Any] = {"coordinate_size": 4, "shape_size": 8, "max_2d_position_embeddings": 64, "visual_embed": False}
    biases = {"has_relative_attention_bias": True, "has_spatial_attention_bias": True}
    config = zoo.transformers.LayoutLMv3Config(vocab_size=64, **sizes, **places, **biases)
    return zoo.transformers.LayoutLMv3Model(config).eval()
