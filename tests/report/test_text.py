from __future__ import annotations

from dataclasses import replace

import pytest
from syrupy.assertion import SnapshotAssertion

from te_convert.plan.model import Outcome
from te_convert.reasons import ReasonCode, reason
from te_convert.report.format import NameGroup
from te_convert.report.text import join_names, render_headline, render_plan, render_text
from te_convert.verify.model import Parity
from tests.report.sample_reports import (
    HOSTILE,
    SAMPLES,
    bert_plan,
    linear,
    nothing,
    parity_failed,
    plan_of,
    report_of,
    site_parity,
    success,
)


@pytest.mark.parametrize("name", SAMPLES)
def test_report(name: str, snapshot: SnapshotAssertion) -> None:
    assert render_text(SAMPLES[name]()) == snapshot


@pytest.mark.parametrize("recipe", [None, "fp8"])
def test_plan(recipe: str | None, snapshot: SnapshotAssertion) -> None:
    assert render_plan(bert_plan(recipe)) == snapshot


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("width", [40, 60, 100])
def test_no_line_is_wider_than_asked(name: str, width: int) -> None:
    assert max(map(len, render_text(SAMPLES[name](), width=width).splitlines())) <= width


@pytest.mark.parametrize("name", SAMPLES)
def test_colour_changes_nothing_but_colour(name: str) -> None:
    import re

    coloured = render_text(SAMPLES[name](), color=True)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert coloured != bare
    assert [line.rstrip() for line in bare.splitlines()] == render_text(SAMPLES[name]()).splitlines()


def test_names_show_as_they_are_and_never_reach_the_terminal_raw() -> None:
    text = render_text(SAMPLES["hostile"](), width=400)
    shown = HOSTILE.replace("\x1b", "\\x1b").replace("\n", " ")
    assert shown in text
    assert ":smile:" in text
    assert "\x1b" not in text


def test_nothing_converted_is_said_plainly() -> None:
    assert render_text(nothing()).startswith("0 sites would run on Transformer Engine")


def test_a_second_conversion_is_not_told_that_nothing_runs_on_te() -> None:
    plan = plan_of(linear("fc", Outcome.REFUSED, reason(ReasonCode.MODULE_ALREADY_TE, "te.Linear")))
    headline = render_headline(report_of(plan, Parity("not-verified", "reference")))
    assert headline.startswith("0 further sites would run on Transformer Engine · 1 site already")


@pytest.mark.parametrize(
    ("parity", "expected"),
    [
        (Parity("passed", "te", "cuda"), "parity passed on Transformer Engine (cuda)"),
        (Parity("passed", "reference"), "parity passed on reference twins (cpu) · nothing ran on TE kernels"),
        (Parity("failed", "reference"), "parity FAILED on reference twins (cpu) · nothing ran on TE kernels"),
        (
            Parity("sites-only", "reference"),
            "each site passed alone on reference twins (cpu), the whole model was not verified · nothing ran on TE kernels",
        ),
        (
            Parity("sites-only", "te", "cuda", sites=(site_parity("fc", passed=False),)),
            "1 site FAILED alone on Transformer Engine (cuda), the whole model was not verified",
        ),
        (Parity("not-verified", "te", "cuda"), "not verified · nothing ran on TE kernels"),
        (Parity("unheard-of", "te", "cuda"), "not verified"),
    ],
)
def test_the_headline_claims_what_was_verified_and_no_more(parity: Parity, expected: str) -> None:
    assert render_headline(report_of(plan_of(linear("fc")), parity)) == f"converted 1 of 1 site · {expected}"


def test_the_headline_names_sites_put_back() -> None:
    report = parity_failed()
    assert "2 sites put back after failing parity" in render_headline(report)
    assert "the model was left unchanged · 2 sites put back" in render_headline(replace(report, converted=False))


def test_the_headline_carries_the_warnings() -> None:
    assert render_headline(replace(success(), warnings=("read me",))).splitlines()[1:] == ["warning: read me"]
    assert render_headline(bert_plan()) == "would convert 30 of 30 sites · nothing was changed, nothing was verified"


def test_random_input_is_said() -> None:
    site = replace(site_parity("fc"), random_input=True)
    text = render_text(report_of(plan_of(linear("fc")), Parity("sites-only", "reference", sites=(site,))))
    assert "1 site compared on random input" in text


def test_different_hints_of_one_code_stay_with_their_sites() -> None:
    reasons = (reason(ReasonCode.DTYPE_MIXED, "a", "first"), reason(ReasonCode.DTYPE_MIXED, "b", "second"))
    text = render_plan(plan_of(linear("x", Outcome.REFUSED, *reasons)))
    assert "      hint: first\n" in text
    assert "      hint: second\n" in text


def test_an_unknown_outcome_of_a_long_list_is_counted() -> None:
    names = [NameGroup(f"n{i}", (f"n{i}",)) for i in range(11)]
    assert join_names(names).endswith("n7 … and 3 more sites")


def test_str_of_a_report_is_its_text() -> None:
    assert str(success()) == render_text(success())
