from __future__ import annotations

import gc
import os

import pytest
import torch
from torch import nn

from te_convert.bench.measure import MOST_CALLS, calls_per_sample, extra_bytes, held_bytes, time_ms


def test_short_calls_are_repeated() -> None:
    assert [calls_per_sample(ms) for ms in (100.0, 5.0, 4.9, 1.0, 0.0)] == [1, 1, 2, 5, MOST_CALLS]


def test_time_is_per_call() -> None:
    done: list[int] = []
    assert time_ms(lambda: done.append(1), "cpu", 10) < 50
    assert len(done) == 10
    assert gc.isenabled()


def test_the_peak_of_what_lives_at_a_time() -> None:
    def work() -> None:
        for _ in range(3):
            big = torch.empty(1 << 20, dtype=torch.uint8)
            del big
        torch.empty(1 << 10, dtype=torch.uint8)

    assert extra_bytes(work, "cpu") == 1 << 20
    assert "KINETO_LOG_LEVEL" not in os.environ


def test_tied_weights_are_held_once() -> None:
    linear = nn.Linear(8, 8, bias=False)
    assert held_bytes(nn.Sequential(linear, linear, nn.ReLU())) == 4 * 64


def test_a_failure_is_passed_on_and_collection_is_on_again() -> None:
    def fail() -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        time_ms(fail, "cpu")
    assert gc.isenabled()
