"""Reports and plans as GitHub Markdown; whatever a name or a message contains shows as it is."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from te_convert.plan.model import Plan
from te_convert.report.format import format_count, plural
from te_convert.report.model import Report
from te_convert.report.summary import Summary, summarise, summarise_plan
from te_convert.report.tables import ReasonGroup, Table

_SPECIAL = re.compile(r"[\\`*\[\]<>&|~$]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.|@")
_LINE_START = re.compile(r"^(?:[#+=-]|\d(?=\d*[.)](?:\s|$)))")


def render_markdown(report: Report) -> str:
    """The report as one Markdown page, with a table of every site at its end."""
    return _render(summarise(report))


def render_plan_markdown(plan: Plan) -> str:
    """A plan as one Markdown page."""
    return _render(summarise_plan(plan))


def escape(text: str) -> str:
    """Clean text as literal Markdown text, safe in a table cell too.

    A pipe, a backslash and what HTML reads become character references, which survive a table's own unescaping; other marks
    get a backslash.
    """
    return _LINE_START.sub(_literal, _SPECIAL.sub(_literal, text))


def code(text: str) -> str:
    """An identifier as code: backticks where they are safe, ``<code>`` with character references elsewhere."""
    if re.search(r"[`|\\&<>]", text) or text != text.strip() or not text:
        return f"<code>{escape(text)}</code>"
    return f"`{text}`"


def _literal(match: re.Match[str]) -> str:
    character = match[0]
    if character in "<>&":
        return html.escape(character)
    return f"\\{character}" if character in "`*[]_~#+=-" else f"&#{ord(character)};"


def _render(summary: Summary) -> str:
    blocks = [f"# {escape(summary.title)}", f"**{escape(summary.headline)}**"]
    blocks += _bullets("Warnings", summary.warnings)
    facts = Table(("what", "value"), (*summary.facts, ("outcomes", summary.outcome_line)))
    blocks += ["## Overview", _table(facts), _table(summary.coverage)]
    blocks += _section("Converted" if summary.parity_lines else "Would be converted", summary.converted)
    blocks += _reasons("Not converted", summary.refused)
    blocks += _reasons("Converted, with advice", summary.advice)
    if summary.no_match:
        rows = tuple((name, format_count(number)) for name, number in summary.no_match)
        counts = Table(("class", "sites"), rows, frozenset({0}), frozenset({1}))
        blocks += _section("No match (nothing that TE replaces)", counts)
    blocks += _parity(summary)
    blocks += _bullets("Recipe", summary.recipe_lines)
    blocks += _section("The whole model in the recipe", summary.recipe, level=3)
    blocks += _section("Sites that lose most in it", summary.recipe_sites, level=3)
    blocks += _bullets("Not verified", summary.not_verified)
    blocks += _bullets("Notes", summary.notes)
    blocks += _bullets("Environment", tuple(filter(None, (summary.environment, summary.timings))))
    blocks += _section("Every site", summary.sites)
    return "\n\n".join(blocks) + "\n"


def _parity(summary: Summary) -> list[str]:
    if not summary.parity_lines:
        return []
    blocks = _bullets("Parity", summary.parity_lines)
    for title, table in (
        ("Whole model", summary.scenarios),
        ("Sites farthest from equal", summary.worst_sites),
        ("Put back", summary.reverted),
    ):
        blocks += _section(title, table, level=3)
    return blocks


def _reasons(title: str, groups: Sequence[ReasonGroup]) -> list[str]:
    if not groups:
        return []
    blocks = [f"## {title}"]
    for group in groups:
        blocks.append(f"### {code(group.code)} ({plural(group.count, 'site')})")
        blocks += [escape(group.meaning)] if group.meaning else []
        header = ("kind", "sites", "detail", "hint")
        lines = [_row(header), _row(("---",) * len(header), literal=True)]
        for entry in group.entries:
            names = ", ".join(code(name.names) + (f" ×{name.count}" if name.count > 1 else "") for name in entry.names)
            lines.append(_row((escape(entry.kind), names, escape(entry.detail), escape(entry.hint)), literal=True))
        blocks.append("\n".join(lines))
    return blocks


def _section(title: str, table: Table, level: int = 2) -> list[str]:
    return [f"{'#' * level} {title}", _table(table)] if table.rows else []


def _bullets(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {escape(line)}" for line in lines)] if lines else []


def _table(table: Table) -> str:
    rule = ("---:" if index in table.right else "---" for index in range(len(table.header)))
    lines = [_row(table.header), _row(tuple(rule), literal=True)]
    for row in table.rows:
        cells = tuple(code(cell) if index in table.code else escape(cell) for index, cell in enumerate(row))
        lines.append(_row(cells, literal=True))
    return "\n".join(lines)


def _row(cells: Sequence[str], literal: bool = False) -> str:
    return "| " + " | ".join(cells if literal else map(escape, cells)) + " |"
