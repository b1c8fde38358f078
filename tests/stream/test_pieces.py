"""Pieces say the same as the weight operations, compose, and invert."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_convert.errors import InputError
from te_convert.stream.pieces import Layout, Piece, compose, invert, pieces_of, whole
from te_convert.weights.ops import Concat, Move, Rows, SwapHalves, Take, Transpose, WeightOp


def assemble(layout: Layout, sources: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the writer does, in memory."""
    parts = []
    for piece in layout.pieces:
        run = sources[piece.source].reshape(-1)[piece.start : piece.start + piece.count]
        parts.append(piece.arranged(run))
    return torch.cat(parts).view(layout.shape)


OPS: list[tuple[WeightOp, dict[str, tuple[int, ...]]]] = [
    (Move("a", "y"), {"a": (3, 5)}),
    (Transpose("a", "y"), {"a": (3, 5)}),
    (Concat(("a", "b"), "y", (3, 2)), {"a": (3, 5), "b": (2, 5)}),
    (Concat(("a", "b"), "y", (3, 2), transposed=True), {"a": (5, 3), "b": (5, 2)}),
    (Concat(("a", "b"), "y", (3, 2)), {"a": (3,), "b": (2,)}),
    (SwapHalves("a", "y"), {"a": (6, 5)}),
    (SwapHalves("a", "y"), {"a": (7, 2)}),
    (SwapHalves("a", "y", transposed=True), {"a": (3, 8)}),
    (SwapHalves("a", "y", transposed=True), {"a": (4, 7)}),
    (Take("a", "y", 1, 3), {"a": (3, 4, 5)}),
    (Rows("a", "y", 2, 3, 6), {"a": (6, 5)}),
]


@pytest.mark.parametrize(("op", "shapes"), OPS, ids=str)
def test_pieces_are_what_the_operation_computes(op: WeightOp, shapes: dict[str, tuple[int, ...]]) -> None:
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    expected = op.forward([values[name] for name in op.sources])
    layout = Layout(torch.float32, tuple(expected.shape), pieces_of(op, op.sources, shapes.__getitem__))
    assert torch.equal(assemble(layout, values), expected)


@pytest.mark.parametrize(("op", "shapes"), OPS[:9], ids=str)
def test_pieces_invert(op: WeightOp, shapes: dict[str, tuple[int, ...]]) -> None:
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    made = op.forward([values[name] for name in op.sources])
    layout = Layout(torch.float32, tuple(made.shape), pieces_of(op, op.sources, shapes.__getitem__))
    back = invert({"y": layout}, {name: (torch.float32, shape) for name, shape in shapes.items()})
    assert all(torch.equal(assemble(back[name], {"y": made}), value) for name, value in values.items())


@pytest.mark.parametrize(("starts", "message"), [((0, 6), "used by no tensor"), ((0, 3), "used twice")])
def test_what_is_lost_or_used_twice_is_an_error(starts: tuple[int, int], message: str) -> None:
    layouts = {f"y{i}": Layout(torch.float32, (4,), (Piece("a", start, 4),)) for i, start in enumerate(starts)}
    with pytest.raises(ValueError, match=message):
        invert(layouts, {"a": (torch.float32, (10,))})


@st.composite
def partitions(draw: st.DrawFn) -> tuple[dict[str, Layout], dict[str, tuple[int, ...]]]:
    """Tensors made of shuffled runs of others: two levels of them come from this."""
    sizes = {f"s{i}": draw(st.integers(1, 12)) for i in range(draw(st.integers(1, 4)))}
    runs = []
    for name, size in sizes.items():
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        runs += [Piece(name, a, b - a) for a, b in pairwise(cuts)]
    runs = draw(st.permutations(runs))
    layouts: dict[str, Layout] = {}
    while runs:
        count = draw(st.integers(1, len(runs)))
        pieces, runs = tuple(runs[:count]), runs[count:]
        layouts[f"t{len(layouts)}"] = Layout(torch.int64, (sum(p.count for p in pieces),), pieces)
    return layouts, {name: (size,) for name, size in sizes.items()}


@settings(max_examples=100, deadline=None)
@given(partitions())
def test_any_rearrangement_inverts_and_composes(made: tuple[dict[str, Layout], dict[str, tuple[int, ...]]]) -> None:
    layouts, shapes = made
    start, values = 0, {}
    for name, shape in shapes.items():
        values[name] = torch.arange(start, start + math.prod(shape))
        start += math.prod(shape)
    built = {name: assemble(layout, values) for name, layout in layouts.items()}
    back = invert(layouts, {name: (torch.int64, shape) for name, shape in shapes.items()})
    assert all(torch.equal(assemble(back[name], built), value) for name, value in values.items())
    for name, layout in back.items():
        assert torch.equal(assemble(compose(layout, layouts), values), values[name])
    joined = Layout(torch.int64, (start,), tuple(Piece(name, 0, math.prod(layout.shape)) for name, layout in layouts.items()))
    assert torch.equal(assemble(compose(joined, layouts), values), assemble(joined, built))


def test_a_transposed_tensor_inside_another() -> None:
    value = torch.randn(3, 4)
    inner = Layout(torch.float32, (4, 3), (Piece("a", 0, 12, columns=4),))
    assert torch.equal(assemble(compose(whole("t", torch.float32, (4, 3)), {"t": inner}), {"a": value}), value.t())
    with pytest.raises(InputError, match="part of a transposed weight"):
        compose(Layout(torch.float32, (2, 3), (Piece("t", 0, 6),)), {"t": inner})
