"""Stacked experts: two te.GroupedLinear of views, or why they stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_convert.plan.model import Outcome, Plan
from te_convert.replacements.specs import GroupedExpertsSpec
from te_convert.weights.ops import Take
from tests.rewrite.block_samples import WIDTH, Experts, MoE, X, floats
from tests.rules.rule_cases import Wrapped, codes, plan_of


def plan(experts: nn.Module, x: Tensor = X, width: int = WIDTH, **options: Any) -> Plan:
    return plan_of(MoE(experts, width=width).to(x.dtype).eval(), (x,), **options)


@pytest.mark.parametrize("gated", [True, False])
def test_experts(gated: bool) -> None:
    (fusion,) = plan(Experts(gated=gated)).fusions
    assert fusion.spec == GroupedExpertsSpec(4, WIDTH, 8, gated, "silu", 1, "float32")
    assert (fusion.fqn, fusion.scope, fusion.rule, fusion.precision) == ("experts.grouped", "experts", "experts", "recipe")
    assert [(m.role, m.fqn) for m in fusion.members] == [("experts", "experts")]
    assert fusion.weights.ops == tuple(
        Take(source, f"{layer}.weight{index}", index, 4)
        for source, layer in (("w_in", "fc1"), ("w_out", "fc2"))
        for index in range(4)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    (fusion,) = plan(Experts(), X.to(dtype)).fusions
    assert fusion.spec == GroupedExpertsSpec(4, WIDTH, 8, True, "silu", 1, str(dtype).removeprefix("torch."))


@pytest.mark.parametrize(("recipe", "rows", "precision"), [("bf16", 1, "recipe"), ("fp8", 32, "recipe"), ("nvfp4", 32, "recipe")])
def test_a_recipe_asks_for_padded_rows(recipe: str, rows: int, precision: str) -> None:
    (fusion,) = plan(Experts(width=32, ffn=32), floats(2, 5, 32), 32, recipe=recipe).fusions
    assert isinstance(fusion.spec, GroupedExpertsSpec)
    assert (fusion.spec.row_multiple, fusion.precision) == (rows, precision)


def test_a_recipe_that_cannot_take_the_sizes() -> None:
    (fusion,) = plan(Experts(), recipe="fp8").fusions
    assert fusion.precision == "high"


def test_the_decision_names_the_new_parameters() -> None:
    decision = plan(Experts()).get("experts")
    assert (decision.outcome, decision.fused_into, codes(decision)) == (Outcome.FUSED, "experts.grouped", ["parameter.new-object"])


class Clamped(Experts):
    """gpt-oss clamps what it multiplies."""

    def inner(self, x: Tensor, expert: int) -> Tensor:
        return super().inner(x, expert).clamp(-0.1, 0.1)


class Ungrouped(Experts):
    """All experts see all tokens."""

    def forward(self, tokens: Tensor, *_: Tensor) -> Tensor:
        return torch.stack([self.inner(tokens, e) @ self.w_out[e].t() for e in range(self.count)]).sum(0)


class OneArgument(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor) -> Any:
        return self.experts(x.flatten(0, 1))


def wrapped() -> nn.Module:
    experts = Experts()
    experts.w_in = nn.Parameter(experts.w_in.detach().as_subclass(Wrapped))
    return experts


def half() -> nn.Module:
    experts = Experts()
    experts.w_out = nn.Parameter(experts.w_out.detach().double())
    return experts


MISSES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "clamped": (Clamped, ["moe.form"]),
    "all experts": (Ungrouped, ["moe.form"]),
    "tensor subclass": (wrapped, ["parameter.tensor-subclass"]),
}


@pytest.mark.parametrize("name", sorted(MISSES))
def test_near_misses(name: str) -> None:
    make, expected = MISSES[name]
    found = plan(make())
    assert "experts.grouped" not in [fusion.fqn for fusion in found.fusions]
    decision = found.get("experts")
    assert (decision.outcome, codes(decision)) == (Outcome.NO_MATCH, expected)


def test_other_calls() -> None:
    found = plan_of(OneArgument(Ungrouped()).eval(), (X,))
    assert codes(found.get("experts")) == ["moe.form"]
    assert "called with tensors of shapes" in found.get("experts").reasons[0].detail


def test_float64_is_refused() -> None:
    found = plan(Experts(), X.double())
    assert found.fusions == ()
    assert codes(found.get("experts")) == ["dtype.float64"]


def test_never_called_and_not_recorded() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.out = Experts(), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Any:
            return self.out(x)

    assert codes(plan_of(Idle(), (X,)).get("experts")) == ["module.never-called"]
    assert codes(plan_of(Idle()).get("experts")) == ["moe.form"]


def test_on_meta_nothing_is_probed() -> None:
    class Gathered(nn.Module):
        """Experts whose sizes do not depend on values, as a meta model needs."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(4, 8, WIDTH)), nn.Parameter(torch.randn(4, WIDTH, 8))

        def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            inner = torch.relu(torch.einsum("tkrh,th->tkr", self.up[index], x))
            return torch.einsum("tkf,tkhf,tk->th", inner, self.down[index], weights)

    assert [fusion.fqn for fusion in plan(Gathered()).fusions] == ["experts.grouped"]
    found = plan_of(MoE(Gathered()).to("meta").eval(), (X.to("meta"),))
    assert found.fusions == ()
    (reason,) = found.get("experts").reasons
    assert (reason.code, reason.detail) == ("moe.form", "its weights are on the meta device, so its formula was not probed")


def test_excluded_or_without_fusions() -> None:
    for options in ({"exclude": ("experts",)}, {"include": ("router",)}, {"fuse": False}):
        assert plan(Experts(), **options).fusions == ()


def test_tied_experts_stay_tied() -> None:
    """Each entry becomes a Parameter of its own, which another holder of the stack would not see."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = MoE(Experts()), MoE(Experts())
            self.b.experts.w_in = self.a.experts.w_in

        def forward(self, x: Tensor) -> Any:
            return self.b(self.a(x))

    found = plan_of(Two().eval(), (X,))
    assert "experts" not in [fusion.rule for fusion in found.fusions]
    assert codes(found.get("a.experts")) == codes(found.get("b.experts")) == ["parameter.tied-layout"]
