"""What other programs read: JUnit XML and GitHub's workflow commands."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from te_convert.check.github import MOST, render_annotation, render_annotations, render_summary
from te_convert.check.junit import render_junit, render_junit_error
from te_convert.check.model import CheckResult, Failure, GoldenVerdict
from tests.check.check_samples import failing, figures, hostile, passing, result, scenario, site


def suite_of(text: str) -> ET.Element:
    root = ET.fromstring(text)
    (suite,) = root
    assert (root.tag, suite.tag, suite.get("name")) == ("testsuites", "testsuite", "te-convert check")
    cases = suite.findall("testcase")
    assert int(suite.get("tests", "")) == len(cases)
    assert int(suite.get("failures", "")) == len([case for case in cases if case.find("failure") is not None])
    assert len({(case.get("classname"), case.get("name")) for case in cases}) == len(cases)
    return suite


def test_a_case_for_each_scenario_and_site() -> None:
    suite = suite_of(render_junit(passing()))
    assert [(case.get("classname"), case.get("name"), case.findtext("system-out")) for case in suite.iter("testcase")] == [
        ("te_convert.scenario", "inputs (perturbed)", "SQNR 118.0 dB, max rel 4.0e-07"),
        ("te_convert.scenario", "inputs[train] (perturbed)", "bit-equal"),
        ("te_convert.site", "fc", "SQNR 131.0 dB, max rel 1.0e-07"),
        ("te_convert.site", "norm", "bit-equal"),
    ]
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0")


def test_properties_name_versions_and_backend() -> None:
    golden = GoldenVerdict("g.json", changes={"torch": ("2.13", "2.14")})
    suite = suite_of(render_junit(replace(passing(), golden=golden)))
    properties = {found.get("name"): found.get("value") for found in suite.iter("property")}
    assert properties["torch"] == "2.14.1"
    assert properties["transformers"] == "none"
    assert (properties["backend"], properties["device"], properties["dtype"]) == ("reference", "cpu", "float32")
    assert properties["changed"] == "torch 2.13 → 2.14"


def test_failures_carry_their_figures() -> None:
    suite = suite_of(render_junit(failing()))
    messages = {case.get("name"): failure.get("message") for case in suite.iter("testcase") for failure in case.iter("failure")}
    assert messages == {
        "fc": "SQNR 41.2 dB, max rel 3.0e-03; bound: SQNR >= 90 dB and max rel <= 2e-05",
        "head": "put back, no figures; bound: alone: raised ValueError",
        "inputs (perturbed)": "SQNR 39.9 dB, max rel 5.0e-03; bound: SQNR >= 90 dB and max rel <= 2e-05",
    }
    assert suite.findtext("system-out") == "a note"


def test_golden_failures_and_an_unconverted_model_are_failures() -> None:
    worse = GoldenVerdict("g.json", failures=(Failure("golden", "fc", "SQNR 91.0 dB", "recorded 118.0 dB"),))
    suite = suite_of(render_junit(replace(passing(), golden=worse)))
    assert [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None] == ["fc"]
    assert suite_of(render_junit(replace(passing(), golden=GoldenVerdict("g.json")))).get("tests") == "5"
    assert suite_of(render_junit(result(status="not-verified"))).get("failures") == "1"


def test_two_scenarios_of_one_name_are_one_case_in_xml() -> None:
    twice = result((scenario(passed=False), scenario(passed=False)), (site(),), "failed")
    cases = [case.get("name") for case in ET.fromstring(render_junit(twice)).iter("testcase")]
    assert cases.count("inputs (perturbed)") == 2


def test_hostile_names_stay_text() -> None:
    suite = suite_of(render_junit(hostile()))
    assert suite.get("failures") == "1"
    for line in render_annotations(hostile()):
        assert re.fullmatch(r"::error file=[^,:]+,title=[^,:]+::[^\n\r\x1b]*", line), line
    summary = render_summary(hostile())
    assert "<b>" not in summary
    assert "\x1b" not in summary


def test_an_error_is_an_error_in_xml() -> None:
    suite = suite_of(render_junit_error("net.py", "no such\nfile"))
    (error,) = suite.iter("error")
    assert (suite.get("errors"), error.get("message")) == ("1", "no such file")


def test_one_annotation_for_each_failure() -> None:
    assert render_annotations(failing())[0] == (
        "::error file=net.py,title=te-convert%3A site fc::SQNR 41.2 dB, max rel 3.0e-03; bound: SQNR >= 90 dB and max rel <= 2e-05"
    )
    assert len(render_annotations(failing())) == 3
    assert [line.partition(" ")[0] for line in render_annotations(passing())] == ["::notice"]
    assert render_annotations(result(status="not-verified"))[0].startswith("::error file=net.py,title=te-convert%3A nothing was")


def test_no_more_annotations_than_github_shows() -> None:
    sites = tuple(site(f"fc{index}", figures(10), passed=False) for index in range(40))
    lines = render_annotations(result((), sites, "failed"))
    assert len(lines) == MOST
    assert lines[-1].endswith("::31 more failures; the job summary lists every one")
    assert "site fc39" in render_summary(result((), sites, "failed"))


def test_values_of_workflow_commands_are_escaped() -> None:
    assert render_annotation("error", "50%\nof: a, b", "t,i:t%le") == "::error title=t%2Ci%3At%25le::50%25 of: a, b"


def test_files_are_named_from_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    assert render_annotation("error", "x", "t", "net.py").startswith("::error file=net.py,")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert render_annotation("error", "x", "t", "net.py").startswith("::error file=sub/net.py,")
    assert render_annotation("error", "x", "t", "/else/net.py").startswith("::error file=/else/net.py,")


@pytest.mark.parametrize(("checked", "mark"), [(passing(), "✅"), (failing(), "❌"), (result(status="not-verified"), "⚠️")])
def test_the_summary_begins_with_the_verdict(checked: CheckResult, mark: str) -> None:
    lines = render_summary(checked).splitlines()
    assert lines[0] == f"### {mark} te-convert check `net.py`"
    assert "torch 2.14.1" in render_summary(checked)
    assert len([line for line in lines if line.startswith(("| site ", "| scenario inp"))]) >= len(checked.failures)


def test_the_summary_names_what_changed() -> None:
    golden = GoldenVerdict("g.json", better=("fc: SQNR 110 dB",), changes={"torch": ("2.13", "2.14")})
    summary = render_summary(replace(passing(), golden=golden))
    assert "Changed since the figures were recorded: torch 2.13 → 2.14" in summary
    assert "- better: fc: SQNR 110 dB" in summary
