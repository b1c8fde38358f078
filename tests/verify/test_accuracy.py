"""Low precision is judged over enough draws: noise condemns no right conversion, and an inaccurate one does not slip through."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from te_convert.capture.scenario import normalize_inputs
from te_convert.rewrite.apply import Applied, apply_plan
from te_convert.verify import accuracy
from te_convert.verify.accuracy import MIN_DRAWS, judge_accuracy
from te_convert.verify.compare import row_ratios
from te_convert.verify.reference import Reference, record_reference
from tests.rewrite.rewrite_samples import plan_of

ELEMENTS = 1 << 20


@dataclass
class Case:
    applied: Applied
    reference: Reference


@pytest.fixture(scope="module")
def case() -> Case:
    return made(fuse=False)


@pytest.fixture(scope="module")
def fused_case() -> Case:
    return made(fuse=True)


def made(fuse: bool) -> Case:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers).to(torch.bfloat16).eval()
    inputs = torch.randn(2, 64, dtype=torch.bfloat16)
    reference = record_reference(model, normalize_inputs(inputs))
    return Case(apply_plan(copy.deepcopy(model), plan_of(model, inputs, fuse=fuse), "reference"), reference)


def test_good_first_runs_need_no_more(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "_draw", lambda *_: pytest.fail("drew"))
    found = judge_accuracy(case.applied, case.reference, [0.9, 8.0, 1.0], ELEMENTS)
    assert found is not None
    assert found.verdict.passed
    assert found.ratio == 1.0
    assert found.draws == 3


def test_unlucky_first_runs_are_judged_on_fresh_ones(case: Case) -> None:
    found = judge_accuracy(case.applied, case.reference, [8.0] * 6, ELEMENTS)
    assert found is not None
    assert found.verdict.passed
    assert found.draws >= MIN_DRAWS
    assert 0.7 < found.ratio < 1.25


def test_unlucky_first_runs_of_fusions_are_judged_on_fresh_ones(fused_case: Case) -> None:
    found = judge_accuracy(fused_case.applied, fused_case.reference, [8.0] * 6, ELEMENTS)
    assert found is not None
    assert found.verdict.passed
    assert found.draws >= MIN_DRAWS
    assert 0.7 < found.ratio < 1.25


@pytest.mark.parametrize("name", ["1", "1.layernorm_1"], ids=["leaf", "fused"])
def test_an_inaccurate_conversion_fails_on_fresh_draws_too(name: str, request: pytest.FixtureRequest) -> None:
    case: Case = request.getfixturevalue("case" if name == "1" else "fused_case")
    site = case.applied.sites[name]
    forward = type(site).forward.__get__(site)

    def coarse(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = forward(x)
        return y.to(torch.float8_e4m3fn).to(y.dtype)

    site.__dict__["forward"] = coarse
    try:
        found = judge_accuracy(case.applied, case.reference, [8.0] * 6, ELEMENTS)
    finally:
        del site.__dict__["forward"]
    assert found is not None
    assert not found.verdict.passed
    assert found.draws >= MIN_DRAWS
    assert found.ratio > 1.25


def test_without_fresh_draws_the_first_verdict_stands(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "_draw", lambda *_: [])
    found = judge_accuracy(case.applied, case.reference, [8.0] * 6, ELEMENTS)
    assert found is not None
    assert not found.verdict.passed
    assert found.ratio == 8.0


def test_nothing_to_judge(case: Case) -> None:
    assert judge_accuracy(case.applied, case.reference, [], 0) is None


def test_rows_are_separate_draws() -> None:
    exact = torch.ones(3, 1000)
    own = exact + torch.tensor([0.01, 0.02, 0.04])[:, None]
    other = exact + torch.tensor([0.02, 0.02, 0.02])[:, None]
    ratios = row_ratios([("", exact)], [("", own)], [("", other)], torch.bfloat16)
    assert ratios == pytest.approx([2.0, 1.0, 0.5], rel=1e-5)


def test_outputs_of_different_batches_are_one_draw() -> None:
    exact, scalar = torch.ones(3, 1000), torch.ones(())
    pair = [("a", exact), ("b", scalar)]
    assert len(row_ratios(pair, pair, pair, torch.bfloat16)) == 1
