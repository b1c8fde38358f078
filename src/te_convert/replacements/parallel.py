"""The part of a TE module that one tensor-parallel rank has: which arguments its constructor takes for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from te_convert.replacements.specs import (
    DotProductAttentionSpec,
    LayerNormLinearSpec,
    LayerNormMLPSpec,
    LinearSpec,
    Spec,
)


@dataclass(frozen=True)
class Parallel:
    """How a module is divided.

    Attributes:
        mode: "column" or "row" for one matrix; "pair" for an MLP whose first is a column and whose second is a row; "heads" for an
            attention.
        group: process group of the ranks that share the module.
        size: their number.
        rank: this process among them.
    """

    mode: str
    group: Any
    size: int
    rank: int

    def __deepcopy__(self, memo: Any) -> Parallel:
        """Itself: a copy of the model belongs to the same ranks."""
        return self


def parallel_arguments(spec: Spec, parallel: Parallel) -> dict[str, Any]:
    """TE's constructor arguments for one rank's part; the others are those of the whole module.

    Raises:
        ValueError: a module that te_convert does not divide.
    """
    group = {"tp_group": parallel.group, "tp_size": parallel.size}
    if isinstance(spec, LinearSpec) or (isinstance(spec, LayerNormLinearSpec) and parallel.mode == "column"):
        return {**group, "parallel_mode": parallel.mode}
    if isinstance(spec, LayerNormMLPSpec):
        return {**group, "set_parallel_mode": True}
    if isinstance(spec, DotProductAttentionSpec):
        return group
    raise ValueError(f"{spec.name} is not divided among ranks as {parallel.mode!r}")
