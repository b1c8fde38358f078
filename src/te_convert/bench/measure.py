"""The time and the memory of a call: CUDA's events and counters on a GPU, a clock and torch's own allocations on a CPU."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

Work = Callable[[], object]
LEAST_MS = 5.0
"""A sample shorter than this is made of several calls, so that the clock and the scheduler do not decide."""
MOST_CALLS = 50
_LOG_LEVEL = "KINETO_LOG_LEVEL"


def calls_per_sample(took_ms: float) -> int:
    """How many calls make one sample, for a call that took so long."""
    return min(max(1, math.ceil(LEAST_MS / max(took_ms, 1e-6))), MOST_CALLS)


def time_ms(work: Work, device: str, calls: int = 1) -> float:
    """Milliseconds per call; on a GPU between two events on the stream, with nothing else waiting on it."""
    with _without_gc():
        if device == "cuda":
            return _events_ms(work, calls)
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - start) * 1e3 / calls


def _events_ms(work: Work, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / calls


@contextmanager
def _without_gc() -> Iterator[None]:
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def held_bytes(model: nn.Module) -> int:
    """Bytes of the storages of all parameters and buffers, each counted once."""
    storages = (tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers()))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def extra_bytes(work: Work, device: str) -> int:
    """The most that one call has allocated at a time, above what was allocated before it.

    On a GPU from ``torch.cuda.max_memory_allocated``.  On a CPU the allocations and frees that torch's profiler sees are added up:
    unlike the size of the process, the sum does not depend on what the C library keeps.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) - before
    with _quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        work()
    inner = watched.profiler
    assert inner is not None
    changes = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(changes, key=lambda each: each.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Without the lines that the profiler's library writes to stderr, unless the user chose a level."""
    chosen = os.environ.get(_LOG_LEVEL)
    os.environ[_LOG_LEVEL] = chosen or "99"
    try:
        yield
    finally:
        if chosen is None:
            del os.environ[_LOG_LEVEL]
