"""Mixtures of expert modules: two te.GroupedLinear, or what their forward does besides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_convert.plan.model import Outcome
from te_convert.replacements.specs import GroupedExpertsSpec, Routing, spec_from_dict, spec_to_dict
from te_convert.weights.ops import Concat, Move
from tests.rewrite.block_samples import FFN, WIDTH, X
from tests.rewrite.mixture_samples import COUNT, Gated, Layer, Mixture, Plain
from tests.rules.rule_cases import codes, plan_of


def plan(moe: nn.Module, x: Tensor = X, **options: Any) -> Any:
    return plan_of(Layer(moe).eval(), (x,), **options)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("logits", [True, False])
def test_gated(logits: bool, wide: bool) -> None:
    (fusion,) = plan(Mixture(form="softmax-topk", logits=logits, wide=wide)).fusions
    routing = Routing("gate", "softmax-topk/float32" if wide else "softmax-topk", 2, 3, True, logits, False)
    assert fusion.spec == GroupedExpertsSpec(COUNT, WIDTH, FFN, True, "silu", 1, "float32", routing)
    assert (fusion.fqn, fusion.scope, fusion.rule) == ("moe.grouped", "moe", "expert-modules")
    assert spec_from_dict(spec_to_dict(fusion.spec)) == fusion.spec
    first, last = fusion.weights.ops[0], fusion.weights.ops[-1]
    assert first == Concat(("experts.0.w1.weight", "experts.0.w3.weight"), "fc1.weight0", (FFN, FFN))
    assert last == Move("experts.3.w2.weight", "fc2.weight3")
    assert "moe.gate" not in [member.fqn for member in fusion.members]


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_plain(activation: str) -> None:
    (fusion,) = plan(Mixture(expert=lambda: Plain(activation))).fusions
    assert (fusion.spec.gated, fusion.spec.activation) == (False, activation)
    assert all(isinstance(op, Move) for op in fusion.weights.ops)


def test_decisions() -> None:
    found = plan(Mixture())
    for name in ("moe", "moe.experts.0.w1", "moe.experts.3.w2"):
        assert (found.get(name).outcome, found.get(name).fused_into) == (Outcome.FUSED, "moe.grouped")
    assert found.get("moe.gate").outcome is Outcome.CONVERTED


def test_noise_in_training_is_known() -> None:
    moe = Mixture()
    moe.jitter_noise = 0.1
    (fusion,) = plan(moe).fusions
    assert fusion.spec.routing.eval_only


class Capacity(Mixture):
    """No expert takes more than three quarters of the tokens."""

    def combine(self, number: Any, tokens: Tensor, weights: Tensor) -> Tensor:
        keep = (torch.arange(len(tokens)) < 12).unsqueeze(-1)
        return super().combine(number, tokens, weights) * keep


class Shared(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.shared = Gated()

    def forward(self, hidden_states: Tensor) -> Any:
        return super().forward(hidden_states) + self.shared(hidden_states)


class Residual(Mixture):
    def forward(self, hidden_states: Tensor) -> Any:
        return super().forward(hidden_states) + hidden_states


class Noise(Mixture):
    def forward(self, hidden_states: Tensor) -> Any:
        return super().forward(hidden_states + 0.01 * torch.randn_like(hidden_states))


class Sigmoid(Mixture):
    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits.sigmoid().topk(self.top_k, -1)


class Scaled(Mixture):
    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = super().route(logits)
        return weights * 1.001, index


class Detached(Mixture):
    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return super().route(logits.detach())


class Loss(Mixture):
    def forward(self, hidden_states: Tensor) -> Any:
        out = super().forward(hidden_states)
        self.aux_loss = self.gate(hidden_states).square().mean()
        return out


class Counting(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, hidden_states: Tensor) -> Any:
        self.seen += 1
        return super().forward(hidden_states)


class OneBroken(Mixture):
    """The last expert is doubled."""

    def combine(self, number: Any, tokens: Tensor, weights: Tensor) -> Tensor:
        return super().combine(number, tokens, weights) * (2 if int(number) == COUNT - 1 else 1)


class ThreeResults(Mixture):
    def forward(self, hidden_states: Tensor) -> Any:
        return super().forward(hidden_states), 1, 2


class Clamped(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1, 1)


def uneven() -> Any:
    moe: Any = Mixture()
    moe.experts[1] = Gated(ffn=16)
    return moe


def hooked() -> nn.Module:
    moe = Mixture()
    moe.experts[1].register_forward_hook(lambda *_: None)
    return moe


def tied() -> Any:
    moe: Any = Mixture()
    moe.experts[1].w1.weight = moe.experts[0].w1.weight
    return moe


def half_frozen() -> Any:
    moe: Any = Mixture()
    for expert in moe.experts:
        expert.w1.requires_grad_(False)
    return moe


MISSES: dict[str, tuple[Any, str, str]] = {
    "capacity": (Capacity, "moe.forward", "the nearest differ by"),
    "shared expert": (Shared, "moe.forward", "it also holds shared.w1.weight"),
    "residual": (Residual, "moe.forward", "the nearest differ by"),
    "noise": (Noise, "moe.forward", "gate is not called once with the input"),
    "sigmoid": (Sigmoid, "moe.forward", "no softmax and top-k of gate give its results"),
    "scaled": (Scaled, "moe.forward", "the nearest differ by 1.0e-03"),
    "detached router": (Detached, "moe.forward", "its gradients differ by"),
    "auxiliary loss": (Loss, "moe.forward", "its forward sets aux_loss"),
    "counter": (Counting, "moe.forward", "its forward sets seen"),
    "one broken": (OneBroken, "moe.forward", "the nearest differ by"),
    "three results": (ThreeResults, "moe.forward", "its result does not have the shape"),
    "clamped": (lambda: Mixture(expert=Clamped), "moe.forward", "an expert computes something else"),
    "biases": (lambda: Mixture(expert=lambda: Gated(bias=True)), "moe.forward", "the same plain Linears without biases"),
    "uneven": (uneven, "moe.forward", "the same plain Linears without biases"),
    "half frozen": (half_frozen, "moe.forward", "only some weights of an expert are frozen"),
    "hooks": (hooked, "module.hooks", "hooks on 1 would not run"),
    "tied": (tied, "parameter.tied-layout", "shared with another module"),
}


@pytest.mark.parametrize("name", sorted(MISSES))
def test_near_misses(name: str) -> None:
    make, code, detail = MISSES[name]
    found = plan(make())
    assert "moe.grouped" not in [fusion.fqn for fusion in found.fusions]
    decision = found.get("moe")
    assert (decision.outcome, codes(decision)) == (Outcome.NO_MATCH, [code])
    assert detail in decision.reasons[0].detail
    if name != "biases":
        assert found.get("moe.experts.0.w2").outcome is Outcome.CONVERTED


def test_what_is_too_large_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = Mixture()
    size = sum(parameter.numel() for parameter in moe.experts.parameters())
    monkeypatch.setattr("te_convert.match.mixtures.PROBED_ELEMENTS", size)
    assert "moe.grouped" in [fusion.fqn for fusion in plan(moe).fusions]
    monkeypatch.setattr("te_convert.match.mixtures.PROBED_ELEMENTS", size - 1)
    found = plan(moe)
    assert "moe.grouped" not in [fusion.fqn for fusion in found.fusions]
    assert f"its experts have {size:,} weights" in found.get("moe").reasons[0].detail


def test_noise_recorded_in_training() -> None:
    moe = Mixture()
    moe.jitter_noise = 0.1
    found = plan_of(Layer(moe).train(), (X,))
    assert "moe.grouped" not in [fusion.fqn for fusion in found.fusions]
    assert "in training mode" in found.get("moe").reasons[0].detail


def test_float64_is_refused() -> None:
    found = plan_of(Layer(Mixture()).double().eval(), (X.double(),))
    assert "dtype.float64" in codes(found.get("moe"))


def test_excluded_or_without_fusions() -> None:
    for options in ({"exclude": ("moe.experts.*",)}, {"include": ("moe.gate",)}, {"fuse": False}):
        assert plan(Mixture(), **options).fusions == ()


def test_the_probe_leaves_everything_as_it_was() -> None:
    moe = Mixture()
    seen: list[str] = []
    moe.register_forward_hook(lambda *_: seen.append("moe"))
    before, state = {name: p.clone() for name, p in moe.named_parameters()}, torch.get_rng_state()
    found = plan(moe)
    assert len(found.fusions) == 1
    assert len(seen) == 1  # the recorded run
    assert torch.equal(torch.get_rng_state(), state)
    assert not moe.training
    for name, parameter in moe.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_a_list_that_is_no_mixture_is_not_mentioned() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Gated() for _ in range(3)), nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> Any:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    found = plan_of(Stack().eval(), (X,))
    assert "" not in [decision.fqn for decision in found.decisions]


def test_a_list_with_empty_places_is_no_mixture() -> None:
    """x-transformers' layers hold lists with None where a norm could be."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms, self.head = nn.ModuleList(), nn.Linear(WIDTH, 2)
            for place in range(2):
                self.norms.add_module(str(place), None)

        def forward(self, x: Tensor) -> Any:
            return self.head(x)

    found = plan_of(Stack().eval(), (X,))
    assert "fusion.failed" not in [why.code for decision in found.decisions for why in decision.reasons]
    assert found.get("head").outcome is Outcome.CONVERTED
