from __future__ import annotations

import itertools
import math

import pytest

from te_convert.plan.model import CallShape
from te_convert.report.format import (
    clean,
    collapse_names,
    format_db,
    format_error,
    format_figures,
    format_percent,
    format_quantity,
    format_ratio,
    format_shapes,
    format_value,
    plural,
)
from te_convert.verify.model import Figures


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([f"layer.{i}.fc" for i in range(6)], ["layer.{0..5}.fc ×6"]),
        (["a.0.x", "a.1.x", "a.3.x"], ["a.{0..1,3}.x ×3"]),
        (["a.0.x"], ["a.0.x"]),
        (["", "head"], ["(root)", "head"]),
        (["b.1.x", "b.1.y", "b.2.x", "b.2.y"], ["b.{1..2}.x ×2", "b.{1..2}.y ×2"]),
        ([f"a.{i}.b.{j}" for i in (0, 1) for j in (0, 1, 2)], ["a.{0..1}.b.{0..2} ×6"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0"], ["a.0.b.{0..1} ×2", "a.1.b.0"]),
        (["m.007", "m.²", "m.99999999999"], ["m.007", "m.²", "m.99999999999"]),
        (["same", "same"], ["same"]),
        ([], []),
    ],
)
def test_names_that_differ_in_numbers_collapse(names: list[str], expected: list[str]) -> None:
    assert [str(group) for group in collapse_names(names)] == expected


def test_every_group_stands_for_exactly_the_names_given() -> None:
    universe = [f"x.{i}.{j}.y" for i in range(3) for j in range(2)]
    for size in range(1, len(universe) + 1):
        for names in itertools.combinations(universe, size):
            members = [member for group in collapse_names(names) for member in group.members]
            assert sorted(members) == sorted(names)


@pytest.mark.parametrize(
    ("part", "total", "expected"),
    [(0, 0, "–"), (5, 5, "100 %"), (999_999, 1_000_000, "99.9 %"), (1, 100_000, "<0.1 %"), (0, 7, "0.0 %"), (1, 3, "33.3 %")],
)
def test_shares_are_rounded_down(part: int, total: int, expected: str) -> None:
    assert format_percent(part, total) == expected


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        (Figures(math.inf, 0.0, True, 1), "bit-equal"),
        (Figures(math.inf, 0.0, False, 1), "∞"),
        (Figures(-math.inf, 1.0, False, 1), "-∞"),
        (Figures(math.nan, math.nan, False, 1), "nan"),
        (Figures(89.99, 1e-4, False, 1), "89.9"),
    ],
)
def test_decibels(figures: Figures, expected: str) -> None:
    assert format_db(figures) == expected


def test_figures_in_one_phrase() -> None:
    assert format_figures(None) == "no figures"
    assert format_figures(Figures(math.inf, 0.0, True, 1)) == "bit-equal"
    assert format_figures(Figures(50.0, 0.25, False, 1)) == "SQNR 50.0 dB, max rel 2.5e-01"
    assert (format_error(None), format_error(0.0), format_error(1e-7)) == ("–", "0", "1.0e-07")
    assert (format_ratio(None), format_ratio(1.0)) == ("–", "1.000")


def test_quantities_and_plurals() -> None:
    shown = [format_quantity(n) for n in (0, 9_999, 12_345, 22_713_216, 5_637_144_576, 3 * 10**12)]
    assert shown == ["0", "9,999", "12.3 k", "22.71 M", "5.64 G", "3.00 T"]
    assert (plural(0, "site"), plural(1, "site"), plural(1200, "site")) == ("0 sites", "1 site", "1,200 sites")


def test_control_characters_cannot_reach_a_terminal() -> None:
    assert clean("a\x1b[31m\r\nb\tc\u202e\udc80") == "a\\x1b[31m b c\\u202e\\udc80"


def test_environment_values() -> None:
    value = {"a": None, "b": [True, 1], "c": {"d": "x y"}, "e": []}
    assert format_value(value) == "a none, b yes, 1, c d x y, e none"


def test_shapes() -> None:
    shapes = (CallShape((2, 3), (2, 5), "float32"), CallShape((), (), "int64"))
    assert format_shapes(shapes) == "2×3 → 2×5 float32; scalar → scalar int64"
