"""A measurement against a recorded one: only of the same machine and the same work, with the noise beside each ratio."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from te_convert.bench.model import BENCH_SCHEMA, BenchResult, Comparison, Row, RowRatio
from te_convert.errors import InputError

_SETTING = ("model_class", "work", "inputs", "dtype", "device", "backend")
"""What was done: other work has other times."""
_MACHINE = ("platform", "gpus", "cpu", "cpus", "threads")
"""Where: times of other machines cannot be compared."""
_VERSIONS = ("te_convert", "torch", "torch_cuda", "transformer_engine", "transformers", "python")
"""What one wants to see the effect of: reported, not refused."""
_RECORD_AGAIN = "record one here: te-convert bench ... --json > FILE"


def read_recorded(path: Path) -> Mapping[str, Any]:
    """A recorded measurement.

    Raises:
        InputError: not readable, or not one of this schema.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}", "name the JSON of an earlier te-convert bench"
        ) from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}", _RECORD_AGAIN) from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != BENCH_SCHEMA or not isinstance(data.get("rows"), list) or not isinstance(data.get("environment"), dict):
        raise InputError(f"{path} is no measurement of schema {BENCH_SCHEMA}", _RECORD_AGAIN)
    found: dict[str, Any] = data
    _rows(path, found)  # damage is found before anything is measured
    return found


def refuse_other_setting(path: Path, recorded: Mapping[str, Any], result: BenchResult) -> None:
    """Measurements are comparable when work and machine are the same; asked before anything is measured.

    Raises:
        InputError: naming the first difference.
    """
    for name in _SETTING:
        now = getattr(result, name)
        _same(path, name, recorded.get(name), dict(now) if isinstance(now, Mapping) else now)
    for name in _MACHINE:
        _same(path, name, recorded["environment"].get(name), result.environment.get(name))


def _same(path: Path, name: str, then: Any, now: Any) -> None:
    if then != now:
        raise InputError(f"{path} cannot be compared: its {name} is {then!r}, here it is {now!r}", _RECORD_AGAIN)


def compare_with(path: Path, recorded: Mapping[str, Any], result: BenchResult, max_slowdown: float) -> Comparison:
    """Ratios of all variants that ran then and were asked for now.

    Raises:
        InputError: the recorded rows are damaged.
    """
    then = _rows(path, recorded)
    now = {row.name: row for row in result.rows}
    rows = tuple(_ratio(row, now[row.name]) for row in then if row.rounds_ms and row.name in now)
    versions = {name: (recorded["environment"].get(name), result.environment.get(name)) for name in _VERSIONS}
    return Comparison(str(path), max_slowdown, rows, {name: pair for name, pair in versions.items() if pair[0] != pair[1]})


def _rows(path: Path, recorded: Mapping[str, Any]) -> list[Row]:
    try:
        return [_row(entry) for entry in recorded["rows"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is damaged: {type(error).__name__}: {error}", _RECORD_AGAIN) from None


def _row(entry: Mapping[str, Any]) -> Row:
    rounds = tuple(float(each) for each in entry["rounds_ms"])
    if not all(math.isfinite(each) and each > 0 for each in rounds):
        raise ValueError("a time that is none")
    return Row(str(entry["name"]), rounds_ms=rounds)


def _ratio(then: Row, now: Row) -> RowRatio:
    return RowRatio(then.name, then.median_ms, now.median_ms, math.hypot(then.spread, now.spread), now.reason)
