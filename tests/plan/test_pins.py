"""Include and exclude patterns: globs over a name or over one that contains it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import te_convert
from te_convert.plan.model import Outcome, Plan
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
