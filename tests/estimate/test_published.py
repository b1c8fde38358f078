"""The published measurements of benchmarks/estimate.py: the right side of 1 on every row, and the medians that the page prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.estimate import NOT_MODELLED, ROWS, ROWS_PROFILING, Row, medians, table

PAGE = (Path(__file__).parents[2] / "docs" / "estimate.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("row", ROWS_PROFILING, ids=lambda row: row.what)
def test_the_sign_of_products(row: Row) -> None:
    assert row.right_sign, f"{row.what}: {row.published:.2f} measured, {row.predicted:.2f} predicted"


@pytest.mark.slow
def test_the_sign_of_every_row_and_the_page() -> None:
    assert [row.what for row in ROWS if not row.right_sign] == []
    assert table(ROWS, markdown=True) in PAGE
    found = medians(ROWS)
    assert found["held out"] < 0.15
    for name, value in found.items():
        assert f"| {name} | {100 * value:.1f} % |" in PAGE


def test_what_is_not_modelled_is_on_the_page() -> None:
    for name, why in NOT_MODELLED.items():
        assert f"- {name}: {why}." in PAGE


def test_a_wrong_sign_is_seen() -> None:
    assert not Row("x", "y", 1.2, lambda: 0.9).right_sign
    assert not Row("x", "y", 0.5, lambda: 1.01).right_sign
    assert Row("x", "y", 1.04, lambda: 0.9).right_sign
