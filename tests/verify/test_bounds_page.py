"""docs/verification.md names every bound with its value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from te_convert.verify import culprit, tolerance

PAGE = Path(__file__).parents[2].joinpath("docs", "verification.md").read_text(encoding="utf-8")
BOUNDS: dict[str, Any] = {name: value for name, value in vars(tolerance).items() if name.isupper() and name[0] != "_"}


def spellings(value: float) -> set[str]:
    """1e-04 as 1e-4, 8e-03 as 8e-3, 90.0 as 90."""
    return {f"{value:g}", f"{value:.0e}".replace("e-0", "e-")}


def test_every_bound_is_in_the_table_with_its_value() -> None:
    assert len(BOUNDS) >= 18
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    for name, value in BOUNDS.items():
        (row,) = [line for line in rows if f"`{name}`" in line]
        words = row.replace("|", " ").replace(":", " ").replace(",", " ").split()
        assert spellings(value) & set(words), (name, value, row)


def test_the_search_is_bounded_as_described() -> None:
    assert f"at most {culprit.MAX_RUNS} runs" in PAGE
