"""Plain data of any form (an estimate, a machine's checks) as headings, facts, lists and tables of clean text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from te_convert.report.format import clean, format_count, format_value
from te_convert.report.tables import Table

MAX_LEVELS = 4
NO_TABLE = Table(())


@dataclass(frozen=True)
class Block:
    """One part of what plain data says; empty parts are empty tuples.

    Attributes:
        title: the key under which it was found, ``"a / b"`` for nested ones; "" at the top.
        facts: label and value.
        lines: a list's items.
        table: a list of records, one column for each of their keys.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    lines: tuple[str, ...] = ()
    table: Table = NO_TABLE


def blocks_of(data: Mapping[str, Any] | None) -> tuple[Block, ...]:
    """The parts of a mapping, its own facts first; nothing of it is left out, and None gives no part."""
    return () if not data else tuple(_mapping("", data, MAX_LEVELS))


def _mapping(title: str, data: Mapping[str, Any], levels: int) -> list[Block]:
    flat = {key: value for key, value in data.items() if levels == 0 or not _is_nested(value)}
    found = [Block(title, facts=tuple((words(key), show(value)) for key, value in flat.items()))] if flat else []
    for key, value in data.items():
        if key not in flat:
            found += _nested(f"{title} / {words(key)}" if title else words(key), value, levels - 1)
    return found


def _nested(title: str, value: Any, levels: int) -> list[Block]:
    if isinstance(value, Mapping):
        return _mapping(title, value, levels)
    if all(isinstance(item, Mapping) for item in value):
        return [Block(title, table=_table(value))]
    return [Block(title, lines=tuple(map(show, value)))]


def _is_nested(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple)) and bool(value)


def _table(records: Sequence[Mapping[str, Any]]) -> Table:
    keys = tuple(dict.fromkeys(key for record in records for key in record))
    rows = tuple(tuple(show(record[key]) if record.get(key) not in (None, "") else "–" for key in keys) for record in records)
    numbers = [all(_is_number(record.get(key, 0)) for record in records) for key in keys]
    return Table(tuple(map(words, keys)), rows, right=frozenset(index for index, number in enumerate(numbers) if number))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def words(key: Any) -> str:
    """A key as words: ``latency_us`` → ``latency us``."""
    return clean(key).replace("_", " ")


def show(value: Any) -> str:
    """A value in one line; floats with four digits, counts with separators."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return format_value(value)
    return format_count(value) if isinstance(value, int) else f"{value:.4g}"
