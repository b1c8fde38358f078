"""From a capture to a plan: every module that owns parameters is listed, with its figures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from te_convert.capture.graph import Capture
from te_convert.config import ConvertConfig
from te_convert.plan.choose import make_plan
from te_convert.plan.model import CallShape, Outcome
from te_convert.rules.base import AnyRule
from te_convert.rules.registry import BUILTIN_RULES
from tests.capture.architectures import ARCHITECTURES
from tests.rules.rule_cases import Holder, codes, plan_of


def small() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4), nn.ReLU(), nn.Conv1d(8, 2, 1), nn.BatchNorm1d(2))


def test_every_owner_of_parameters_is_listed() -> None:
    plan = plan_of(small(), torch.ones(2, 8, dtype=torch.long))
    assert [(d.fqn, d.kind, d.outcome) for d in plan] == [
        ("0", "Embedding", Outcome.NO_MATCH),
        ("1", "Linear", Outcome.CONVERTED),
        ("3", "Conv1d", Outcome.NO_MATCH),
        ("4", "BatchNorm1d", Outcome.NO_MATCH),
    ]
    assert [d.params for d in plan] == [80, 36, 18, 4]
    assert plan.params_total == 138
    assert plan.flops_total == sum(d.flops for d in plan) == 2 * 16 * 32 + 2 * 16 * 8
    assert plan.get("1").shapes == (CallShape((2, 8, 8), (2, 8, 4), "float32"),)
    assert (plan.model_class, plan.scenarios, plan.recipe) == ("Sequential", ("inputs",), None)


def test_a_norm_without_parameters_is_listed_and_an_activation_is_not() -> None:
    plan = plan_of(nn.Sequential(nn.LayerNorm(4, elementwise_affine=False), nn.GELU()), torch.ones(2, 4))
    assert [(d.fqn, d.params, codes(d)) for d in plan] == [("0", 0, ["norm.no-affine"])]


def test_ties_count_once() -> None:
    make, inputs = ARCHITECTURES["gpt2"]
    model = make()
    plan = plan_of(model, inputs)
    assert plan.params_total == sum(p.numel() for p in model.parameters())
    assert plan.params_total < sum(d.params for d in plan)


def test_distinct_shapes_are_listed_up_to_a_limit() -> None:
    model = nn.Linear(4, 4)
    plan = plan_of(model, [(torch.ones(rows, 4),) for rows in (1, 2, 2, *range(3, 20))])
    assert plan.get("").calls == 20
    assert [shape.input for shape in plan.get("").shapes] == [(rows, 4) for rows in range(1, 9)]
    assert plan.flops_total == 2 * 16


def test_notes_and_failures() -> None:
    captured = Capture((), (("inputs[train]", "ValueError: no"),))
    plan = make_plan(small(), captured, ConvertConfig(recipe="fp8"), ("a note",))
    assert plan.notes == ("a note", "scenario inputs[train] did not run: ValueError: no")
    assert (plan.scenarios, plan.flops_total, plan.recipe) == ((), 0, "fp8")


def test_progress_is_told() -> None:
    seen: list[tuple[str, int, int]] = []
    make_plan(small(), Capture(), ConvertConfig(progress=lambda *step: seen.append(step)))
    assert seen == [("plan", index, 6) for index in range(1, 7)]


def test_the_order_of_the_rules_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gpt2", "t5", "swin"):
        make, inputs = ARCHITECTURES[name]
        model = make()
        orders: list[tuple[AnyRule, ...]] = [BUILTIN_RULES, (*reversed(BUILTIN_RULES[:2]), *BUILTIN_RULES[2:])]
        plans = []
        for order in orders:
            monkeypatch.setattr("te_convert.plan.choose.load_rules", lambda order=order: order)
            plans.append(plan_of(model, inputs))
        assert plans[0] == plans[1]


def test_a_module_of_transformer_engine_is_known() -> None:
    cls = type("Linear", (nn.Linear,), {"__module__": "transformer_engine.pytorch.module.linear"})
    decision = plan_of(Holder(cls(4, 4)), torch.ones(2, 4)).get("site")
    assert (decision.outcome, codes(decision), decision.rule) == (Outcome.NO_MATCH, ["module.already-te"], None)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("module", [nn.Linear(4, 4), nn.LayerNorm(4)])
def test_scripted_modules_say_so(module: nn.Module) -> None:
    decision = plan_of(Holder(torch.jit.script(module)), torch.ones(2, 4)).get("site")
    assert (decision.outcome, codes(decision), decision.rule) == (Outcome.NO_MATCH, ["module.scripted"], None)
