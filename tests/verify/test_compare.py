"""Figures of two results: what is equal, what cannot be compared, how far apart the rest is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from te_convert.verify.compare import MISMATCH, compare, compare_outputs, error_ratio, worst_of
from te_convert.verify.model import Figures
from te_convert.verify.tolerance import judge_float32, judge_float64, judge_ratio, rounding_floor

NAN, INF = math.nan, math.inf


def test_equal_tensors_are_bit_equal() -> None:
    x = torch.randn(3, 4)
    assert compare(x, x.clone()) == Figures(INF, 0.0, bit_equal=True, numel=12)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)),
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0])),
        (torch.tensor([1.0, INF]), torch.tensor([1.0, -INF])),
        (torch.tensor([1.0, INF]), torch.tensor([1.0, NAN])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, NAN])),
    ],
    ids=["shape", "broadcastable", "wider dtype", "narrower dtype", "nan moved", "inf sign", "inf to nan", "new nan"],
)
def test_what_cannot_be_compared_fails_every_bound(a: torch.Tensor, b: torch.Tensor) -> None:
    for figures in (compare(a, b), compare(b, a)):
        assert figures == MISMATCH
        assert not judge_float32(figures).passed
        assert not judge_float64(figures).passed


def test_non_finite_elements_must_agree_and_the_rest_is_compared() -> None:
    a = torch.tensor([1.0, NAN, INF, -INF, 2.0])
    assert compare(a, a.clone()).bit_equal
    b = torch.tensor([1.0, NAN, INF, -INF, 2.2])
    figures = compare(a, b)
    assert figures.max_rel == pytest.approx(0.1, rel=1e-5)
    assert figures.sqnr_db == pytest.approx(10 * math.log10(5 / 0.04), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_empty_tensors_are_equal(dtype: torch.dtype) -> None:
    assert compare(torch.zeros(0, 3, dtype=dtype), torch.zeros(0, 3, dtype=dtype)).bit_equal
    assert compare(torch.zeros(0, 3, dtype=dtype), torch.zeros(3, 0, dtype=dtype)) == MISMATCH


def test_integers_and_booleans_count() -> None:
    assert compare(torch.tensor([True, False]), torch.tensor([True, False])).bit_equal
    assert not judge_float32(compare(torch.tensor([True, False]), torch.tensor([True, True]))).passed
    assert not judge_float32(compare(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4]))).passed


def test_both_parts_of_a_complex_tensor_count() -> None:
    a = torch.tensor([1 + 1j, 2 - 1j])
    assert compare(a, a.clone()).bit_equal
    assert not judge_float32(compare(a, a.conj())).passed


def test_nested_tensors_compare_part_by_part() -> None:
    parts = [torch.randn(2, 3), torch.randn(1, 3)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    assert compare(nested, torch.nested.as_nested_tensor(parts, layout=torch.jagged)).bit_equal
    moved = torch.nested.as_nested_tensor([parts[0], parts[1] + 1], layout=torch.jagged)
    assert not judge_float32(compare(nested, moved)).passed
    assert compare(nested, torch.cat(parts)) == MISMATCH


def test_a_zero_original_has_no_relative_error() -> None:
    figures = compare(torch.zeros(3), torch.tensor([0.0, 0.0, 1e-9]))
    assert (figures.sqnr_db, figures.max_rel) == (-INF, INF)
    assert not judge_float32(figures).passed


class Calls(TorchDispatchMode):
    """Counts the operations that read a large tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(value, torch.Tensor) and value.numel() > 1 for value in args):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_equal_results_are_read_once_and_finite_ones_are_not_copied_by_a_mask() -> None:
    """A verification compares every result of every site; passes over memory are what that costs."""
    x, noise = torch.randn(100), 1e-6 * torch.randn(100)
    with Calls() as equal:
        compare(x, x.clone())
    assert [name for name in equal.names if "clone" not in name] == ["equal.default"]
    with Calls() as close:
        compare(x, x + noise)
    assert not any("index" in name or "isfinite" in name for name in close.names)


def test_worst_of_takes_the_lowest_sqnr_and_the_largest_error() -> None:
    name, worst = worst_of(
        [("a", Figures(100, 1e-6, False, 2)), ("b", Figures(50, 1e-8, False, 3)), ("c", Figures(INF, 0, True, 4))]
    )
    assert (name, worst) == ("b", Figures(50, 1e-6, bit_equal=False, numel=9))
    assert worst_of([])[1].bit_equal


def test_outputs_of_another_structure_cannot_be_compared() -> None:
    x = torch.ones(1)
    assert compare_outputs([("a", x)], [("b", x)])[1] == MISMATCH
    assert compare_outputs([("a", x), ("b", x)], [("a", x)])[1] == MISMATCH
    assert compare_outputs([("a", x)], [("a", x)]) == ("a", Figures(INF, 0.0, bit_equal=True, numel=1))


def test_error_ratio_is_one_for_equal_errors_and_ten_for_ten_times_the_error() -> None:
    exact = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 0.1
    outputs = [[("", exact + noise * factor)] for factor in (1, -1, 10)]
    ratios = [error_ratio([("", exact)], outputs[0], other, torch.bfloat16) for other in outputs]
    assert [r[0] for r in ratios] == pytest.approx([1, 1, 10], rel=1e-3)
    assert {r[1] for r in ratios} == {5000}


def test_an_exact_original_does_not_forbid_a_rounded_result() -> None:
    exact = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    ratio, numel = error_ratio([("", exact)], [("", exact)], [("", exact.to(torch.bfloat16))], torch.bfloat16)
    assert judge_ratio(ratio, numel).passed
    twice = exact * (1 + 4 * torch.finfo(torch.bfloat16).eps)
    assert not judge_ratio(*error_ratio([("", exact)], [("", exact)], [("", twice)], torch.bfloat16)).passed


def test_error_ratio_scales_each_output_and_skips_what_has_no_error() -> None:
    exact = torch.ones(10)
    loud, quiet = exact * 1e6, exact * 1e-6
    ratio, numel = error_ratio(
        [("a", loud), ("b", quiet), ("ids", torch.arange(3)), ("zero", torch.zeros(4))],
        [("a", loud * 1.1), ("b", quiet * 1.1), ("ids", torch.arange(3)), ("zero", torch.zeros(4))],
        [("a", loud * 1.1), ("b", quiet * 1.2), ("ids", torch.arange(3)), ("zero", torch.zeros(4))],
        torch.bfloat16,
    )
    assert numel == 20
    assert ratio == pytest.approx(math.sqrt((1 + 4) / 2), rel=1e-3)
    assert error_ratio([], [], [], torch.bfloat16) == (1.0, 0)


def test_the_ratio_bound_is_strict_for_many_elements_and_allows_for_noise_with_few() -> None:
    assert judge_ratio(1.25, 10_000).passed
    assert not judge_ratio(1.26, 10_000).passed
    assert judge_ratio(1.4, 500).passed
    assert not judge_ratio(3.0, 500).passed


def test_a_signed_zero_and_rounding_pass_float32_and_a_thousandth_does_not() -> None:
    x = torch.randn(1000)
    assert judge_float32(compare(torch.zeros(2), -torch.zeros(2))).passed
    assert judge_float32(compare(x, x * (1 + 1e-7))).passed
    assert not judge_float32(compare(x, x * 1.001)).passed
    y = x.clone()
    y[x.abs().argmax()] *= 1.0001
    assert not judge_float32(compare(x, y)).passed


def test_the_rounding_floor_is_what_rounding_gives() -> None:
    exact = torch.rand(100_000, dtype=torch.float64) + 1
    for dtype in (torch.bfloat16, torch.float16):
        error = ((exact.to(dtype).double() - exact) / exact).pow(2).mean().sqrt()
        assert 0.5 < float(error) / rounding_floor(dtype) < 1.1
