from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from te_convert.bench.compare import compare_with, read_recorded, refuse_other_setting
from te_convert.bench.model import BenchResult, Row
from te_convert.errors import InputError
from tests.bench.bench_samples import result


def compare(tmp_path: Path, now: BenchResult, slowdown: float = 1.1, then: BenchResult | None = None) -> BenchResult:
    path = tmp_path / "old.json"
    path.write_text(json.dumps((then or result()).to_dict()))
    recorded = read_recorded(path)
    refuse_other_setting(path, recorded, now)
    return now.with_comparison(compare_with(path, recorded, now, slowdown))


def timed(factor: float) -> BenchResult:
    rows = [replace(row, rounds_ms=tuple(factor * each for each in row.rounds_ms)) for row in result().rows]
    return result(rows=tuple(rows))


@pytest.mark.parametrize(
    ("factor", "slowdown", "code"), [(1.0, 1.1, 0), (1.09, 1.1, 0), (1.11, 1.1, 3), (1.11, 1.2, 0), (0.5, 1.1, 0), (2.0, 1.1, 3)]
)
def test_exit_code(factor: float, slowdown: float, code: int, tmp_path: Path) -> None:
    found = compare(tmp_path, timed(factor), slowdown)
    assert found.comparison is not None
    assert [row.ratio for row in found.comparison.rows] == pytest.approx([factor, factor])
    assert found.exit_code == code


def test_the_noise_is_that_of_both_sides(tmp_path: Path) -> None:
    found = compare(tmp_path, timed(2.0)).comparison
    assert found is not None
    spread = (12.25 - 10.75) / 11.5  # of 10, 11, 12, 13
    assert found.rows[0].noise == pytest.approx(2**0.5 * spread)


def test_a_slowdown_within_the_noise_is_still_one_and_says_so(tmp_path: Path) -> None:
    found = compare(tmp_path, timed(1.15))
    assert found.exit_code == 3
    assert "SLOWER, but within the noise: measure more --rounds" in str(found)


def test_a_variant_that_is_gone_fails(tmp_path: Path) -> None:
    rows = tuple(Row("converted", reason="OutOfMemoryError: too large") if r.name == "converted" else r for r in result().rows)
    found = compare(tmp_path, result(rows=rows))
    assert found.exit_code == 3
    assert "converted does not run any more: OutOfMemoryError: too large" in str(found)


def test_a_variant_that_was_not_asked_for_is_no_loss(tmp_path: Path) -> None:
    found = compare(tmp_path, result(rows=result().rows[:1]))
    assert found.comparison is not None
    assert [row.name for row in found.comparison.rows] == ["original"]
    assert found.exit_code == 0


def test_other_versions_are_reported(tmp_path: Path) -> None:
    now = result(environment={**result().environment, "torch": "2.15.0"})
    found = compare(tmp_path, now)
    assert found.comparison is not None
    assert found.comparison.changes == {"torch": ("2.14.1", "2.15.0")}
    assert "changed since: torch 2.14.1 → 2.15.0" in str(found)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"work": "inference"}, "work"),
        ({"inputs": {"input_ids": "int64[2, 64]"}}, "inputs"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"device": "cuda"}, "device"),
        ({"backend": "te"}, "backend"),
        ({"model_class": "Other"}, "model_class"),
        ({"environment": {**result().environment, "cpu": "another CPU"}}, "cpu"),
        ({"environment": {**result().environment, "threads": 4}}, "threads"),
    ],
)
def test_another_machine_or_work_is_one_line(changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"cannot be compared: its {word} is ") as caught:
        compare(tmp_path, result(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1, "rows": 3, "environment": {}}', "\x00"])
def test_a_file_that_is_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"is not JSON|is no measurement of schema 1"):
        read_recorded(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_recorded(tmp_path / "none.json")


@pytest.mark.parametrize("rounds", [["x"], [0], [-1.0], ["nan"], None])
def test_damaged_rows(rounds: Any, tmp_path: Path) -> None:
    data = result().to_dict()
    data["rows"][0]["rounds_ms"] = rounds
    path = tmp_path / "old.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match="is damaged"):
        read_recorded(path)
