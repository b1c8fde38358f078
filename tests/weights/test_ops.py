"""Weight programs are exact in both directions, account for every tensor once, and survive JSON."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_convert.errors import LoadError
from te_convert.weights.ops import Fill, Move, Transpose, WeightMap, WeightOp, weight_map_from_dict, weight_map_to_dict

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
