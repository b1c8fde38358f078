"""Numbers and names as reports show them: exact where it matters, never rounded in the model's favour."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from te_convert.plan.model import CallShape
from te_convert.verify.model import Figures

ROOT = "(root)"
_MAX_DIGITS = 9  # a longer run of digits is a name, not a layer's number


@dataclass(frozen=True)
class NameGroup:
    """Several sites that differ only in layer numbers: ``encoder.layer.{0..5}.fc1``, with how many they are."""

    names: str
    members: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many sites the name stands for."""
        return len(self.members)

    def __str__(self) -> str:
        return self.names if self.count == 1 else f"{self.names} ×{self.count}"


def clean(value: object) -> str:
    """One line of printable text: white space collapses, control characters and lone surrogates become escapes."""
    line = " ".join(str(value).split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)


def format_count(number: int) -> str:
    """``1234567`` → ``"1,234,567"``."""
    return f"{number:,}"


def format_quantity(number: int) -> str:
    """``22713216`` → ``"22.71 M"``; exact below 10,000."""
    if number < 10_000:
        return format_count(number)
    for factor, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M")):
        if number >= factor:
            return f"{number / factor:.2f} {unit}"
    return f"{number / 1000:.1f} k"


def format_percent(part: int, total: int) -> str:
    """The share in per cent, rounded down so that only everything is 100 %; an en dash when nothing was counted."""
    if total <= 0:
        return "–"
    if part == total:
        return "100 %"
    tenths = part * 1000 // total
    return f"{tenths // 10}.{tenths % 10} %" if tenths or not part else "<0.1 %"


def format_db(figures: Figures) -> str:
    """SQNR in dB: ``"bit-equal"``, ``"∞"`` (equal as numbers), ``"nan"`` or one decimal, rounded down."""
    return "bit-equal" if figures.bit_equal else format_decibel(figures.sqnr_db)


def format_decibel(value: float) -> str:
    """A number of dB with one decimal, rounded down; ``"∞"`` and ``"nan"`` for what is none."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{math.floor(value * 10) / 10:.1f}"


def format_error(value: float | None) -> str:
    """A relative error: ``"0"``, ``"1.2e-07"``; an en dash when there is none."""
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.1e}"


def format_ratio(value: float | None) -> str:
    """An error ratio with three decimals; an en dash when the comparison has none."""
    return "–" if value is None else f"{value:.3f}"


def format_figures(figures: Figures | None) -> str:
    """SQNR and largest relative error in one phrase."""
    if figures is None:
        return "no figures"
    if figures.bit_equal:
        return "bit-equal"
    return f"SQNR {format_db(figures)} dB, max rel {format_error(figures.max_rel)}"


def format_name(fqn: str) -> str:
    """A site's name; the root module has none and shows as ``(root)``."""
    return clean(fqn) if fqn else ROOT


def format_shapes(shapes: Sequence[CallShape]) -> str:
    """Recorded calls as ``2×128×384 → 2×128×1536 float32``, distinct ones joined by a semicolon."""
    return "; ".join(f"{_dims(shape.input)} → {_dims(shape.output)} {clean(shape.dtype)}" for shape in shapes)


def plural(number: int, noun: str) -> str:
    """``1 site``, ``2 sites``."""
    return f"{format_count(number)} {noun}" if number == 1 else f"{format_count(number)} {noun}s"


def format_value(value: Any) -> str:
    """A value of the environment: lists and dicts flattened to words."""
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{clean(key)} {format_value(item)}" for key, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(format_value(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return clean(value)


def collapse_names(fqns: Iterable[str]) -> tuple[NameGroup, ...]:
    """Collapse names that differ only in numbers, in order of first appearance.

    ``a.0.x, a.1.x, a.3.x`` → ``a.{0..1,3}.x ×3``.  Every group stands for exactly the names it was made of: where the numbers
    of several positions do not form a full product, several groups come out.
    """
    families: dict[tuple[str | None, ...], list[tuple[int, ...]]] = {}
    for fqn in dict.fromkeys(fqns):
        parts = [_number(part) for part in fqn.split(".")]
        family = tuple(None if isinstance(part, int) else part for part in parts)
        families.setdefault(family, []).append(tuple(part for part in parts if isinstance(part, int)))
    return tuple(
        NameGroup(
            format_name(_fill(family, [_ranges(numbers) for numbers in box])),
            tuple(_fill(family, [str(number) for number in row]) for row in product(*map(sorted, box))),
        )
        for family, rows in families.items()
        for box in _boxes(rows)
    )


def _number(part: str) -> int | str:
    """A path component as a number when it is one in plain form (``"07"`` and ``"²"`` are names)."""
    if part.isascii() and part.isdigit() and len(part) <= _MAX_DIGITS and str(int(part)) == part:
        return int(part)
    return part


def _boxes(rows: list[tuple[int, ...]]) -> list[tuple[frozenset[int], ...]]:
    """Cover distinct integer tuples exactly by products of sets, merging one position after the other."""
    boxes = [tuple(frozenset({number}) for number in row) for row in rows]
    for position in reversed(range(len(rows[0]))):
        merged: dict[tuple[frozenset[int], ...], frozenset[int]] = {}
        for box in boxes:
            rest = box[:position] + box[position + 1 :]
            merged[rest] = merged.get(rest, frozenset()) | box[position]
        boxes = [(*rest[:position], numbers, *rest[position:]) for rest, numbers in merged.items()]
    return boxes


def _fill(family: tuple[str | None, ...], numbers: Sequence[str]) -> str:
    rest = iter(numbers)
    return ".".join(next(rest) if part is None else part for part in family)


def _ranges(numbers: frozenset[int]) -> str:
    """``{0,1,2,5}`` → ``"{0..2,5}"``; a single number stands bare."""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return str(ordered[0])
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs) + "}"


def format_number_ranges(numbers: Iterable[int]) -> str:
    """``0, 1, 2, 5`` → ``"0–2, 5"``."""
    return _ranges(frozenset(numbers)).strip("{}").replace("..", "–").replace(",", ", ")


def _dims(shape: tuple[int, ...]) -> str:
    return "×".join(str(size) for size in shape) or "scalar"
