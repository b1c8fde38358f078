"""A plan is plain data: it survives JSON, and damage is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from te_convert.errors import LoadError
from te_convert.plan.model import CallShape, Decision, Outcome, Plan
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.replacements.specs import LayerNormSpec, LinearSpec, RMSNormSpec
from te_convert.weights.ops import Fill, Move, Transpose, WeightMap

NAMES = st.text(alphabet="abc._0é", max_size=8)
SIZES = st.integers(0, 2**40)
EPS = st.floats(0, 1, allow_nan=False)
SPECS = st.one_of(
    st.none(),
    st.builds(LinearSpec, SIZES, SIZES, st.booleans(), st.sampled_from(["float32", "bfloat16"])),
    st.builds(LayerNormSpec, SIZES, EPS, st.booleans(), st.just("float16")),
    st.builds(RMSNormSpec, SIZES, EPS, st.booleans(), st.just("float32")),
)
MAPS = st.sampled_from(
    [
        None,
        WeightMap(()),
        WeightMap((Move("a", "weight"), Fill("bias", 0.0, 3))),
        WeightMap((Transpose("w", "weight"), Move("b", "bias"))),
    ]
)
REASONS = st.lists(st.builds(Reason, NAMES, NAMES, NAMES), max_size=3).map(tuple)
SHAPES = st.lists(SIZES, max_size=3).map(tuple)
DECISIONS = st.builds(
    Decision,
    fqn=NAMES,
    kind=NAMES,
    class_name=NAMES,
    outcome=st.sampled_from(Outcome),
    aliases=st.lists(NAMES, max_size=2).map(tuple),
    rule=st.none() | NAMES,
    spec=SPECS,
    weights=MAPS,
    reasons=REASONS,
    calls=SIZES,
    shapes=st.lists(st.builds(CallShape, SHAPES, SHAPES, NAMES), max_size=2).map(tuple),
    params=SIZES,
    flops=SIZES,
    precision=st.sampled_from(["recipe", "high"]),
)
PLANS = st.builds(
    Plan,
    NAMES,
    st.lists(DECISIONS, max_size=3).map(tuple),
    st.lists(NAMES, max_size=2).map(tuple),
    st.none() | NAMES,
    SIZES,
    SIZES,
    st.lists(NAMES, max_size=2).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(PLANS)
def test_json_there_and_back(plan: Plan) -> None:
    assert Plan.from_dict(json.loads(plan.to_json())) == plan


def decision(fqn: str, outcome: Outcome = Outcome.CONVERTED, **changes: Any) -> Decision:
    spec = LinearSpec(4, 4, True, "float32")
    return Decision(fqn, "Linear", "Linear", outcome, rule="linear", spec=spec, **changes)


PLAN = Plan("Net", (decision("a", aliases=("b.c",)), decision("d", Outcome.REFUSED), decision("e", Outcome.FUSED)))


def test_views() -> None:
    assert [d.fqn for d in PLAN] == [d.fqn for d in PLAN.sites] == ["a", "d", "e"]
    assert [d.fqn for d in PLAN.converting] == ["a", "e"]
    assert [d.replacement for d in PLAN] == ["te.Linear", None, "te.Linear"]
    assert PLAN.get("b.c") is PLAN.get("a")
    with pytest.raises(KeyError, match="nowhere"):
        PLAN.get("nowhere")


@pytest.mark.parametrize("name", ["a", "b.c"])
def test_refuse(name: str) -> None:
    why = reason(ReasonCode.PARITY_FAILED, "3 dB")
    changed = PLAN.refuse(name, why)
    assert (changed.get("a").outcome, changed.get("a").reasons) == (Outcome.REFUSED, (why,))
    assert changed.get("a").spec is not None
    assert changed.get("a").replacement is None
    assert changed.decisions[1:] == PLAN.decisions[1:]
    assert PLAN.get("a").outcome is Outcome.CONVERTED
    assert len(changed.refuse("a", why).get("a").reasons) == 2


def test_refuse_needs_a_site() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        PLAN.refuse("nowhere", reason(ReasonCode.PARITY_FAILED, ""))


def damaged(**changes: Any) -> dict[str, Any]:
    return {**PLAN.to_dict(), **changes}


def damaged_decision(**changes: Any) -> dict[str, Any]:
    return damaged(decisions=[{**PLAN.to_dict()["decisions"][0], **changes}])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (damaged(schema=1), "schema 1; this version reads 2"),
        (damaged(schema=None), "schema None"),
        ({}, "schema None"),
        ([], "schema None"),
        ("text", "schema None"),
        (damaged(decisions=None), "damaged"),
        (damaged(decisions=[3]), "damaged"),
        ({"schema": 2}, "damaged: KeyError"),
        (damaged_decision(outcome="MAYBE"), "damaged: ValueError"),
        (damaged_decision(reasons=[{"code": "x"}]), "damaged: TypeError"),
        (damaged_decision(spec={"module": "te.Nothing"}), "unknown replacement 'te.Nothing'"),
        (damaged_decision(spec={"module": "te.Linear", "in_features": 3}), "wrong fields"),
        (damaged_decision(weights=[{"op": "burn"}]), "unknown weight operation 'burn'"),
        (damaged_decision(weights=[{"op": "move", "source": "a", "dest": "b"}] * 2), "damaged: ValueError"),
        (damaged_decision(weights=["move"]), "damaged: ValueError"),
        (damaged_decision(shapes=[[]]), "damaged: TypeError"),
    ],
)
def test_damage_is_a_load_error(data: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        Plan.from_dict(data)
    assert caught.value.hint


def test_a_plan_reads_as_one_line_per_site() -> None:
    why = reason(ReasonCode.NORM_NO_AFFINE, "elementwise_affine=False")
    spec = LinearSpec(8, 8, True, "float32")
    plan = Plan(
        "Net",
        (
            Decision("norm", "LayerNorm", "LayerNorm", Outcome.REFUSED, reasons=(why,)),
            Decision("", "Linear", "Linear", Outcome.CONVERTED, spec=spec),
        ),
    )
    assert str(plan).splitlines() == [
        "Net: 1 of 2 sites would be converted",
        "  REFUSED    norm  LayerNorm  [norm.no-affine: elementwise_affine=False]",
        "  CONVERTED  (root)  te.Linear",
    ]
