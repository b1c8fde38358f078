"""A check for a terminal: the verdict, every failure on a line, then the figures."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from te_convert.check.model import EXIT_FAILED, EXIT_HOLDS, CheckResult
from te_convert.report.format import clean, format_value
from te_convert.report.tables import Table, scenario_table, worst_sites_table
from te_convert.report.text import render_block

_TONES = {EXIT_HOLDS: "bold green", EXIT_FAILED: "bold red"}


def render_quiet(result: CheckResult) -> str:
    """The verdict, and one line for each failure."""
    return "\n".join([result.headline, *map(str, result.failures), *_changes(result)])


def render_check(result: CheckResult, width: int = 100, color: bool = False) -> str:
    """The check as text of at most ``width`` columns, except for the failures, which stay on one line each."""
    verdict = render_block([Text(result.headline, _TONES.get(result.exit_code, "bold yellow"), overflow="fold")], width, color)
    lines = [*map(str, result.failures), *_changes(result)]
    failures = render_block([Text(line, "red") for line in lines], max(map(len, lines)) + 1, color) if lines else ""
    items: list[RenderableType] = []
    for title, table in (
        ("Whole model", scenario_table(result.parity)),
        ("Sites farthest from equal", worst_sites_table(result.parity)),
    ):
        if table.rows:
            items += ["", Text(title, "bold"), Padding(_rich_table(table), (0, 0, 0, 2))]
    better = result.golden.better if result.golden is not None else ()
    versions = [" · ".join(f"{name} {format_value(value)}" for name, value in result.versions.items())]
    for title, words in (("Better than recorded", better), ("Notes", result.remarks), ("Versions", versions)):
        if words:
            items += ["", Text(title, "bold"), *(Padding(Text(clean(line), overflow="fold"), (0, 0, 0, 2)) for line in words)]
    return verdict + failures + render_block(items, width, color)


def _changes(result: CheckResult) -> Sequence[str]:
    if result.golden is None or not result.golden.changes:
        return ()
    return (f"changed since the figures were recorded: {result.golden.changed}",)


def _rich_table(table: Table) -> RichTable:
    """The table without the columns in which no row has a figure."""
    grid = RichTable.grid(padding=(0, 2))
    shown = [index for index in range(len(table.header)) if any(row[index] != "–" for row in table.rows)]
    for index in shown:
        grid.add_column(justify="right" if index in table.right else "left", overflow="fold")
    grid.add_row(*(Text(table.header[index], "dim") for index in shown))
    for row in table.rows:
        grid.add_row(*(Text(row[index], "bold red" if row[index] == "FAILED" else "") for index in shown))
    return grid
