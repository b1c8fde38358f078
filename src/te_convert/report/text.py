"""Reports and plans for a terminal: fixed width, colourless unless asked, the verdict first."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from te_convert.plan.model import Plan
from te_convert.report.format import NameGroup, format_count, plural
from te_convert.report.model import Report
from te_convert.report.summary import Summary, summarise, summarise_plan
from te_convert.report.tables import ReasonGroup, Table

MIN_WIDTH = 40
MAX_NAMES = 8
MAX_ENTRIES = 8
_TONES = {"good": "bold green", "warn": "bold yellow", "bad": "bold red"}


def render_text(report: Report, width: int = 100, color: bool = False) -> str:
    """The report as text of at most ``width`` columns; ANSI colours only with ``color=True``."""
    return _render(summarise(report), width, color)


def render_plan(plan: Plan, width: int = 100, color: bool = False) -> str:
    """A plan as text: what a conversion would do and why it would leave the rest."""
    return _render(summarise_plan(plan), width, color)


def render_headline(subject: Report | Plan) -> str:
    """The verdict in one line, and every warning in one more."""
    summary = summarise(subject) if isinstance(subject, Report) else summarise_plan(subject)
    return "\n".join([summary.headline, *(f"warning: {line}" for line in summary.warnings)])


def render_block(items: Sequence[RenderableType], width: int, color: bool) -> str:
    """Rich renderables as text: no markup, no emoji codes, no trailing blanks, one line break at the end."""
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=max(width, MIN_WIDTH),
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
        legacy_windows=False,
        markup=False,
        highlight=False,
        emoji=False,
    )
    for item in items:
        console.print(item)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _render(summary: Summary, width: int, color: bool) -> str:
    page = _Page()
    page.line(summary.headline, _TONES[summary.tone], indent=0)
    page.bullets("WARNINGS", summary.warnings, "yellow")
    _overview(page, summary)
    _sites(page, summary)
    _parity(page, summary)
    _recipe(page, summary)
    page.bullets("Not verified", summary.not_verified)
    page.bullets("Notes", summary.notes)
    for title, line in (("Environment", summary.environment), ("Time", summary.timings)):
        page.bullets(title, (line,) if line else (), bullet="")
    return render_block(page.items, width, color)


class _Page:
    """Collects headings, lines and tables of clean text; nothing here is parsed as markup."""

    def __init__(self) -> None:
        self.items: list[RenderableType] = []

    def heading(self, title: str) -> None:
        self.items += ["", Text(title, "bold")]

    def line(self, text: str, style: str = "", indent: int = 2) -> None:
        self.items.append(Padding(Text(text, style, overflow="fold"), (0, 0, 0, indent)))

    def item(self, label: str, text: str, style: str = "") -> None:
        """A label and a text whose further lines align with its first."""
        grid = RichTable.grid()
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(Text(label, style), Text(text, style))
        self.items.append(grid)

    def bullets(self, title: str, lines: Sequence[str], style: str = "", bullet: str = "- ") -> None:
        if lines:
            self.heading(title)
            for text in lines:
                self.item("  " + bullet, text, style)

    def table(self, table: Table) -> None:
        """The table without the columns in which no row has a figure."""
        rich = RichTable(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="", collapse_padding=True)
        shown = [index for index in range(len(table.header)) if any(row[index] != "–" for row in table.rows)]
        for index in shown:
            justify: JustifyMethod = "right" if index in table.right else "left"
            rich.add_column(Text(table.header[index]), justify=justify, overflow="fold")
        for row in table.rows:
            rich.add_row(*(Text(row[index], "bold red" if row[index] == "FAILED" else "") for index in shown))
        self.items.append(Padding(rich, (0, 0, 0, 2)))


def _overview(page: _Page, summary: Summary) -> None:
    page.heading("Overview")
    for label, value in (*summary.facts, ("outcomes", summary.outcome_line)):
        page.item(f"  {label:<12}", value)
    page.heading("Coverage")
    for name, part, total, share in summary.coverage.rows:
        page.item(f"  {name:<12}", f"{part} of {total} ({share})")


def _sites(page: _Page, summary: Summary) -> None:
    if summary.converted.rows:
        page.heading("Converted" if summary.parity_lines else "Would be converted")
        page.table(summary.converted)
    _reasons(page, "Not converted", summary.refused)
    _reasons(page, "Converted, with advice", summary.advice)
    if summary.no_match:
        page.heading("No match (nothing that TE replaces)")
        page.line(", ".join(f"{name} ×{format_count(number)}" for name, number in summary.no_match))


def _reasons(page: _Page, title: str, groups: Sequence[ReasonGroup]) -> None:
    if not groups:
        return
    page.heading(title)
    for group in groups:
        page.line(f"{group.code} ({plural(group.count, 'site')})", "bold")
        if group.meaning:
            page.line(group.meaning, indent=4)
        hints = {entry.hint for entry in group.entries}
        for entry in group.entries[:MAX_ENTRIES]:
            detail = f": {entry.detail}" if entry.detail else ""
            page.item("    - ", f"{entry.kind} {join_names(entry.names)}{detail}")
            if entry.hint and len(hints) > 1:
                page.item("      hint: ", entry.hint)
        hidden = sum(name.count for entry in group.entries[MAX_ENTRIES:] for name in entry.names)
        if hidden:
            page.line(f"… and {plural(hidden, 'more site')}; the JSON, Markdown and HTML reports list every one", indent=4)
        if len(hints) == 1 and group.entries[0].hint:
            page.item("    hint: ", group.entries[0].hint)


def join_names(names: Sequence[NameGroup]) -> str:
    """Names joined by commas; a long list ends in how many more sites there are."""
    shown = ", ".join(map(str, names[:MAX_NAMES]))
    hidden = sum(name.count for name in names[MAX_NAMES:])
    return f"{shown} … and {plural(hidden, 'more site')}" if hidden else shown


def _parity(page: _Page, summary: Summary) -> None:
    if not summary.parity_lines:
        return
    page.heading("Parity")
    for line in summary.parity_lines:
        page.line(line)
    for title, table in (
        ("Parity of the whole model", summary.scenarios),
        ("Sites farthest from equal", summary.worst_sites),
        ("Put back", summary.reverted),
    ):
        if table.rows:
            page.heading(title)
            page.table(table)


def _recipe(page: _Page, summary: Summary) -> None:
    if not summary.recipe_lines:
        return
    page.heading("Recipe")
    for line in summary.recipe_lines:
        page.line(line)
    for title, table in (("The whole model in the recipe", summary.recipe), ("Sites that lose most in it", summary.recipe_sites)):
        if table.rows:
            page.heading(title)
            page.table(table)
