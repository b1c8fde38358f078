"""A check for GitHub Actions: annotations (workflow commands) and a job summary."""

from __future__ import annotations

import os
from pathlib import Path

from te_convert.check.model import EXIT_FAILED, EXIT_HOLDS, EXIT_NOTHING, CheckResult
from te_convert.report.format import clean, plural
from te_convert.report.markdown import code, escape
from te_convert.report.tables import Table, scenario_table, worst_sites_table

MOST = 10
"""GitHub shows so many errors of one step and drops the rest."""


def render_annotations(result: CheckResult) -> list[str]:
    """One ``::error`` line for each failure, a notice when there is none; at most as many as GitHub shows."""
    if result.exit_code == EXIT_HOLDS:
        return [render_annotation("notice", result.headline, "te-convert", result.file)]
    if result.exit_code == EXIT_NOTHING:
        return [render_annotation("error", result.headline, "te-convert: nothing was converted", result.file)]
    failures = result.failures
    shown = failures if len(failures) <= MOST else failures[: MOST - 1]
    lines = [render_annotation("error", f.message, f"te-convert: {f.kind} {f.name}", result.file) for f in shown]
    if len(shown) < len(failures):
        hidden = plural(len(failures) - len(shown), "more failure")
        lines.append(render_annotation("error", f"{hidden}; the job summary lists every one", "te-convert", result.file))
    if result.golden is not None and result.golden.changes:
        changed = f"changed since the figures were recorded: {result.golden.changed}"
        lines.append(render_annotation("warning", changed, "te-convert"))
    return lines


def render_annotation(level: str, message: str, title: str, file: str = "") -> str:
    """One workflow command; the file relative to the checkout, where GitHub looks for it."""
    properties = {"file": _in_checkout(file)} if file else {}
    properties["title"] = title
    listed = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{level} {listed}::{_data(clean(message))}"


def render_summary(result: CheckResult) -> str:
    """The check as Markdown for the job's page."""
    mark = {EXIT_HOLDS: "✅", EXIT_FAILED: "❌"}.get(result.exit_code, "⚠️")
    parts = [f"### {mark} te-convert check {code(clean(result.target))}", escape(result.headline)]
    if result.failures:
        rows = tuple((f"{f.kind} {f.name}", f.figure, f.bound) for f in result.failures)
        parts.append(_table(Table(("failure", "figure", "bound"), rows)))
    if result.golden is not None:
        parts += [f"Changed since the figures were recorded: {escape(result.golden.changed)}"] if result.golden.changes else []
        parts += ["\n".join(f"- better: {escape(clean(line))}" for line in result.golden.better)] if result.golden.better else []
    tables = [table for table in (scenario_table(result.parity), worst_sites_table(result.parity)) if table.rows]
    figures = "\n\n".join(map(_table, tables))
    notes = "\n".join(f"- {escape(clean(note))}" for note in result.remarks)
    versions = escape(" · ".join(f"{name} {clean(value or 'none')}" for name, value in result.versions.items()))
    folded = "\n\n".join(filter(None, (figures, notes, versions)))
    parts.append(f"<details><summary>Figures, notes and versions</summary>\n\n{folded}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    head = f"| {' | '.join(table.header)} |\n|{' --- |' * len(table.header)}"
    return "\n".join([head, *(f"| {' | '.join(map(escape, row))} |" for row in table.rows)])


def _in_checkout(file: str) -> str:
    path, root = Path(file).resolve(), os.environ.get("GITHUB_WORKSPACE")
    for folder in filter(None, (root, str(Path.cwd()))):
        if path.is_relative_to(Path(folder).resolve()):
            return path.relative_to(Path(folder).resolve()).as_posix()
    return path.as_posix()


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(clean(text)).replace(":", "%3A").replace(",", "%2C")
