"""A check as JUnit XML, which GitLab, Jenkins, Azure and most viewers read: one suite, one case for each comparison."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterable

from te_convert.check.model import EXIT_NOTHING, NOTHING_CONVERTED, CheckResult, Failure, figure_words, scenario_label
from te_convert.report.format import clean, format_name

SUITE = "te-convert check"


def render_junit(result: CheckResult) -> str:
    """The XML text: a case for each scenario and site, and one for each other failure."""
    cases = [_case("scenario", scenario_label(run), figure_words(run.figures, run.error_ratio)) for run in result.parity.scenarios]
    cases += [_case("site", format_name(s.fqn), figure_words(s.figures, s.error_ratio)) for s in result.parity.sites]
    if result.golden is not None and not result.golden.failures:
        words = f"recorded in {result.golden.path}" if result.golden.updated else f"compared with {result.golden.path}"
        cases.append(_case("golden", clean(result.golden.path), words))
    failures = list(result.failures)
    if result.exit_code == EXIT_NOTHING:
        failures.append(Failure("model", clean(result.model_class), NOTHING_CONVERTED, "at least one site"))
    known = {(case.get("classname"), case.get("name")): case for case in cases}
    for failure in failures:
        case = known.get((_class(failure.kind), failure.name))
        if case is None:
            case = _case(failure.kind, failure.name)
            known[case.get("classname"), case.get("name")] = case
            cases.append(case)
        ET.SubElement(case, "failure", message=failure.message, type=f"te_convert.{failure.kind}").text = str(failure)
    changed = {"changed": result.golden.changed} if result.golden is not None and result.golden.changes else {}
    properties = {
        **{name: value or "none" for name, value in result.versions.items()},
        "target": result.target,
        "model_class": result.model_class,
        "dtype": result.dtype,
        "backend": result.parity.backend,
        "device": result.parity.device,
        "status": result.parity.status,
        **changed,
    }
    return _document(cases, properties, "\n".join(map(clean, result.remarks)), result.seconds)


def render_junit_error(target: str, message: str) -> str:
    """The XML text of a check that could not be made."""
    case = _case("check", clean(target))
    ET.SubElement(case, "error", message=clean(message), type="te_convert.error").text = clean(message)
    return _document([case], {"target": target}, "", 0.0)


def _case(kind: str, name: str, output: str = "") -> ET.Element:
    case = ET.Element("testcase", classname=_class(kind), name=name)
    if output:
        ET.SubElement(case, "system-out").text = output
    return case


def _class(kind: str) -> str:
    return f"te_convert.{kind}"


def _document(cases: Iterable[ET.Element], properties: dict[str, str], notes: str, seconds: float) -> str:
    suite = ET.Element("testsuite", name=SUITE)
    listed = ET.SubElement(suite, "properties")
    for name, value in properties.items():
        ET.SubElement(listed, "property", name=name, value=clean(value))
    suite.extend(cases)
    found = suite.findall("testcase")
    counts = {
        "tests": str(len(found)),
        "failures": str(sum(case.find("failure") is not None for case in found)),
        "errors": str(sum(case.find("error") is not None for case in found)),
        "skipped": "0",
        "time": f"{seconds:.3f}",
    }
    suite.attrib.update(counts)
    if notes:
        ET.SubElement(suite, "system-out").text = notes
    root = ET.Element("testsuites", {"name": SUITE, **counts})
    root.append(suite)
    ET.indent(root, " ")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'
