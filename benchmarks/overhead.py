"""Python overhead of a fused group: norm and q, k, v, or norm and MLP, for one token, against the original modules.

    python benchmarks/overhead.py

Twins on this CPU, one thread, width 32, so that almost all of the time is Python.  Medians of interleaved rounds, in µs per group.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import te_convert

WIDTH, ROUNDS, CALLS, GROUPS = 32, 40, 25, 8


class QKV(nn.Module):
    """A norm and three Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.norm(x)
        return self.q(h), self.k(h), self.v(h)


class MLP(nn.Module):
    """Linear, activation, Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class NormMLP(nn.Module):
    """A norm and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm(x))


class Groups(nn.Module):
    """Several groups in one model, so that what a model does once for a call counts for an eighth."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.groups = nn.ModuleList(build() for _ in range(GROUPS))

    def forward(self, x: torch.Tensor) -> list[Any]:
        return [group(x) for group in self.groups]


def timed(call: Callable[[], Any]) -> float:
    """µs per group."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS / GROUPS * 1e6


def main() -> None:
    """Print one line per group and mode."""
    torch.set_num_threads(1)
    print(f"{'group':10} {'mode':9} {'original':>9} {'one by one':>11} {'fused':>7}")
    for name, build in (("qkv", QKV), ("mlp", NormMLP)):
        model, x = Groups(build).eval(), torch.randn(1, WIDTH)
        single = te_convert.convert(model, (x,), fuse=False).model
        fused = te_convert.convert(model, (x,)).model
        for mode in ("no grad", "grad"):
            rounds: dict[int, list[float]] = {0: [], 1: [], 2: []}
            with torch.set_grad_enabled(mode == "grad"):
                for _ in range(ROUNDS):
                    for index, each in enumerate((model, single, fused)):
                        rounds[index].append(timed(lambda each=each, x=x: each(x)))
            found = [statistics.median(values) for values in rounds.values()]
            print(f"{name:10} {mode:9} {found[0]:9.1f} {found[1]:11.1f} {found[2]:7.1f}")


if __name__ == "__main__":
    main()
