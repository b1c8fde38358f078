"""Mixtures whose experts are modules of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_convert.facts.activations import ACTIVATIONS
from tests.rewrite.block_samples import FFN, WIDTH

COUNT = 4


class Gated(nn.Module):
    def __init__(self, activation: str = "silu", width: int = WIDTH, ffn: int = FFN, bias: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.w1, self.w2 = nn.Linear(width, ffn, bias), nn.Linear(ffn, width, bias)
        self.w3 = nn.Linear(width, ffn, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(ACTIVATIONS[self.activation](self.w1(x)) * self.w3(x))
        return out


class Plain(nn.Module):
    def __init__(self, activation: str = "relu", width: int = WIDTH, ffn: int = FFN) -> None:
        super().__init__()
        self.activation = activation
        self.fc1, self.fc2 = nn.Linear(width, ffn, False), nn.Linear(ffn, width, False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))
        return out


class Mixture(nn.Module):
    """As Transformers 4 writes Mixtral: a loop over the experts that have tokens."""

    def __init__(
        self, expert: Any = Gated, form: str = "softmax-topk-normalize", logits: bool = False, top_k: int = 2, wide: bool = True
    ) -> None:
        super().__init__()
        self.form, self.logits, self.top_k, self.jitter_noise, self.wide = form, logits, top_k, 0.0, wide
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(COUNT))

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.float32 if self.wide else logits.dtype
        if self.form == "topk-softmax":
            values, index = torch.topk(logits, self.top_k, dim=-1)
            return F.softmax(values, dim=1, dtype=dtype).to(logits.dtype), index
        weights, index = torch.topk(F.softmax(logits, dim=1, dtype=dtype), self.top_k, dim=-1)
        if self.form == "softmax-topk-normalize":
            weights /= weights.sum(dim=-1, keepdim=True)
        return weights.to(logits.dtype), index

    def forward(self, hidden_states: Tensor) -> Any:
        if self.training and self.jitter_noise > 0:
            hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(1 - self.jitter_noise, 1 + self.jitter_noise)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.gate(tokens)
        out = self.mix(hidden_states, *self.route(logits))
        return (out, logits) if self.logits else out

    def mix(self, hidden_states: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = torch.zeros_like(tokens)
        mask = F.one_hot(index, num_classes=COUNT).permute(2, 1, 0)
        for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            place, token = torch.where(mask[number].squeeze(0))
            out.index_add_(0, token, self.combine(number, tokens[token], weights[token, place, None]).to(out.dtype))
        return out.reshape(hidden_states.shape)

    def combine(self, number: Any, tokens: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = self.experts[number](tokens) * weights
        return out


class Layer(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), moe

    def forward(self, x: Tensor) -> Tensor:
        y = self.moe(self.norm(x))
        out: Tensor = x + (y[0] if isinstance(y, tuple) else y)
        return out


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(32, WIDTH), nn.ModuleList(Layer(Mixture(logits=True)) for _ in range(2))
        self.head = nn.Linear(WIDTH, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out
