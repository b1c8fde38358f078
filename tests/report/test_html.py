from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from syrupy.assertion import SnapshotAssertion

from te_convert.report.html import render_html, render_plan_html
from te_convert.report.summary import summarise
from tests.report.sample_reports import HOSTILE, SAMPLES, bert_plan, hostile

VOID = {"meta"}


class Page(HTMLParser):
    """Collects text and elements, and fails on tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def body(page: str) -> str:
    return page[page.index("<body>") :]


@pytest.mark.parametrize("name", SAMPLES)
def test_report(name: str, snapshot: SnapshotAssertion) -> None:
    assert body(render_html(SAMPLES[name]())) == snapshot


def test_plan(snapshot: SnapshotAssertion) -> None:
    assert body(render_plan_html(bert_plan())) == snapshot


@pytest.mark.parametrize("name", SAMPLES)
def test_pages_are_well_formed_and_self_contained(name: str) -> None:
    text = render_html(SAMPLES[name]())
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert not page.elements & {"script", "img", "link", "iframe", "b onerror"}
    assert not page.attributes & {"src", "href", "onerror", "onclick"}
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_hostile_names_show_as_they_are() -> None:
    page = Page(render_html(hostile()))
    assert HOSTILE.replace("\x1b", "\\x1b").replace("\n", " ") in page.text
    assert "{{ 7 * 7 }} {% raw %}" in page.text


@pytest.mark.parametrize("name", SAMPLES)
def test_html_says_what_the_text_says(name: str) -> None:
    summary = summarise(SAMPLES[name]())
    text = Page(render_html(SAMPLES[name]())).text
    for line in (summary.headline, *summary.warnings, *summary.not_verified, *summary.notes, *summary.parity_lines):
        assert line in text
    for table in (summary.converted, summary.scenarios, summary.worst_sites, summary.reverted, summary.sites):
        assert all(cell in text for row in table.rows for cell in row if " ×" not in cell)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_colours_are_readable_in_light_and_dark() -> None:
    light, dark = render_html(hostile()).split("@media (prefers-color-scheme: dark)")
    for sheet in (light, dark):
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", sheet))
        for name in ("text", "soft", "good", "warn", "bad"):
            for ground in ("page", "card"):
                one, two = sorted((_luminance(colours[name]), _luminance(colours[ground])))
                assert (two + 0.05) / (one + 0.05) >= 4.5, (name, ground)  # WCAG 2.1 AA for normal text


def test_to_html_of_a_report() -> None:
    assert hostile().to_html() == render_html(hostile())
