"""Pieces say the same as Transformers' own operations, and invert; what is no rearrangement of runs is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_convert.stream.conversions import CannotStreamError, convert
from te_convert.stream.pieces import invert, whole
from tests.stream.test_pieces import assemble

loading = pytest.importorskip("transformers.core_model_loading")

CASES: dict[str, tuple[list[Any], dict[str, list[tuple[int, ...]]], dict[str, tuple[int, ...]]]] = {
    "stacked experts": ([loading.MergeModulelist(0)], {"a": [(3, 5)] * 4}, {"y": (4, 3, 5)}),
    "stacked and joined": (
        [loading.MergeModulelist(0), loading.Concatenate(1)],
        {"a": [(3, 5)] * 4, "b": [(2, 5)] * 4},
        {"y": (4, 5, 5)},
    ),
    "joined": ([loading.Concatenate(0)], {"a": [(3, 5)], "b": [(2, 5)]}, {"y": (5, 5)}),
    "joined columns": ([loading.Concatenate(1)], {"a": [(3, 5)], "b": [(3, 2)]}, {"y": (3, 7)}),
    "divided": ([loading.Chunk(0)], {"a": [(6, 5)]}, {"x": (2, 5), "y": (2, 5), "z": (2, 5)}),
    "transposed": ([loading.Transpose(0, 1)], {"a": [(3, 5)]}, {"y": (5, 3)}),
    "transposed experts": ([loading.Transpose(1, 2, check_dims=True)], {"a": [(4, 3, 5)]}, {"y": (4, 5, 3)}),
    "transposed only where needed": ([loading.Transpose(1, 2, check_dims=True)], {"a": [(4, 3, 5)]}, {"y": (4, 3, 5)}),
}


class Model:
    """What Transpose asks for the expected shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def get_parameter(self, _: str) -> torch.Tensor:
        return torch.empty(self.shape)


@pytest.mark.parametrize("name", CASES)
def test_pieces_are_what_transformers_computes(name: str) -> None:
    operations, shapes, targets = CASES[name]
    values = {f"{pattern}{i}": torch.randn(shape) for pattern, group in shapes.items() for i, shape in enumerate(group)}
    expected: Any = {pattern: [values[f"{pattern}{i}"] for i in range(len(group))] for pattern, group in shapes.items()}
    for op in operations:
        more = {"model": Model(next(iter(targets.values()))), "full_layer_name": "y", "config": None}
        expected = op.convert(expected, source_patterns=[*shapes], target_patterns=[*targets], **more)
    groups = {
        pattern: [whole(f"{pattern}{i}", torch.float32, shape) for i, shape in enumerate(group)]
        for pattern, group in shapes.items()
    }
    made = convert(operations, groups, targets, [*shapes])
    built = {target: assemble(layout, values) for target, layout in made.items()}
    for target, value in expected.items():
        value = value[0] if isinstance(value, list) else value
        assert made[target].shape == tuple(value.shape) == targets[target]
        assert torch.equal(built[target], value)
    back = invert(made, {key: (torch.float32, tuple(value.shape)) for key, value in values.items()})
    assert all(torch.equal(assemble(back[key], built), value) for key, value in values.items())


@pytest.mark.parametrize(
    ("operations", "shapes", "targets"),
    [
        ([loading.Interleave(0)], {"a": [(6, 5)]}, {"y": (6, 5)}),
        ([loading.Chunk(0, num_shards_attribute="n")], {"a": [(6, 5)]}, {"y": (3, 5)}),
        ([loading.Chunk(0)], {"a": [(7, 5)]}, {"x": (3, 5), "y": (3, 5)}),
        ([loading.Concatenate(0)], {"a": [(3, 5)], "b": [(3, 4)]}, {"y": (6, 5)}),
        ([loading.MergeModulelist(0), loading.Concatenate(1)], {"a": [(3, 5)] * 2, "b": [(3, 5)]}, {"y": (2, 6, 5)}),
        ([loading.Transpose(0, 1)], {"a": [(4, 3, 5)]}, {"y": (3, 4, 5)}),
        ([loading.Concatenate(1)], {"a": [(9000, 2)], "b": [(9000, 2)]}, {"y": (9000, 4)}),
    ],
    ids=["interleaved", "by config", "not even", "widths", "counts", "outer dimensions", "too many runs"],
)
def test_what_is_refused(operations: list[Any], shapes: dict[str, Any], targets: dict[str, tuple[int, ...]]) -> None:
    groups = {p: [whole(f"{p}{i}", torch.float32, shape) for i, shape in enumerate(group)] for p, group in shapes.items()}
    with pytest.raises(CannotStreamError):
        convert(operations, groups, targets, [*shapes])
