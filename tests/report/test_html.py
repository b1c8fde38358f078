from __future__ import annotations

import base64
import hashlib
import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser
from random import Random

import pytest
from syrupy.assertion import SnapshotAssertion

from te_convert.plan.model import Decision, Outcome, Plan
from te_convert.reasons import Reason
from te_convert.report.html import render_html, render_plan_html, template_version
from te_convert.report.model import Report
from te_convert.report.page import page_of_plan, page_of_report
from te_convert.report.summary import summarise
from te_convert.verify.model import Parity
from te_convert.verify.recipe_figures import RecipeFigures, RecipeScenario, RecipeSite
from tests.report.sample_reports import CLOSE, HOSTILE, SAMPLES, bert_plan, hostile, linear, other, report_of, site_parity, success

VOID = {"meta", "input"}
LANDMARKS = {"header", "main", "nav", "footer"}
MAX_BYTES = 2_000_000


class Page(HTMLParser):
    """Collects what a page holds, and fails on tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.headings: list[int] = []
        self.tables: list[list[list[str]]] = []
        self.untitled_drawings = 0
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        given = dict(attrs)
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "svg" and not given.get("aria-hidden"):
            assert given["role"] == "img"
            self.untitled_drawings += 1
        if tag == "title" and self.stack[-1] == "svg":
            self.untitled_drawings -= 1
        if tag == "th":
            assert given.get("scope") in ("col", "row")
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] in ("style", "script"):
            return
        self.text += data
        if {"td", "th"} & set(self.stack):
            self.tables[-1][-1][-1] += data

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]


def body(page: str) -> str:
    """The page from its header to its footer, without what names versions."""
    text = page[page.index("<body>") : page.index("<script>")]
    return re.sub(r"te_convert \S+, page template \w{12}", "te_convert VERSION", text)


def names_of(cell: str) -> list[str]:
    """The sites that a folded name stands for: ``a.{0..1,3}.x ×3`` → a.0.x, a.1.x, a.3.x."""
    name, _, count = cell.partition(" ×")
    parts = re.split(r"\{([\d.,]+)\}", name)
    choices: list[list[str]] = [[part] for part in parts]
    for index in range(1, len(parts), 2):
        runs = [run.partition("..") for run in parts[index].split(",")]
        choices[index] = [str(number) for low, _, high in runs for number in range(int(low), int(high or low) + 1)]
    found = ["".join(choice) for choice in itertools.product(*choices)]
    assert len(found) == int(count or 1)
    return found


def recipe_report() -> Report:
    """A report with an emulated recipe, a command, a machine's checks and an estimate."""
    plan = bert_plan("fp8")
    sites = tuple(
        RecipeSite(d.fqn, 18.5 + index % 7, 2, d.flops, None, high=index % 5 == 0, why="SQNR")
        for index, d in enumerate(plan.converting)
        if d.kind == "Linear"
    )
    figures = RecipeFigures("fp8", "fp8-current", 20.0, 18.0, sites, (RecipeScenario("inputs", "out", 17.2, 21.5),), ("note",))
    report = success()
    return replace(
        report_of(plan, report.parity, recipe_figures=figures),
        command="te-convert 'my <model>.py' --out build/te",
        doctor=({"name": "GPU", "ok": False, "fact": "no CUDA device", "consequence": "twins only", "fix": "use a GPU"},),
        estimate={"speedup": {"low": 1.1, "high": 1.42}, "layers": [{"name": "mlp", "gain_us": 12.25}], "verdict": "worth it"},
    )


def large(layers: int = 40, experts: int = 64) -> Report:
    """Over 10,000 sites, of which no two layers are equal: some experts of each, drawn at random, were never called."""
    draw = Random(0)
    decisions: list[Decision] = []
    for layer, expert in itertools.product(range(layers), range(experts)):
        never = Reason("module.never-called", f"expert {expert} of layer {layer}", "pass inputs that reach it")
        outcome = (Outcome.REFUSED, never) if draw.random() < 1 / 7 else (Outcome.CONVERTED,)
        names = ("gate_proj", "up_proj", "down_proj", "norm")
        decisions += [linear(f"layers.{layer}.experts.{expert}.{name}", *outcome) for name in names]
    plan = Plan("Mixture", tuple(decisions), ("inputs",), None, 10**12, 10**13)
    done = [d.fqn for d in plan.converting]
    parity = Parity("passed", "reference", sites=tuple(site_parity(fqn, CLOSE) for fqn in done), executed=dict.fromkeys(done, 2))
    return report_of(plan, parity)


REPORTS = {**SAMPLES, "recipe": recipe_report}


@pytest.mark.parametrize("name", REPORTS)
def test_report(name: str, snapshot: SnapshotAssertion) -> None:
    assert body(render_html(REPORTS[name]())) == snapshot


def test_plan(snapshot: SnapshotAssertion) -> None:
    assert body(render_plan_html(bert_plan(), "te-convert analyze m.py --html p.html")) == snapshot


@pytest.mark.parametrize("name", [*REPORTS, "plan"])
def test_pages_are_well_formed_and_self_contained(name: str) -> None:
    text = render_plan_html(bert_plan()) if name == "plan" else render_html(REPORTS[name]())
    page = Page(text)
    assert text.startswith('<!doctype html>\n<html lang="en">')
    assert not set(page.elements) & {"img", "link", "iframe", "object", "embed", "b onerror", "form", "image", "use"}
    assert not page.values("src")
    assert all(value.startswith("#") for value in page.values("href"))
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "url(" not in text
    assert "@import" not in text
    assert page.elements.count("script") == 1


@pytest.mark.parametrize("name", [*REPORTS, "plan"])
def test_pages_are_accessible(name: str) -> None:
    page = Page(render_plan_html(bert_plan()) if name == "plan" else render_html(REPORTS[name]()))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    named = [word for attribute in ("aria-labelledby", "for") for value in page.values(attribute) for word in value.split()]
    assert {value[1:] for value in page.values("href")} | set(named) <= set(ids)
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(page.headings))
    assert {tag: page.elements.count(tag) for tag in LANDMARKS} == dict.fromkeys(LANDMARKS, 1)
    assert page.untitled_drawings == 0
    assert all(outcome.value in page.text for outcome in Outcome)  # a word beside each shape and colour


def test_the_only_script_is_the_one_that_the_policy_allows() -> None:
    text = render_html(hostile())
    policy = re.search(r"default-src 'none'; .*?script-src 'sha256-([^']+)'", text)
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert policy is not None
    assert script is not None
    assert base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode() == policy[1]


def test_hostile_names_show_as_they_are() -> None:
    page = Page(render_html(hostile()))
    assert HOSTILE.replace("\x1b", "\\x1b").replace("\n", " ") in page.text
    assert "{{ 7 * 7 }} {% raw %}" in page.text
    assert "onerror" not in {name for _, name, _ in page.attributes}


def test_hostile_extras_show_as_they_are() -> None:
    bad = "<script>alert(1)</script>\"'><img src=x>"
    report = replace(
        hostile(),
        command=bad,
        environment={bad: bad},
        timings_s={bad: 1.0},
        doctor=({"name": bad, "ok": True, "fact": bad},),
        estimate={bad: {bad: [{bad: bad}], "more": [bad]}},
    )
    page = Page(render_html(report))
    assert page.elements.count("script") == 1
    assert "img" not in page.elements
    assert page.text.count(bad) >= 9


@pytest.mark.parametrize("name", REPORTS)
def test_html_says_what_the_text_says(name: str) -> None:
    report = REPORTS[name]()
    summary = summarise(report)
    page = Page(render_html(report))
    lines = (*summary.warnings, *summary.not_verified, *summary.notes, *summary.parity_lines, *summary.recipe_lines)
    for line in (summary.headline, summary.outcome_line, *lines):
        assert line in page.text
    tables = (summary.converted, summary.scenarios, summary.worst_sites, summary.reverted, summary.recipe, summary.recipe_sites)
    for table in tables:
        assert all(cell in page.text for row in table.rows for cell in row)
    for group in (*summary.refused, *summary.advice):
        for entry in group.entries:
            assert all(text in page.text for text in (group.code, group.meaning, entry.detail, entry.hint))


@pytest.mark.parametrize("name", [name for name in REPORTS if name != "hostile"])
def test_every_site_is_in_the_table_with_its_outcome(name: str) -> None:
    report = REPORTS[name]()
    table = Page(render_html(report)).tables[-1] if not report.doctor else Page(render_html(replace(report, doctor=()))).tables[-1]
    place = table[0].index("outcome")
    shown = [(fqn, row[place]) for row in table[1:] for fqn in names_of(row[0])]
    assert sorted(shown) == sorted((site.fqn, site.outcome.value) for site in report.sites)


def test_a_large_model_stays_small_and_complete() -> None:
    report = large()
    assert len(report.sites) > 10_000
    text = render_html(report)
    assert len(text.encode()) < MAX_BYTES
    page = Page(text)
    place = page.tables[-1][0].index("outcome")
    shown = {fqn: row[place] for row in page.tables[-1][1:] for fqn in names_of(row[0])}
    assert shown == {site.fqn: site.outcome.value for site in report.sites}


def test_the_slots_for_an_estimate_and_for_a_machine() -> None:
    text = Page(render_html(recipe_report())).text
    for words in ("Estimate", "worth it", "1.42", "gain us", "12.25", "doctor: 1 of 1 checks failed: GPU", "use a GPU"):
        assert words in text
    assert "te-convert 'my <model>.py' --out build/te" in text
    without = Page(render_html(success()))
    assert "estimate" not in without.values("id")
    assert "doctor" not in without.text
    assert "worth it" in Page(render_plan_html(bert_plan(), estimate={"verdict": "worth it"})).text


def test_json_has_the_extras_only_when_they_are_there() -> None:
    assert {"command", "doctor", "estimate"} <= set(recipe_report().to_dict())
    assert not {"command", "doctor", "estimate"} & set(success().to_dict())


def test_reasons_of_larger_replacements_are_shown() -> None:
    block = replace(other("layer.0", "BertLayer"), reasons=(Reason("block.dropout", "p = 0.1", "set it to 0"),))
    page = page_of_plan(Plan("Net", (block, linear("layer.0.fc")), ("inputs",), None, 1, 1))
    assert [section.title for section in page.reasons] == ["Larger replacements that did not apply"]
    assert page.anchors[Outcome.NO_MATCH, "block.dropout"] == "larger-1"
    assert "set it to 0" in Page(render_plan_html(Plan("Net", (block,), (), None))).text


def test_a_page_names_the_template_that_made_it() -> None:
    assert f', template {template_version()}"' in render_html(success())


def test_a_plan_has_no_column_that_only_a_run_can_fill() -> None:
    assert page_of_plan(bert_plan()).sites.header == ("site", "kind", "outcome", "replacement", "shapes", "calls", "reasons")
    assert page_of_report(success()).sites.header[6:8] == ("executed", "SQNR dB")


def test_to_html_of_a_report() -> None:
    assert hostile().to_html() == render_html(hostile())
