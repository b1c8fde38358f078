"""Which mixture of experts a module with stacked weights computes, and what is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_convert.facts import experts as facts
from te_convert.facts.activations import ACTIVATIONS
from te_convert.facts.experts import ExpertsFacts, NotExperts, looks_like_experts, probe_experts
from tests.rewrite.block_samples import Experts


class Named(nn.Module):
    """Experts of any activation, with the second product first among the parameters."""

    def __init__(self, activation: str, gated: bool, ffn: int = 3) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(4, 6, ffn))
        self.up = nn.Parameter(torch.randn(4, ffn * (2 if gated else 1), 6))
        self.activation, self.gated = ACTIVATIONS[activation], gated

    def forward(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        inner = torch.einsum("tkrh,th->tkr", self.up[chosen], x)
        if self.gated:
            gate, other = inner.chunk(2, -1)
            inner = self.activation(gate) * other
        else:
            inner = self.activation(inner)
        return torch.einsum("tkf,tkhf,tk->th", inner, self.down[chosen], scores)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_activation(activation: str, gated: bool) -> None:
    found = probe_experts(Named(activation, gated), 2)
    assert found == ExpertsFacts("up", "down", 4, 6, 3, gated, activation)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_every_number_of_experts_for_a_token(top_k: int) -> None:
    found = probe_experts(Experts(), top_k)
    assert found == ExpertsFacts("w_in", "w_out", 4, 16, 8, True, "silu")


@pytest.mark.parametrize("gated", [True, False])
def test_square_weights(gated: bool) -> None:
    """ffn equal to hidden: the shapes alone do not tell the two products apart."""
    assert probe_experts(Named("silu", gated, ffn=6), 2) == ExpertsFacts("up", "down", 4, 6, 6, gated, "silu")


def test_large_stacks_are_probed_with_one_experts_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_MAX_ELEMENTS", 10)
    assert isinstance(probe_experts(Named("silu", True), 2), ExpertsFacts)


def test_the_probe_leaves_the_module_and_the_random_state_alone() -> None:
    module = Experts()
    before = {name: (id(p), p.detach().clone()) for name, p in module.named_parameters()}
    state = torch.get_rng_state()
    probe_experts(module, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(id(p) == before[name][0] and torch.equal(p, before[name][1]) for name, p in module.named_parameters())


class Interleaved(Experts):
    """gate and up row by row (gpt-oss)."""

    def inner(self, x: Tensor, expert: int) -> Tensor:
        hidden = F.linear(x, self.w_in[expert])
        return F.silu(hidden[..., ::2]) * hidden[..., 1::2]


class Second(Experts):
    def inner(self, x: Tensor, expert: int) -> Tensor:
        gate, up = F.linear(x, self.w_in[expert]).chunk(2, -1)
        return gate * F.silu(up)


class Clamped(Experts):
    def inner(self, x: Tensor, expert: int) -> Tensor:
        return super().inner(x, expert).clamp(max=0.1)


class Scaled(Experts):
    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens, index, weights) * 1.01


class Unweighted(Experts):
    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens, index, torch.ones_like(weights))


class WeightedFirst(Experts):
    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens * weights[:, :1], index, torch.ones_like(weights))


class Residual(Experts):
    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return tokens + super().forward(tokens, index, weights)


class Pair(Experts):
    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Any:
        return super().forward(tokens, index, weights), None


class Fails(Experts):
    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        raise ValueError("not today")


OTHER = "it computes something else than fc2(act(fc1(x))) per expert"


@pytest.mark.parametrize(
    ("cls", "detail"),
    [
        *((cls, OTHER) for cls in (Interleaved, Second, Clamped, Scaled, Unweighted, WeightedFirst, Residual)),
        (Pair, "its result does not have the shape of the tokens"),
        (Fails, "it does not run on tokens, indices and weights: ValueError: not today"),
    ],
)
def test_near_misses(cls: type[Experts], detail: str) -> None:
    assert probe_experts(cls(), 2) == NotExperts(detail)


def stacked(*shapes: tuple[int, ...]) -> nn.Module:
    module = nn.Module()
    for index, shape in enumerate(shapes):
        module.register_parameter(f"p{index}", nn.Parameter(torch.zeros(shape)))
    return module


def test_what_looks_like_experts() -> None:
    assert looks_like_experts(stacked((4, 6, 2), (4, 2, 6)))
    for shapes in (((4, 6, 2),), ((4, 6, 2), (3, 2, 6)), ((4, 6), (4, 6)), ((1, 6, 2), (1, 2, 6)), ((4, 6, 2), (4, 2, 6), (4, 6))):
        assert not looks_like_experts(stacked(*shapes))
    module = stacked((4, 6, 2), (4, 2, 6))
    module.add_module("child", nn.Linear(2, 2))
    assert not looks_like_experts(module)


def test_shapes_that_do_not_fit_together() -> None:
    module = Experts()
    module.w_out = nn.Parameter(torch.zeros(4, 15, 8))
    assert probe_experts(module, 2) == NotExperts(OTHER)
