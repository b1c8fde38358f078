"""Tensor parallelism of the twins: who holds which part of a weight, and the two exchanges between ranks.

A "column" Linear holds some rows of its weight: it takes the whole input and gives its part of the output features.  A "row" Linear
takes such a part and gives a summand of the whole output.  Between the two nothing is exchanged.

Source: ``module/linear.py`` of TE 2.20 (``parallel_mode``): row adds up the outputs, then adds the bias; column adds up the
gradients of its input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_convert.reference.unsupported import require

MODES = (None, "column", "row")


def ranks_of(tp_group: Any, tp_size: int) -> int:
    """Number of ranks that share a module: that of the group, else ``tp_size``."""
    return tp_size if tp_group is None else int(tp_group.size())


def share(features: int, size: int) -> int:
    """One rank's part of some features.

    Raises:
        NotSupportedError: they cannot be divided evenly.
    """
    require(features % size == 0, f"{features} features cannot be divided among {size} tensor-parallel ranks")
    return features // size


def local_sizes(in_features: int, out_features: int, parallel_mode: str | None, size: int) -> tuple[int, int]:
    """(in, out) features of one rank's part of a Linear.

    Raises:
        NotSupportedError: an unknown mode, or sizes that cannot be divided.
    """
    require(parallel_mode in MODES, f"parallel_mode {parallel_mode!r} is none of {', '.join(map(repr, MODES))}")
    if parallel_mode == "column":
        return in_features, share(out_features, size)
    return (share(in_features, size) if parallel_mode == "row" else in_features), out_features


class _Copy(torch.autograd.Function):
    """The tensor itself; backward adds up the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum over all ranks; backward passes the gradient, which all ranks have alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _summed(x: Tensor, group: Any) -> Tensor:
    total = x.contiguous().clone()
    torch.distributed.all_reduce(total, group=group)
    return total


def enter_region(x: Tensor, group: Any) -> Tensor:
    """The input of a column-parallel product."""
    out: Tensor = x if group is None else _Copy.apply(x, group)
    return out


def leave_region(x: Tensor, group: Any) -> Tensor:
    """The output of a row-parallel product, of which each rank has a summand."""
    out: Tensor = x if group is None else _Sum.apply(x, group)
    return out
