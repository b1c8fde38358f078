"""Exact, invertible weight programs: where each tensor of the original module goes in TE's layout.

A source or destination is a parameter name inside the module.  ``Move`` keeps the tensor (and so the Parameter object),
``Transpose`` changes the layout, ``Fill`` makes a constant that the original does not have.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from te_convert.errors import LoadError


@dataclass(frozen=True)
class Move:
    """The same tensor under another (or the same) name."""

    op: ClassVar[str] = "move"
    source: str
    dest: str


@dataclass(frozen=True)
class Transpose:
    """A 2-D tensor with its dimensions swapped: [in, out] → [out, in] (Transformers' Conv1D)."""

    op: ClassVar[str] = "transpose"
    source: str
    dest: str


@dataclass(frozen=True)
class Fill:
    """A frozen constant of the given length that TE needs and the original lacks (a norm's missing bias)."""

    op: ClassVar[str] = "fill"
    dest: str
    value: float
    size: int


WeightOp = Move | Transpose | Fill
_OPS: dict[str, type[WeightOp]] = {cls.op: cls for cls in (Move, Transpose, Fill)}


@dataclass(frozen=True)
class WeightMap:
    """An ordered weight program; each source is used once and each destination is set once."""

    ops: tuple[WeightOp, ...]

    def __post_init__(self) -> None:
        dests = [op.dest for op in self.ops]
        sources = [op.source for op in self.ops if not isinstance(op, Fill)]
        if len(set(dests)) != len(dests) or len(set(sources)) != len(sources):
            raise ValueError(f"a weight map uses a tensor twice: {self.ops}")

    @property
    def sources(self) -> tuple[str, ...]:
        """Parameter names of the original module, in order."""
        return tuple(op.source for op in self.ops if not isinstance(op, Fill))

    @property
    def keeps_layout(self) -> bool:
        """True when every original tensor keeps its name and its layout."""
        return all(isinstance(op, Fill) or (isinstance(op, Move) and op.source == op.dest) for op in self.ops)

    def to_te(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Original layout → TE layout; ``Move`` passes the tensor object itself.

        Raises:
            KeyError: a source tensor is missing.
        """
        out: dict[str, torch.Tensor] = {}
        for op in self.ops:
            if isinstance(op, Move):
                out[op.dest] = tensors[op.source]
            elif isinstance(op, Transpose):
                out[op.dest] = tensors[op.source].t().contiguous()
            else:
                like = next(iter(tensors.values()))
                out[op.dest] = torch.full((op.size,), op.value, dtype=like.dtype, device=like.device)
        return out

    def to_original(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """TE layout → original layout, the exact inverse of :meth:`to_te` (filled constants are dropped)."""
        out: dict[str, torch.Tensor] = {}
        for op in self.ops:
            if isinstance(op, Move):
                out[op.source] = tensors[op.dest]
            elif isinstance(op, Transpose):
                out[op.source] = tensors[op.dest].t().contiguous()
        return out


def weight_map_to_dict(weights: WeightMap) -> list[dict[str, Any]]:
    """The program as plain JSON values."""
    return [{"op": op.op, **asdict(op)} for op in weights.ops]


def weight_map_from_dict(data: list[dict[str, Any]]) -> WeightMap:
    """The inverse of :func:`weight_map_to_dict`.

    Raises:
        LoadError: an unknown operation or fields that do not fit.
    """
    ops: list[WeightOp] = []
    for entry in data:
        fields = dict(entry)
        kind = fields.pop("op", None)
        if kind not in _OPS:
            raise LoadError(f"the plan names an unknown weight operation {kind!r}", "use the te_convert version that wrote it")
        try:
            ops.append(_OPS[kind](**fields))
        except TypeError as error:
            raise LoadError(f"a weight operation has wrong fields: {error}", "the plan was edited") from None
    return WeightMap(tuple(ops))
