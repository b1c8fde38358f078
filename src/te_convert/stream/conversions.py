"""What Transformers computes when it loads a checkpoint, as pieces: stacked experts, joined and divided and transposed weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from te_convert.stream.pieces import Layout, Piece, compose

Shape = tuple[int, ...]
_MOST_PIECES = 8192
"""More runs than this for one tensor are not streamed: the ledger names each."""


class CannotStreamError(Exception):
    """An operation that is no rearrangement of a few runs of elements."""


def convert(
    operations: Sequence[Any], groups: Mapping[str, Sequence[Layout]], targets: Mapping[str, Shape], order: Sequence[str]
) -> dict[str, Layout]:
    """The model's tensors that a Transformers WeightConverter makes.

    Args:
        operations: the converter's, in order.
        groups: source pattern → its tensors, in the order of their numbers.
        targets: the model's names → shapes, in the order of the converter's target patterns.
        order: the converter's source patterns.

    Raises:
        CannotStreamError: an operation that is not known here, or tensors that do not fit together.
    """
    now = [list(groups[pattern]) for pattern in order if pattern in groups]
    for op in operations:
        kind, dim = type(op).__name__, getattr(op, "dim", 0)
        if getattr(op, "num_shards_attribute", None) is not None or kind not in _OPERATIONS:
            raise CannotStreamError(kind)
        now = _OPERATIONS[kind](now, op if kind == "Transpose" else dim, list(targets.values()))
    made = [layout for group in now for layout in group]
    if len(made) != len(targets):
        raise CannotStreamError(f"{len(made)} tensors for {len(targets)} names")
    return dict(zip(targets, made, strict=True))


def _stack(groups: list[list[Layout]], dim: int, _: list[Shape]) -> list[list[Layout]]:
    if dim != 0 or len({len(group) for group in groups}) != 1:
        raise CannotStreamError("MergeModulelist")
    return [[_cat([_reshaped(each, (1, *each.shape)) for each in group], 0)] for group in groups]


def _join(groups: list[list[Layout]], dim: int, _: list[Shape]) -> list[list[Layout]]:
    return [[_cat([layout for group in groups for layout in group], dim)]]


def _divide(groups: list[list[Layout]], dim: int, targets: list[Shape]) -> list[list[Layout]]:
    """Blocks of the sizes that the model's tensors have, which is what Chunk and Split come to."""
    if len(groups) != 1 or len(groups[0]) != 1:
        raise CannotStreamError("Chunk")
    source = groups[0][0]
    if any(len(shape) <= dim for shape in targets) or sum(shape[dim] for shape in targets) != source.shape[dim]:
        raise CannotStreamError("Chunk")
    found, start = [], 0
    for shape in targets:
        found.append([_narrow(source, dim, start, shape[dim])])
        start += shape[dim]
    return found


def _transpose(groups: list[list[Layout]], op: Any, targets: list[Shape]) -> list[list[Layout]]:
    if len(groups) != 1 or len(groups[0]) != 1:
        raise CannotStreamError("Transpose")
    source = groups[0][0]
    if getattr(op, "check_dims", False) and source.shape == targets[0]:
        return groups
    last = (len(source.shape) - 2, len(source.shape) - 1)
    if tuple(sorted((op.dim0, op.dim1))) != last or len(source.pieces) != 1 or source.pieces[0].columns:
        raise CannotStreamError("Transpose")
    rows, columns = source.shape[-2:]
    name, start, count = source.pieces[0].source, source.pieces[0].start, math.prod(source.shape[:-2])
    pieces = tuple(Piece(name, start + i * rows * columns, rows * columns, columns=columns) for i in range(count))
    return [[Layout(source.dtype, (*source.shape[:-2], columns, rows), _few(pieces))]]


_OPERATIONS: dict[str, Any] = {
    "MergeModulelist": _stack,
    "Concatenate": _join,
    "Chunk": _divide,
    "Split": _divide,
    "Transpose": _transpose,
}


def _reshaped(layout: Layout, shape: Shape) -> Layout:
    return replace(layout, shape=shape)


def _narrow(layout: Layout, dim: int, start: int, count: int) -> Layout:
    inner = math.prod(layout.shape[dim + 1 :])
    step = layout.shape[dim] * inner
    runs = tuple(Piece("", i * step + start * inner, count * inner) for i in range(math.prod(layout.shape[:dim])))
    shape = (*layout.shape[:dim], count, *layout.shape[dim + 1 :])
    return compose(Layout(layout.dtype, shape, _few(runs)), {"": layout})


def _cat(layouts: list[Layout], dim: int) -> Layout:
    first = layouts[0]
    rest = {(each.dtype, each.shape[:dim], each.shape[dim + 1 :]) for each in layouts}
    if len(rest) != 1 or dim >= len(first.shape):
        raise CannotStreamError("tensors of different shapes or dtypes")
    names = {str(number): each for number, each in enumerate(layouts)}
    widths = {name: math.prod(each.shape[dim:]) for name, each in names.items()}
    runs = tuple(Piece(name, i * widths[name], widths[name]) for i in range(math.prod(first.shape[:dim])) for name in names)
    shape = (*first.shape[:dim], sum(each.shape[dim] for each in layouts), *first.shape[dim + 1 :])
    return compose(Layout(first.dtype, shape, _few(runs)), names)


def _few(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    if len(pieces) > _MOST_PIECES:
        raise CannotStreamError(f"{len(pieces)} runs of elements")
    return pieces
