"""The shared-linear rule: Linears of one module that read the same tensor become one te.Linear."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_convert.plan.model import Outcome
from te_convert.replacements.specs import LinearSpec
from te_convert.weights.ops import Concat
from tests.rewrite.trap_samples import (
    HEADS,
    WIDTH,
    Attention,
    Pair,
    assert_near,
    assert_trains_alike,
    pair,
    reentrant,
    replayed,
    x_of,
)
from tests.rules.fusion_cases import Mistake, assert_caught, codes_of, fusion_of, planned, proved, rolled, zeroed


class Two(nn.Module):
    """a and b read the input itself."""

    def __init__(
        self, a: nn.Module | None = None, b: nn.Module | None = None, use: Callable[[Any, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = a or nn.Linear(WIDTH, 6), b or nn.Linear(WIDTH, 6)
        self.use = use or product

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def product(m: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    out: Tensor = m.a(x) * m.b(x)
    return out


class Cross(nn.Module):
    """Cross-attention: k and v read another tensor than q."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        memory = x.flip(1) * 0.5
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q_proj(x), self.k_proj(memory), self.v_proj(memory)))
        out: Tensor = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return out


def conv1d(out: int) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(out, WIDTH)  # type: ignore[no-any-return]


@pytest.mark.parametrize("bias", [True, False])
def test_two_linears(bias: bool) -> None:
    plan = proved(Two(nn.Linear(WIDTH, 6, bias=bias), nn.Linear(WIDTH, 6, bias=bias)))
    fusion = fusion_of(plan, "shared-linear")
    assert (fusion.fqn, fusion.spec) == ("a_b", LinearSpec(WIDTH, 12, bias, "float32"))
    assert fusion.weights.ops[0] == Concat(("a.weight", "b.weight"), "weight", (6, 6))
    assert {plan.get(name).outcome for name in ("a", "b")} == {Outcome.FUSED}


def test_q_k_and_v_of_an_attention() -> None:
    plan = proved(Attention())
    assert fusion_of(plan, "shared-linear").fqn == "qkv"
    assert plan.get("out").outcome is Outcome.CONVERTED


def test_k_and_v_of_a_cross_attention() -> None:
    plan = proved(Cross())
    assert fusion_of(plan, "shared-linear").fqn == "kv"
    assert plan.get("q_proj").outcome is Outcome.CONVERTED


def test_sizes_may_differ() -> None:
    def beside(m: Any, x: Tensor) -> Tensor:
        return torch.cat([m.a(x), m.b(x)], -1)

    fusion = fusion_of(proved(Two(nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 9), beside)), "shared-linear")
    assert fusion.weights.ops[0] == Concat(("a.weight", "b.weight"), "weight", (3, 9))


def test_conv1d_weights_are_transposed() -> None:
    fusion = fusion_of(proved(Two(conv1d(6), conv1d(6))), "shared-linear")
    assert fusion.weights.ops[0] == Concat(("a.weight", "b.weight"), "weight", (6, 6), transposed=True)


def test_frozen_pairs_fuse_and_stay_frozen() -> None:
    model = Two()
    model.requires_grad_(False)
    model.get_submodule("a").requires_grad_(False)
    plan = planned(model)
    assert fusion_of(plan, "shared-linear").fqn == "a_b"


@pytest.mark.parametrize(("name", "has_shared"), [("bert", True), ("bart", True), ("vit", False), ("whisper", False)])
def test_real_models(name: str, has_shared: bool) -> None:
    """Whisper's k has no bias, so no two of its Linears are alike."""
    from tests.rewrite.trap_samples import assert_same_gradients, gradients, loss_of
    from tests.verify.model_zoo import build

    model, inputs = build(name)
    made = pair(model, inputs)
    shared = [fqn for fqn in made.fused if made.record(fqn).decision.rule == "shared-linear"]
    assert bool(shared) is has_shared
    for each in made.both():
        loss_of(each(**inputs)[0]).backward()
    assert all(made.counts(fqn) == (1, 0) for fqn in shared)
    assert_same_gradients(gradients(made.model), gradients(made.original), 1e-4)


# ---- near misses -----------------------------------------------------------------------------------------------------
def another_tensor(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.a(x) * m.b(x * 2)
    return out


def a_view(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.a(x) * m.b(x[:])
    return out


def other_partners(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.a(x) * m.b(x) + m.a(x + 1)
    return out


def one_tied() -> Two:
    model = Two()
    model.b.weight = model.a.weight
    return model


def one_frozen() -> Two:
    model = Two()
    model.get_submodule("a").requires_grad_(False)
    return model


NEAR_MISSES: dict[str, Callable[[], nn.Module]] = {
    "another tensor": lambda: Two(use=another_tensor),
    "a view of it": lambda: Two(use=a_view),
    "other partners in another call": lambda: Two(use=other_partners),
    "bias in one only": lambda: Two(b=nn.Linear(WIDTH, 6, bias=False)),
    "one layout transposed": lambda: Two(b=conv1d(6)),
    "tied": one_tied,
    "one frozen": one_frozen,
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name: str) -> None:
    plan = planned(NEAR_MISSES[name]())
    assert plan.fusions == ()
    assert codes_of(plan, "a") == []
    assert plan.get("a").outcome is plan.get("b").outcome is Outcome.CONVERTED


# ---- calls that nobody recorded --------------------------------------------------------------------------------------
def changed_between(m: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    first = m.a(x)
    x.mul_(2)
    out: Tensor = first.detach() * m.b(x)
    return out


def weight_changed_between(m: Any, x: Tensor) -> Tensor:
    first = m.a(x)
    with torch.no_grad():
        m.b.weight.mul_(1.5)
    out: Tensor = first * m.b(x)
    return out


def twice(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.a(x) * m.b(x) + m.a(x)
    return out


def one_alone(m: Any, x: Tensor) -> Tensor:
    first = m.a(x)
    out: Tensor = first * m.b(x + 1) + m.b(x)
    return out


def half_without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        first = m.a(x)
    out: Tensor = first * m.b(x)
    return out


def half_under_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    first = m.a(x)
    out: Tensor = replayed(lambda x: first * m.b(x), x)
    return out


UNSEEN = [changed_between, twice, one_alone, half_without_gradients, half_under_a_checkpoint, another_tensor]


@pytest.mark.parametrize("use", UNSEEN, ids=lambda use: use.__name__)
def test_calls_that_nobody_recorded_compute_the_originals_numbers(use: Callable[[Any, Tensor], Tensor]) -> None:
    made = pair(Two(), fused=1)
    made.original.use = made.model.use = use
    unused = "a" if use in (changed_between, half_without_gradients) else ""
    assert_trains_alike(made, unused=unused)


def test_a_weight_changed_between_the_two_takes_effect_or_raises_in_backward() -> None:
    """The joint weight was saved for a's backward: torch itself sees that it changed."""
    made = pair(Two(), fused=1)
    made.original.use = made.model.use = weight_changed_between
    with torch.no_grad():
        assert_near(made.model(x_of()), made.original(x_of()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.model(x_of().requires_grad_()).sum().backward()


def _bf16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, _bf16])
def test_a_reader_in_another_mode_than_its_partner(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    def use(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        first = m.a(x)
        with mode():
            return first, m.b(x)

    made = pair(Two(), fused=1)
    made.original.use = made.model.use = use
    found, expected = made.model(x_of()), made.original(x_of())
    assert_near(found[0], expected[0])
    assert_near(found[1], expected[1], 1e-2 if mode is _bf16 else 2e-5)


@pytest.mark.parametrize("kind", [reentrant, replayed])
def test_checkpoints(kind: Callable[..., Any]) -> None:
    assert_trains_alike(pair(Attention(), fused=1), run=lambda model, x: kind(model, x * 1.0))


def test_nothing_waits_after_a_forward_and_threads_do_not_mix() -> None:
    from concurrent.futures import ThreadPoolExecutor

    made: Pair = pair(Two(), fused=1)
    inputs = [x_of(seed=seed) for seed in range(8)]
    expected = [made.original(x).detach() for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: made.model(x).detach(), inputs))
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other)
    assert made.record("a_b").shared.waiting == {}
    with torch.no_grad():
        made.model.a(x_of())
    assert made.record("a_b").shared.waiting == {}  # its input is gone, and what waited for b with it


# ---- mistakes --------------------------------------------------------------------------------------------------------
MISTAKES: dict[str, Mistake] = {
    "blocks in another order": rolled("weight", 6),
    "biases in another order": rolled("bias", 6),
    "bias lost": zeroed("bias"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_verifier_catches_a_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(monkeypatch, Two(), MISTAKES[name], "a_b")
