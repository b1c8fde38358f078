"""Weight programs are exact in both directions, account for every tensor once, and survive JSON."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_convert.errors import LoadError
from te_convert.weights.ops import (
    Concat,
    Fill,
    Move,
    Rows,
    SwapHalves,
    Take,
    Transpose,
    WeightMap,
    WeightOp,
    weight_map_from_dict,
    weight_map_to_dict,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
names = st.lists(st.text("abcxyz_", min_size=1, max_size=6), min_size=2, max_size=8, unique=True)


@st.composite
def programs(draw: st.DrawFn) -> tuple[WeightMap, dict[str, torch.Tensor]]:
    """A weight map with tensors that fit it."""
    sources, dests = draw(names), draw(names)
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    ops: list[WeightOp] = []
    tensors: dict[str, torch.Tensor] = {}
    for source, dest in zip(sources, dests, strict=False):
        shape = (draw(st.integers(1, 5)), draw(st.integers(1, 5)))
        op: WeightOp = Transpose(source, dest) if draw(st.booleans()) else Move(source, dest)
        ops.append(op)
        tensors[source] = torch.randn(shape, generator=generator).to(dtype)
    if draw(st.booleans()):
        ops.append(Fill("filled constant", draw(st.sampled_from([0.0, 1.0])), 3))
    return WeightMap(tuple(ops)), tensors


@given(programs())
@settings(deadline=None, max_examples=60)
def test_a_program_and_its_inverse_give_the_same_bits(program: tuple[WeightMap, dict[str, torch.Tensor]]) -> None:
    weights, tensors = program
    back = weights.to_original(weights.to_te(tensors))
    assert list(back) == list(weights.sources) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


@given(programs())
@settings(deadline=None, max_examples=60)
def test_a_program_survives_json(program: tuple[WeightMap, dict[str, torch.Tensor]]) -> None:
    weights, _ = program
    assert weight_map_from_dict(json.loads(json.dumps(weight_map_to_dict(weights)))) == weights


def test_move_passes_the_object_and_transpose_swaps_the_dimensions() -> None:
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    out = WeightMap((Move("a", "x"), Transpose("b", "y"), Fill("z", 1.0, 4))).to_te({"a": a, "b": b})
    assert out["x"] is a
    assert torch.equal(out["y"], b.t())
    assert out["y"].is_contiguous()
    assert torch.equal(out["z"], torch.ones(4))


def test_a_constant_takes_the_dtype_of_the_weights() -> None:
    out = WeightMap((Move("a", "a"), Fill("z", 0.0, 2))).to_te({"a": torch.ones(2, dtype=torch.bfloat16)})
    assert out["z"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    "ops",
    [
        (Move("a", "x"), Move("a", "y")),
        (Move("a", "x"), Transpose("b", "x")),
        (Move("a", "x"), Fill("x", 0.0, 1)),
        (Transpose("a", "x"), Move("a", "y")),
    ],
    ids=["source twice", "destination twice", "filled over", "source under two operations"],
)
def test_a_tensor_used_twice_is_refused(ops: tuple[WeightOp, ...]) -> None:
    with pytest.raises(ValueError, match="uses a tensor twice"):
        WeightMap(ops)


@pytest.mark.parametrize(
    ("ops", "keeps"),
    [
        ((Move("weight", "weight"), Fill("bias", 0.0, 1)), True),
        ((Move("scale", "weight"),), False),
        ((Transpose("weight", "weight"),), False),
    ],
)
def test_keeps_layout_means_that_names_and_shapes_stay(ops: tuple[WeightOp, ...], keeps: bool) -> None:
    assert WeightMap(ops).keeps_layout is keeps


def test_a_missing_tensor_is_an_error() -> None:
    with pytest.raises(KeyError, match="b"):
        WeightMap((Move("a", "a"), Move("b", "b"))).to_te({"a": torch.ones(1)})


@pytest.mark.parametrize(
    "entry",
    [{"op": "rotate", "source": "a", "dest": "b"}, {"source": "a"}, {"op": "move", "source": "a"}, {"op": "fill", "dest": "b"}],
)
def test_a_damaged_program_is_a_load_error(entry: dict[str, object]) -> None:
    with pytest.raises(LoadError):
        weight_map_from_dict([entry])


# ---- operations of fusions -------------------------------------------------------------------------------------------
@st.composite
def blocks(draw: st.DrawFn) -> tuple[Concat, list[torch.Tensor]]:
    """A Concat with tensors that fit it: weights in either layout, or biases."""
    rows = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    width, transposed = draw(st.sampled_from([None, 1, 3])), draw(st.booleans())
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    shapes = [(size,) if width is None else (width, size) if transposed else (size, width) for size in rows]
    op = Concat(tuple(f"part{index}" for index in range(len(rows))), "joint", rows, transposed and width is not None)
    return op, [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@given(blocks())
@settings(deadline=None, max_examples=80)
def test_concat_has_an_exact_inverse_whose_parts_share_its_memory(case: tuple[Concat, list[torch.Tensor]]) -> None:
    op, tensors = case
    joint = op.forward(tensors)
    assert joint.is_contiguous()
    assert joint.shape[0] == sum(op.rows)
    assert joint.dtype is tensors[0].dtype
    parts = op.inverse(joint)
    assert len(parts) == len(tensors)
    for part, tensor in zip(parts, tensors, strict=True):
        assert torch.equal(part, tensor)
        assert part.untyped_storage().data_ptr() == joint.untyped_storage().data_ptr()
    for index, part in enumerate(parts):
        part.fill_(index + 1)
    expected = [index + 1 for index, size in enumerate(op.rows) for _ in range(size)]
    assert [row.flatten()[0].item() for row in joint] == expected  # no overlap, nothing left out, in order
    assert torch.equal(op.forward(op.inverse(joint)), joint)


@given(blocks(), st.integers(0, 3))
@settings(deadline=None, max_examples=60)
def test_concat_parts_give_the_joint_gradient_its_blocks(case: tuple[Concat, list[torch.Tensor]], which: int) -> None:
    op, tensors = case
    index = which % len(tensors)
    joint = op.forward(tensors).requires_grad_()
    op.part(joint, index).sum().backward()
    assert joint.grad is not None
    for other, part in enumerate(op.inverse(joint.grad)):
        assert torch.equal(part, torch.full_like(part, float(other == index)))


@given(blocks())
@settings(deadline=None, max_examples=30)
def test_concat_refuses_blocks_of_other_sizes(case: tuple[Concat, list[torch.Tensor]]) -> None:
    op, tensors = case
    wrong = Concat(op.names, op.dest, tuple(size + 1 for size in op.rows), op.transposed)
    with pytest.raises(ValueError, match="rows, planned were"):
        wrong.forward(tensors)


def test_concat_needs_one_size_per_source() -> None:
    with pytest.raises(ValueError, match="2 sources, but sizes of 1 blocks"):
        Concat(("a", "b"), "x", (3,))


@st.composite
def halves(draw: st.DrawFn) -> tuple[SwapHalves, torch.Tensor]:
    """A SwapHalves with a tensor that fits it."""
    size, width, transposed = draw(st.integers(1, 5)), draw(st.sampled_from([None, 1, 2, 3, 4])), draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    shape = (2 * size,) if width is None else (width, 2 * size) if transposed else (2 * size, width)
    op = SwapHalves("packed", "fc1", transposed and width is not None)
    return op, torch.randn(shape, generator=generator).to(draw(st.sampled_from(DTYPES)))


@given(halves())
@settings(deadline=None, max_examples=80)
def test_swap_halves_exchanges_them_and_back(case: tuple[SwapHalves, torch.Tensor]) -> None:
    op, tensor = case
    swapped = op.forward([tensor])
    rows = tensor.t() if op.transposed else tensor
    first, second = rows.chunk(2)
    assert swapped.is_contiguous()
    assert swapped.dtype is tensor.dtype
    assert torch.equal(swapped, torch.cat([second, first]))
    assert torch.equal(op.part(swapped, 0), tensor)
    assert swapped.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


@given(blocks(), halves(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_a_map_of_fused_operations_and_its_inverse_give_the_same_bits(
    joined: tuple[Concat, list[torch.Tensor]], packed: tuple[SwapHalves, torch.Tensor], with_norm: bool
) -> None:
    (concat, parts), (swap, half) = joined, packed
    norm: tuple[WeightOp, ...] = (Move("norm", "layer_norm_weight"), Fill("layer_norm_bias", 0.0, 3)) if with_norm else ()
    weights = WeightMap((*norm, concat, swap))
    tensors = {**({"norm": torch.ones(3)} if with_norm else {}), **dict(zip(concat.names, parts, strict=True)), "packed": half}
    back = weights.to_original(weights.to_te(tensors))
    assert list(back) == list(weights.sources) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor)
        assert back[name].is_contiguous()
    assert not weights.keeps_layout
    assert weight_map_from_dict(json.loads(json.dumps(weight_map_to_dict(weights)))) == weights


# ---- one source in several destinations ------------------------------------------------------------------------------
def stack_of(count: int, source: str = "stack") -> WeightMap:
    return WeightMap(tuple(Take(source, f"part{index}", index, count) for index in range(count)))


def blocks_of(sizes: list[int], source: str = "packed") -> WeightMap:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    ops = [Rows(source, f"block{i}", start, size, sum(sizes)) for i, (start, size) in enumerate(zip(starts, sizes, strict=True))]
    return WeightMap(tuple(ops))


@st.composite
def divided(draw: st.DrawFn) -> tuple[WeightMap, torch.Tensor]:
    """A tensor in entries or in blocks of rows."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    tail = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    stacked = draw(st.booleans())
    count = len(sizes) if stacked else sum(sizes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    tensor = torch.randn((count, *tail), generator=generator).to(draw(st.sampled_from(DTYPES)))
    return (stack_of(count, "source") if stacked else blocks_of(sizes, "source")), tensor


@given(divided())
@settings(deadline=None, max_examples=60)
def test_take_and_rows_are_views_that_join_to_the_same_bits(case: tuple[WeightMap, torch.Tensor]) -> None:
    weights, tensor = case
    parts = weights.to_te({"source": tensor})
    assert all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts.values())
    assert sum(part.numel() for part in parts.values()) == tensor.numel()
    back = weights.to_original(parts)
    assert list(back) == list(weights.sources) == ["source"]
    assert back["source"].dtype is tensor.dtype
    assert torch.equal(back["source"], tensor)
    assert weight_map_from_dict(json.loads(json.dumps(weight_map_to_dict(weights)))) == weights


def test_take_and_rows_name_their_part() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(Take("a", "x", 1, 3).forward([tensor]), tensor[1])
    assert torch.equal(Rows("a", "x", 1, 2, 3).forward([tensor]), tensor[1:])
    assert Take("a", "x", 1, 3).sources == Rows("a", "x", 1, 2, 3).sources == ("a",)
    part = tensor[1]
    assert Take("a", "x", 1, 3).part(part, 0) is Rows("a", "x", 0, 1, 3).part(part, 0) is part


def test_changes_in_a_part_reach_the_source() -> None:
    tensor = torch.zeros(3, 2)
    for part in stack_of(3).to_te({"stack": tensor}).values():
        part.add_(1)
    for part in blocks_of([1, 2]).to_te({"packed": tensor}).values():
        part.add_(1)
    assert torch.equal(tensor, torch.full((3, 2), 2.0))


def test_restore_is_in_the_order_of_the_operations_and_knows_its_sources() -> None:
    weights = WeightMap((*stack_of(2).ops, Move("other", "kept"), *blocks_of([2, 1]).ops))
    assert weights.sources == ("stack", "other", "packed")
    assert [op.dest for op in weights.using("packed")] == ["block0", "block1"]
    held = {"part0": torch.zeros(2), "part1": torch.ones(2), "block0": torch.zeros(2, 1), "block1": torch.ones(1, 1)}
    assert torch.equal(weights.restore("stack", held.__getitem__), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert torch.equal(weights.restore("packed", held.__getitem__), torch.tensor([[0.0], [0.0], [1.0]]))
    assert weights.using("nothing") == ()
    with pytest.raises(KeyError, match="nothing"):
        weights.restore("nothing", held.__getitem__)
    assert not weights.keeps_layout


@pytest.mark.parametrize("op", [Take("a", "x", 0, 3), Rows("a", "x", 0, 1, 3)])
def test_a_source_of_another_size_is_refused(op: Take | Rows) -> None:
    with pytest.raises(ValueError, match=r"a has 4 (entries|rows), planned were 3"):
        op.forward([torch.zeros(4, 2)])


@pytest.mark.parametrize(
    "ops",
    [
        (Take("a", "x", 0, 2), Take("a", "y", 0, 2)),
        (Rows("a", "x", 0, 1, 2), Rows("a", "y", 0, 2, 2)),
        (Take("a", "x", 0, 2), Take("a", "x", 1, 2)),
        (Move("a", "x"), Take("a", "y", 0, 2)),
    ],
    ids=["entry twice", "rows twice", "destination twice", "whole and entry"],
)
def test_a_part_used_twice_is_refused(ops: tuple[WeightOp, ...]) -> None:
    with pytest.raises(ValueError, match="uses a tensor twice"):
        WeightMap(ops)
