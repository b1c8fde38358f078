"""Rules of third parties come in by entry point; a broken one is named."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from te_convert.errors import InputError
from te_convert.match.candidate import Candidate
from te_convert.plan.model import Outcome
from te_convert.replacements.specs import LinearSpec, Spec
from te_convert.rules.base import NearMiss, Rule
from te_convert.rules.registry import BUILTIN_RULES, load_rules
from te_convert.weights.ops import Move, WeightMap
from tests.rules.rule_cases import codes, plan_of, x_like


class TanhRule(Rule[int]):
    """Takes every nn.Linear with six outputs before the built-in rule."""

    id = "six"
    kind = "Six"

    def looks_like(self, site: Candidate) -> bool:
        return isinstance(site.module, nn.Linear) and site.module.out_features == 6

    def recognise(self, site: Candidate) -> int | NearMiss | None:
        return 6

    def build(self, site: Candidate, facts: int) -> Spec:
        return LinearSpec(facts, facts, True, "float32")

    def weights(self, site: Candidate, facts: int) -> WeightMap:
        return WeightMap((Move("weight", "weight"), Move("bias", "bias")))


class Breaks(TanhRule):
    id = "breaks"

    def recognise(self, site: Candidate) -> int | NearMiss | None:
        raise ZeroDivisionError("no such luck")


class Twin(TanhRule):
    id = "linear"


class Entry:
    def __init__(self, name: str, loaded: Any) -> None:
        self.name, self.loaded = name, loaded

    def load(self) -> Any:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def install(monkeypatch: pytest.MonkeyPatch, *loaded: Any) -> None:
    def entry_points(group: str) -> list[Entry]:
        assert group == "te_convert.rules"
        return [Entry(f"entry{index}", item) for index, item in enumerate(loaded)]

    monkeypatch.setattr("te_convert.rules.registry.metadata.entry_points", entry_points)


def test_without_third_parties() -> None:
    assert load_rules() == BUILTIN_RULES
    assert [rule.id for rule in BUILTIN_RULES] == ["linear", "conv1d", "layer-norm", "rms-norm"]


@pytest.mark.parametrize("loaded", [TanhRule, TanhRule()])
def test_a_rule_of_a_third_party_comes_first(monkeypatch: pytest.MonkeyPatch, loaded: Any) -> None:
    install(monkeypatch, loaded)
    assert [rule.id for rule in load_rules()] == ["six", "linear", "conv1d", "layer-norm", "rms-norm"]
    plan = plan_of(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)), x_like())
    assert [(decision.kind, decision.rule) for decision in plan] == [("Six", "six"), ("Linear", "linear")]


def test_a_rule_that_raises_refuses_its_site_only(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Breaks)
    plan = plan_of(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)), x_like())
    broken, fine = plan.decisions
    assert (broken.outcome, codes(broken)) == (Outcome.REFUSED, ["internal.error"])
    assert broken.reasons[0].detail == "rule breaks: ZeroDivisionError: no such luck"
    assert (fine.outcome, fine.reasons) == (Outcome.CONVERTED, ())


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        ([Twin], "two rules are called linear"),
        ([TanhRule, TanhRule], "two rules are called six"),
        ([nn.Linear(2, 2)], r"entry point 'entry0' of te_convert\.rules is not a Rule"),
        ([dict], "is not a Rule"),
        ([ImportError("no module named numpy")], r"entry point 'entry0' .* fails: ImportError: no module named numpy"),
        ([Rule], "fails: TypeError"),
    ],
)
def test_errors_name_the_culprit(monkeypatch: pytest.MonkeyPatch, loaded: list[Any], message: str) -> None:
    install(monkeypatch, *loaded)
    with pytest.raises(InputError, match=message) as caught:
        load_rules()
    assert caught.value.hint
