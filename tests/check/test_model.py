from __future__ import annotations

import json
from dataclasses import replace

import pytest

from te_convert.check.model import CheckResult, Failure, GoldenVerdict, figure_words
from te_convert.check.text import render_check, render_quiet
from tests.check.check_samples import EQUAL, failing, figures, passing, result, scenario, site

WORSE = GoldenVerdict("g.json", failures=(Failure("golden", "fc", "SQNR 91.0 dB", "recorded 118.0 dB"),))


@pytest.mark.parametrize(
    ("checked", "code"),
    [
        (passing(), 0),
        (result((), (site(),), "sites-only"), 0),
        (result(status="not-verified"), 1),
        (failing(), 3),
        (result((), (), "not-verified", converted=("fc",)), 3),
        (result((), (), "failed", converted=("fc",)), 3),
        (replace(passing(), golden=WORSE), 3),
        (replace(passing(), golden=GoldenVerdict("g.json", better=("fc: better",))), 0),
        (result(status="not-verified", golden=WORSE), 3),
    ],
)
def test_exit_codes(checked: CheckResult, code: int) -> None:
    assert checked.exit_code == code
    assert checked.to_dict()["exit_code"] == code
    assert bool(checked.failures) is (code == 3)


def test_one_line_for_each_failure_with_figure_and_bound() -> None:
    assert render_quiet(failing()).splitlines() == [
        "parity FAILED on reference twins (cpu) · 1 run and 2 sites compared",
        "site fc: SQNR 41.2 dB, max rel 3.0e-03; bound: SQNR >= 90 dB and max rel <= 2e-05",
        "site head: put back, no figures; bound: alone: raised ValueError",
        "scenario inputs (perturbed): SQNR 39.9 dB, max rel 5.0e-03; bound: SQNR >= 90 dB and max rel <= 2e-05",
    ]


def test_failures_stay_on_one_line_whatever_the_width() -> None:
    shown = render_check(failing(), width=40).splitlines()
    assert all(str(failure) in shown for failure in failing().failures)
    assert "\x1b[" not in render_check(failing())
    assert "\x1b[" in render_check(failing(), color=True)


def test_what_changed_is_said_in_every_form() -> None:
    changed = replace(WORSE, changes={"torch": ("2.13.0", "2.14.1"), "transformers": (None, "5.0")})
    checked = replace(passing(), golden=changed)
    line = "changed since the figures were recorded: torch 2.13.0 → 2.14.1, transformers none → 5.0"
    assert line in render_quiet(checked).splitlines()
    assert line in render_check(checked, width=40).splitlines()
    assert checked.to_dict()["golden"]["changes"]["torch"] == {"recorded": "2.13.0", "now": "2.14.1"}


def test_a_verdict_that_could_not_be_reached_says_why() -> None:
    checked = result((), (), "not-verified", converted=("fc",), notes=("inputs: the original did not run",))
    assert [str(f) for f in checked.failures] == ["model Net: parity not-verified; bound: inputs: the original did not run"]


def test_figures_in_words() -> None:
    assert figure_words(EQUAL, None) == "bit-equal"
    assert figure_words(EQUAL, 1.0) == "bit-equal, error ratio 1.000"
    assert figure_words(figures(49.99, 1e-2), 1.9) == "SQNR 49.9 dB, max rel 1.0e-02, error ratio 1.900"


def test_json_holds_the_failures_and_the_parity() -> None:
    data = json.loads(json.dumps(failing().to_dict(), allow_nan=False))
    assert (data["schema"], data["passed"], data["backend"]) == (1, False, "reference")
    assert [failure["name"] for failure in data["failures"]] == ["fc", "head", "inputs (perturbed)"]
    assert data["parity"]["scenarios"][0]["sqnr_db"] == 39.94


def test_low_precision_runs_are_told_from_their_mapping() -> None:
    low = scenario(dtype="bfloat16", error_ratio=1.0, passed=False)
    assert [f.name for f in result((low, scenario(passed=False)), (site(),), "failed").failures] == [
        "inputs (perturbed, bfloat16)",
        "inputs (perturbed)",
    ]
