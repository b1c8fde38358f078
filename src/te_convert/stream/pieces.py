"""Where the elements of a tensor come from: runs of elements of other tensors, in order.

A weight map says it for the tensors of TE's layout in terms of the original's, a Transformers conversion mapping for the
original's in terms of the checkpoint's.  Both compose and both invert, so one description serves reading, writing and the way
back, and no tensor has to be in memory as a whole unless a weight is transposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from te_convert.errors import InputError
from te_convert.weights.ops import Concat, Move, Rows, SwapHalves, Take, Transpose, WeightOp


@dataclass(frozen=True)
class Piece:
    """A run of elements of a source tensor.

    Attributes:
        start: first element, counted in the source's row-major order.
        count: number of elements.
        columns: 0 for elements in their order; else the run is a matrix [count / columns, columns] that is written transposed.
        roll: with ``columns``, rows to roll by as ``torch.roll`` does: of what is written when it is positive, of the run before
            that when it is negative.  ``-roll`` is the way back.
    """

    source: str
    start: int
    count: int
    columns: int = 0
    roll: int = 0

    def arranged(self, run: torch.Tensor) -> torch.Tensor:
        """The run's elements, 1-D, in the order in which they are written."""
        if not self.columns:
            return run
        matrix = run.view(-1, self.columns)
        matrix = (matrix.roll(self.roll, 0) if self.roll < 0 else matrix).t()
        return (matrix.roll(self.roll, 0) if self.roll > 0 else matrix).reshape(-1)


@dataclass(frozen=True)
class Layout:
    """A tensor as the concatenation of pieces.

    Raises:
        ValueError: the pieces do not add up to the shape.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        found = sum(piece.count for piece in self.pieces)
        if found != math.prod(self.shape):
            raise ValueError(f"pieces of {found} elements for a tensor of shape {list(self.shape)}")

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def whole(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Layout:
    """A tensor that is another one as it stands."""
    return Layout(dtype, shape, (Piece(name, 0, math.prod(shape)),))


def pieces_of(op: WeightOp, names: tuple[str, ...], shape_of: Callable[[str], tuple[int, ...]]) -> tuple[Piece, ...]:
    """A weight operation as pieces of its sources.

    Args:
        op: the operation.
        names: full names of its sources, in order.
        shape_of: shape of a source by full name.
    """
    shapes = [shape_of(name) for name in names]
    sizes = [math.prod(shape) for shape in shapes]
    if isinstance(op, Transpose) or (isinstance(op, Concat) and op.transposed):
        return tuple(Piece(name, 0, size, columns=shape[1]) for name, size, shape in zip(names, sizes, shapes, strict=True))
    if isinstance(op, (Move, Concat)):
        return tuple(Piece(name, 0, size) for name, size in zip(names, sizes, strict=True))
    if isinstance(op, Take):
        size = sizes[0] // op.count
        return (Piece(names[0], op.index * size, size),)
    if isinstance(op, Rows):
        row = sizes[0] // op.total
        return (Piece(names[0], op.start * row, op.count * row),)
    assert isinstance(op, SwapHalves)  # a Fill is made, not read
    if op.transposed:
        return (Piece(names[0], 0, sizes[0], columns=shapes[0][1], roll=shapes[0][1] // 2),)
    row = sizes[0] // shapes[0][0]
    first = (shapes[0][0] - shapes[0][0] // 2) * row
    return (Piece(names[0], first, sizes[0] - first), Piece(names[0], 0, first))


def compose(layout: Layout, inner: Mapping[str, Layout]) -> Layout:
    """The same tensor in terms of what its sources are made of; sources that ``inner`` lacks stay.

    Raises:
        InputError: a transposed piece of something that is itself in several or transposed pieces.
    """
    pieces: list[Piece] = []
    for piece in layout.pieces:
        pieces += [piece] if piece.source not in inner else _cut(piece, inner[piece.source])
    return replace(layout, pieces=tuple(pieces))


def _cut(piece: Piece, source: Layout) -> list[Piece]:
    found: list[Piece] = []
    place = 0
    for part in source.pieces:
        start, end = max(piece.start, place), min(piece.start + piece.count, place + part.count)
        if start < end:
            whole_part = end - start == part.count
            if part.columns and not (whole_part and not piece.columns):
                raise InputError(f"{piece.source}: a part of a transposed weight is not streamed", "convert with --no-stream")
            found.append(replace(part, start=part.start + start - place, count=end - start))
        place += part.count
    if piece.columns:
        if len(found) != 1:
            raise InputError(f"{piece.source}: a weight in pieces is not transposed while streaming", "convert with --no-stream")
        found = [replace(found[0], columns=piece.columns, roll=piece.roll)]
    return found


def invert(layouts: Mapping[str, Layout], sources: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Layout]:
    """The sources as pieces of the tensors that were made of them.

    Args:
        layouts: tensor → its pieces.
        sources: dtype and shape of each source wanted.

    Raises:
        ValueError: an element of a source is used by no tensor, or by two.
    """
    used: dict[str, list[tuple[int, Piece]]] = {name: [] for name in sources}
    for name, layout in layouts.items():
        place = 0
        for piece in layout.pieces:
            if piece.source in used:
                rows = piece.count // piece.columns if piece.columns else 0
                used[piece.source].append((piece.start, Piece(name, place, piece.count, rows, -piece.roll)))
            place += piece.count
    found: dict[str, Layout] = {}
    for source, (dtype, shape) in sources.items():
        place = 0
        for start, piece in (runs := sorted(used[source], key=lambda run: (run[0], run[1].count))):
            if start != place:
                raise ValueError(f"{source}: element {min(start, place)} is used {'twice' if start < place else 'by no tensor'}")
            place += piece.count
        found[source] = Layout(dtype, shape, tuple(piece for _, piece in runs))
    return found
