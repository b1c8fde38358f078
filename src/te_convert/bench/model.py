"""What a measurement found, as plain data with a schema version."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from te_convert.errors import InputError
from te_convert.verify.model import json_number

BENCH_SCHEMA = 1
EXIT_MEASURED, EXIT_NOTHING, EXIT_SLOWER = 0, 1, 3
ORIGINAL = "original"


@dataclass(frozen=True)
class Row:
    """One variant of the model.

    Attributes:
        name: "original", "original, torch.compile", "converted" or "converted, RECIPE".
        recipe: the recipe that it ran in, or None.
        rounds_ms: milliseconds per call, one for each round; empty where it did not run.
        items_per_s: tokens (or samples) per second at the median.
        peak_bytes: weights and buffers, and the most that one call has allocated at a time besides.
        sqnr_db: of the outputs in eval mode, against those of the original in float32; None where none were compared.
        max_rel: largest error of these outputs over their largest magnitude.
        tokens_equal: share of the generated tokens that are the original's.
        speedup: median over the rounds of the original's time over this one's.
        reason: why it did not run, or "".
    """

    name: str
    recipe: str | None = None
    rounds_ms: tuple[float, ...] = ()
    items_per_s: float | None = None
    peak_bytes: int | None = None
    sqnr_db: float | None = None
    max_rel: float | None = None
    tokens_equal: float | None = None
    speedup: float | None = None
    reason: str = ""

    @property
    def median_ms(self) -> float | None:
        """Median of the rounds, None without any."""
        return statistics.median(self.rounds_ms) if self.rounds_ms else None

    @property
    def quartiles_ms(self) -> tuple[float, float] | None:
        """First and third quartile of the rounds."""
        if len(self.rounds_ms) < 2:
            return (self.rounds_ms[0], self.rounds_ms[0]) if self.rounds_ms else None
        first, _, third = statistics.quantiles(self.rounds_ms, n=4, method="inclusive")
        return first, third

    @property
    def spread(self) -> float:
        """Interquartile range over the median; 0 where nothing ran."""
        middle, ends = self.median_ms, self.quartiles_ms
        return (ends[1] - ends[0]) / middle if middle and ends else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        ends = self.quartiles_ms
        return {
            **self.__dict__,
            "rounds_ms": list(self.rounds_ms),
            "sqnr_db": json_number(self.sqnr_db),
            "max_rel": json_number(self.max_rel),
            "median_ms": self.median_ms,
            "q1_ms": None if ends is None else ends[0],
            "q3_ms": None if ends is None else ends[1],
        }


@dataclass(frozen=True)
class RowRatio:
    """One variant now and then.

    Attributes:
        then_ms: its median then, None where it had none.
        now_ms: its median now, None where it has none.
        noise: half width of the band in which a ratio says nothing: both relative interquartile ranges, added in squares.
        reason: why it does not run any more, or "".
    """

    name: str
    then_ms: float | None
    now_ms: float | None
    noise: float
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Time now over time then: above 1 is slower."""
        return self.now_ms / self.then_ms if self.now_ms is not None and self.then_ms else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**self.__dict__, "ratio": self.ratio}


@dataclass(frozen=True)
class Comparison:
    """A measurement compared with a recorded one of the same machine.

    Attributes:
        path: the recorded one.
        max_slowdown: the largest ratio that is accepted.
        rows: variants that ran then.
        changes: versions that are others now: name → (then, now).
    """

    path: str
    max_slowdown: float
    rows: tuple[RowRatio, ...]
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def slower(self) -> tuple[RowRatio, ...]:
        """Variants that are slower than accepted, or that do not run any more."""
        return tuple(row for row in self.rows if row.ratio is None or row.ratio > self.max_slowdown)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "path": self.path,
            "max_slowdown": self.max_slowdown,
            "rows": [row.to_dict() for row in self.rows],
            "slower": [row.name for row in self.slower],
            "changes": {name: {"recorded": then, "now": now} for name, (then, now) in self.changes.items()},
        }


@dataclass(frozen=True)
class BenchResult:
    """All variants of one model on one machine.

    Attributes:
        target: what was measured, as it was named.
        model_class: class name of the original.
        work: "training step", "inference" or "generation of N tokens".
        inputs: shapes and dtypes of the inputs, by name.
        items: what is counted per second ("tokens" or "samples"), and how many a call has.
        dtype: of the original.
        device: "cpu" or "cuda".
        backend: "te" or "reference"; ``backend_reason`` says why.
        converted_sites: how many modules of the original run on a replacement.
        rounds: measured rounds; ``warmup`` calls came before.
        environment: machine and versions.
        rows: one per variant.
        comparison: with a recorded measurement, if one was asked for.
        notes: what limits the figures, one sentence each.
    """

    target: str
    model_class: str
    work: str
    inputs: Mapping[str, str]
    items: tuple[str, int]
    dtype: str
    device: str
    backend: str
    backend_reason: str
    converted_sites: int
    rounds: int
    warmup: int
    environment: Mapping[str, Any]
    rows: tuple[Row, ...]
    comparison: Comparison | None = None
    notes: tuple[str, ...] = ()

    @property
    def caveat(self) -> str:
        """What has to be said before any figure; "" where Transformer Engine's kernels were measured on a GPU."""
        if self.device != "cuda":
            return "Measured on a CPU with the reference twins. These times and sizes say nothing about a GPU."
        if self.backend != "te":
            return f"The reference twins were measured, not Transformer Engine's kernels: {self.backend_reason}."
        return ""

    @property
    def exit_code(self) -> int:
        """0 measured, 1 nothing was converted, 3 slower than the recorded measurement."""
        if self.comparison is not None and self.comparison.slower:
            return EXIT_SLOWER
        return EXIT_MEASURED if self.converted_sites else EXIT_NOTHING

    def row(self, name: str) -> Row:
        """The row of a variant.

        Raises:
            KeyError: there is none of that name.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def with_comparison(self, comparison: Comparison) -> BenchResult:
        """A copy that has it."""
        return replace(self, comparison=comparison)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values with ``"schema"``."""
        return {
            "schema": BENCH_SCHEMA,
            **self.__dict__,
            "caveat": self.caveat,
            "exit_code": self.exit_code,
            "inputs": dict(self.inputs),
            "items": {"kind": self.items[0], "per_call": self.items[1]},
            "environment": dict(self.environment),
            "rows": [row.to_dict() for row in self.rows],
            "comparison": None if self.comparison is None else self.comparison.to_dict(),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from te_convert.bench.text import render_bench

        return render_bench(self)


def check_bounds(rounds: int, warmup: int, generate: int, max_slowdown: float) -> None:
    """Numbers that a measurement can work with.

    Raises:
        InputError: naming the one that it cannot.
    """
    for name, value, least in (("rounds", rounds, 2), ("warmup", warmup, 1), ("generate", generate, 0)):
        if value < least:
            raise InputError(f"{name} is {value}", f"pass {least} or more")
    if not max_slowdown > 0:
        raise InputError(f"max_slowdown is {max_slowdown:g}", "pass a ratio above 0, for instance 1.1")
