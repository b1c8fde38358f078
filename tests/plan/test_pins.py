"""Include and exclude patterns: globs over a name or over one that contains it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import te_convert
from te_convert.plan.model import Outcome, Plan
from tests.rewrite.block_samples import Attends, Block, Experts, MoE, X, encoder_layer
from tests.rules.rule_cases import codes, plan_of


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(nn.ModuleDict({"fc1": nn.Linear(4, 4), "fc2": nn.Linear(4, 4)}) for _ in range(11))
        self.head = nn.Linear(4, 4)
        self.tied = self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer["fc2"](layer["fc1"](x))  # type: ignore[index]
        y: torch.Tensor = self.head(x)
        return y


def plan(include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> Plan:
    return plan_of(Encoder(), torch.ones(2, 4), include=include, exclude=exclude)


def converting(*, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> set[str]:
    return {decision.fqn for decision in plan(include, exclude).converting}


ALL = {f"layer.{index}.{name}" for index in range(11) for name in ("fc1", "fc2")} | {"head"}


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("*", ALL),
        ("head", {"head"}),
        ("tied", {"head"}),
        ("layer.1", {"layer.1.fc1", "layer.1.fc2"}),
        ("layer", ALL - {"head"}),
        ("layer.1*", {f"layer.{index}.{name}" for index in (1, 10) for name in ("fc1", "fc2")}),
        ("layer.[01]", {f"layer.{index}.{name}" for index in (0, 1) for name in ("fc1", "fc2")}),
        ("*.fc2", {name for name in ALL if name.endswith("fc2")}),
        ("layer.?.fc1", {f"layer.{index}.fc1" for index in range(10)}),
        ("HEAD", set()),
        ("hea", set()),
        ("", set()),
    ],
)
def test_patterns(pattern: str, matches: set[str]) -> None:
    assert converting(include=(pattern,)) == matches
    assert converting(exclude=(pattern,)) == ALL - matches


def test_exclude_wins_over_include() -> None:
    found = plan(("layer.0", "head"), ("*.fc1",))
    assert {decision.fqn for decision in found.converting} == {"layer.0.fc2", "head"}
    assert [decision.outcome for decision in found].count(Outcome.EXCLUDED) == 21
    first, other = found.get("layer.0.fc1"), found.get("layer.3.fc2")
    assert (codes(first), first.reasons[0].detail) == (["user.excluded"], "matches exclude '*.fc1'")
    assert (codes(other), other.reasons[0].detail) == (["user.not-included"], "matches none of 'layer.0', 'head'")


def test_the_root_is_reached_by_a_glob() -> None:
    root = plan_of(nn.Linear(4, 4), torch.ones(2, 4), exclude=("*",)).get("")
    assert (root.outcome, codes(root)) == (Outcome.EXCLUDED, ["user.excluded"])


def test_an_excluded_site_keeps_its_other_reasons() -> None:
    found = plan_of(nn.Linear(4, 4).double(), torch.ones(2, 4).double(), exclude=("*",)).get("")
    assert (found.outcome, codes(found)) == (Outcome.EXCLUDED, ["user.excluded", "dtype.float64"])


def test_a_pattern_that_names_no_site_is_said() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    plan = te_convert.analyze(model, torch.randn(2, 8), include=["0", "encoder.*"], exclude="hed")
    assert plan.notes == ("include 'encoder.*' matches no site", "exclude 'hed' matches no site")


ATTENDS, STACKS, BLOCK = (
    (lambda: nn.Sequential(Attends())),
    (lambda: nn.Sequential(MoE(Experts()))),
    (lambda: nn.Sequential(Block())),
)


@pytest.mark.parametrize(
    ("make", "name", "pattern"),
    [
        (ATTENDS, "0.attn", "*.attn"),
        (STACKS, "0.experts", "0.exp*"),
        (STACKS, "0.experts", "0"),
        (BLOCK, "0.attn", "*.attn"),
        (lambda: nn.Sequential(encoder_layer()), "0", "0"),
    ],
    ids=["mha", "experts", "experts-by-parent", "attention", "encoder-layer"],
)
def test_every_kind_of_site_says_what_excluded_it(make: Callable[[], nn.Module], name: str, pattern: str) -> None:
    decision = plan_of(make().eval(), X, exclude=(pattern,)).get(name)
    assert decision.outcome is Outcome.EXCLUDED
    assert (decision.reasons[0].code, decision.reasons[0].detail) == ("user.excluded", f"matches exclude {pattern!r}")


@pytest.mark.parametrize("make", [ATTENDS, STACKS, BLOCK])
def test_nothing_below_an_excluded_name_has_another_outcome(make: Callable[[], nn.Module]) -> None:
    decisions = plan_of(make().eval(), X, exclude=("0",)).decisions
    assert {(decision.outcome, codes(decision)[0]) for decision in decisions} == {(Outcome.EXCLUDED, "user.excluded")}


def test_a_module_that_no_rule_looks_at_is_not_called_excluded() -> None:
    found = plan_of(nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)), torch.tensor([1, 2]), exclude=("0",)).get("0")
    assert (found.outcome, codes(found)) == (Outcome.NO_MATCH, [])
