from __future__ import annotations

import pytest
from markdown_it import MarkdownIt
from syrupy.assertion import SnapshotAssertion

from te_convert.report.markdown import code, escape, render_markdown, render_plan_markdown
from te_convert.report.summary import summarise
from tests.report.sample_reports import HOSTILE, SAMPLES, bert_plan, hostile

NASTY = (
    "# title",
    "- item",
    "1. item",
    "+ x",
    "=== x",
    "*a* _b_ __c__ `d` ~~e~~",
    "[a](http://b) ![c](d) <e> &lt; a|b \\| \\",
    "www.example.org $x$ @team",
    " lead",
    "``",
    HOSTILE.replace("\x1b", "").replace("\n", " "),
)


def parse(text: str) -> str:
    return str(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text))


def plain(text: str) -> str:
    """What a reader sees: the text of every inline token."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    kinds = {child.type for token in tokens for child in token.children or ()}
    assert kinds <= {"text", "text_special", "code_inline", "html_inline"}, kinds
    return "".join(c.content for token in tokens for c in token.children or () if c.type != "html_inline")


@pytest.mark.parametrize("name", SAMPLES)
def test_report(name: str, snapshot: SnapshotAssertion) -> None:
    assert render_markdown(SAMPLES[name]()) == snapshot


def test_plan(snapshot: SnapshotAssertion) -> None:
    assert render_plan_markdown(bert_plan()) == snapshot


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("render", [escape, code])
def test_any_text_reads_as_it_is(text: str, render: object) -> None:
    assert callable(render)
    for before, after in (("", ""), ("- ", ""), ("| h |\n| --- |\n| ", " |")):
        seen = plain(f"{before}{render(text)}{after}")
        assert seen.removeprefix("h").strip() == text.strip()


@pytest.mark.parametrize("name", SAMPLES)
def test_every_row_of_every_table_has_its_cells(name: str) -> None:
    report = SAMPLES[name]()
    page = parse(render_markdown(report))
    tables = [block.split("</table>")[0] for block in page.split("<table>")[1:]]
    for table in tables:
        header, *rows = table.split("<tr>")[1:]
        assert all(row.count("<td") == header.count("<th") - header.count("<thead") for row in rows)
    assert tables[-1].count("<tr>") == 1 + len(report.sites)


def test_hostile_names_make_no_elements() -> None:
    page = parse(render_markdown(hostile()))
    for element in ("<script", "<img", "<b>", "<i>", "<a ", "<strong>ning"):
        assert element not in page
    assert "{{ 7 * 7 }}" in page


def test_markdown_says_what_the_text_says() -> None:
    report = SAMPLES["success"]()
    summary = summarise(report)
    page = plain_page(render_markdown(report))
    for line in (summary.headline, *summary.not_verified, *summary.parity_lines, summary.environment):
        assert line in page


def plain_page(text: str) -> str:
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    return "\n".join("".join(child.content for child in token.children or ()) for token in tokens)


def test_to_markdown_of_a_report() -> None:
    assert hostile().to_markdown() == render_markdown(hostile())
