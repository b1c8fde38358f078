"""A measurement for a terminal: first what it does not say, then one table."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from te_convert.bench.model import BenchResult, Comparison, Row, RowRatio
from te_convert.report.format import clean, format_decibel, format_error, format_value, plural
from te_convert.report.text import render_block

_LEAST_WIDTH = 100
"""A narrower table would lose figures; a terminal breaks its lines instead."""
_MOST = "peak memory: weights and buffers, and the most that one call has allocated at a time"
_MEMORY = {
    "cuda": f"{_MOST} (torch.cuda.max_memory_allocated)",
    "cpu": f"{_MOST} (torch's CPU allocations)",
}
_ERROR = "SQNR and max rel: outputs in eval mode against those of the original computed in float32"


def render_bench(result: BenchResult, width: int = 100, color: bool = False) -> str:
    """The measurement as text of ``width`` columns, 100 at least; ANSI colours only with ``color=True``."""
    items: list[RenderableType] = [Text(result.caveat, "bold yellow"), ""] if result.caveat else []
    items += [Text(headline(result), "bold"), "", _table(result)]
    missing = [row for row in result.rows if row.reason]
    if missing:
        items += ["", Text("Not measured", "bold"), *_missing(missing)]
    if result.comparison is not None:
        items += ["", *_comparison(result.comparison)]
    notes = [_MEMORY[result.device], _ERROR, *result.notes]
    if not result.converted_sites:
        notes.insert(0, "nothing was converted: the converted rows are the original")
    items += ["", Text("Notes", "bold"), *(_hanging("  - ", clean(note)) for note in notes)]
    return render_block(items, max(width, _LEAST_WIDTH), color)


def _missing(rows: list[Row]) -> list[RenderableType]:
    """One line per reason."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        by_reason.setdefault(row.reason, []).append(row.recipe or row.name)
    return [_hanging("  - ", f"{', '.join(names)}: {clean(why)}") for why, names in by_reason.items()]


def headline(result: BenchResult) -> str:
    """The verdict in one line."""
    kind, count = result.items
    inputs = ", ".join(f"{name} {shape}" for name, shape in result.inputs.items())
    gpus = result.environment.get("gpus") or []
    where = (
        format_value(gpus[0].get("name"))
        if result.device == "cuda" and gpus
        else f"CPU, {result.environment.get('threads')} threads"
    )
    parts = [
        f"{clean(result.model_class)}: {result.work}, {result.dtype}, {where}",
        f"{count} {kind} per call ({clean(inputs)})",
        f"{result.rounds} rounds",
        f"{plural(result.converted_sites, 'module')} converted",
    ]
    if result.comparison is not None and result.comparison.slower:
        parts.append(f"{plural(len(result.comparison.slower), 'variant')} SLOWER than recorded")
    return " · ".join(parts)


def _table(result: BenchResult) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="", collapse_padding=True)
    table.add_column("variant", overflow="fold")
    generated = any(row.tokens_equal is not None for row in result.rows)
    names = ["median ms", "IQR ms", "speed", f"{result.items[0]}/s", "peak MiB", "SQNR dB", "max rel"]
    for name in [*names, *(["tokens equal"] if generated else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in result.rows:
        if row.rounds_ms:
            table.add_row(*_cells(row, generated))
    return table


def _cells(row: Row, generated: bool) -> list[str]:
    ends = row.quartiles_ms or (0.0, 0.0)
    cells = [
        row.name,
        f"{row.median_ms:.3f}",
        f"{ends[0]:.3f}–{ends[1]:.3f}",
        f"{row.speedup:.2f}×",
        f"{row.items_per_s:,.0f}",
        "–" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.1f}",
        "–" if row.sqnr_db is None else "bit-equal" if row.max_rel == 0 else format_decibel(row.sqnr_db),
        format_error(row.max_rel),
    ]
    return [*cells, "–" if row.tokens_equal is None else f"{row.tokens_equal * 100:.1f} %"] if generated else cells


def _comparison(found: Comparison) -> list[RenderableType]:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="", collapse_padding=True)
    table.add_column("variant", overflow="fold")
    for name in ("then ms", "now ms", "now / then", "noise", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(row.name, *_times(row), Text(_verdict(row, found.max_slowdown)))
    title = Text(f"Compared with {clean(found.path)} (accepted: {found.max_slowdown:g}×)", "bold")
    changed = [f"{name} {format_value(then)} → {format_value(now)}" for name, (then, now) in found.changes.items()]
    lost = [_hanging("  - ", f"{row.name} does not run any more: {clean(row.reason)}") for row in found.rows if row.ratio is None]
    return [title, table, *lost, *([_hanging("  changed since: ", ", ".join(changed))] if changed else [])]


def _times(row: RowRatio) -> list[str]:
    times = [f"{time:.3f}" if time is not None else "–" for time in (row.then_ms, row.now_ms)]
    return [*times, "–" if row.ratio is None else f"{row.ratio:.3f}", f"±{row.noise * 100:.1f} %"]


def _verdict(row: RowRatio, accepted: float) -> str:
    if row.ratio is None:
        return "GONE"
    within = abs(row.ratio - 1) <= row.noise
    if row.ratio > accepted:
        return "SLOWER, but within the noise: measure more --rounds" if within else "SLOWER"
    return "the same, within the noise" if within else "faster" if row.ratio < 1 else "slower, but accepted"


def _hanging(label: str, text: str) -> Table:
    """A label and a text whose further lines align with its first."""
    grid = Table.grid()
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(label), Text(text))
    return grid
