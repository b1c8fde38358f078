"""Exact, invertible weight programs: where each tensor of the original goes in TE's layout.

A destination is a parameter name of the TE module.  A source is a parameter name of the module that it replaces, or, where
several modules become one, a name relative to the module that holds them all.  ``Move`` keeps the tensor (and so the Parameter
object), ``Transpose``, ``Concat`` and ``SwapHalves`` change the layout, ``Fill`` makes a constant that the original does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from te_convert.errors import LoadError


class Op:
    """One step of a weight program: some source tensors make one destination tensor, and back."""

    op: ClassVar[str]
    dest: str

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the tensors that it takes, in order."""
        raise NotImplementedError

    def forward(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Source tensors → destination tensor."""
        raise NotImplementedError

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """The ``index``-th source tensor as a view of the destination tensor; exact inverse of :meth:`forward`."""
        raise NotImplementedError

    def inverse(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Destination tensor → all source tensors, as views."""
        return [self.part(tensor, index) for index in range(len(self.sources))]


@dataclass(frozen=True)
class Move(Op):
    """The same tensor under another (or the same) name."""

    op: ClassVar[str] = "move"
    source: str
    dest: str

    @property
    def sources(self) -> tuple[str, ...]:
        """The one source."""
        return (self.source,)

    def forward(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor itself."""
        return tensors[0]

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """The tensor itself."""
        return tensor


@dataclass(frozen=True)
class Transpose(Op):
    """A 2-D tensor with its dimensions swapped: [in, out] → [out, in] (Transformers' Conv1D)."""

    op: ClassVar[str] = "transpose"
    source: str
    dest: str

    @property
    def sources(self) -> tuple[str, ...]:
        """The one source."""
        return (self.source,)

    def forward(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A contiguous copy with the dimensions swapped."""
        return tensors[0].t().contiguous()

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """The same memory with the dimensions swapped."""
        return tensor.t()


@dataclass(frozen=True)
class Concat(Op):
    """Blocks of rows, one below the other: q, k, v → [q; k; v], or gate, up → [gate; up].

    Attributes:
        rows: rows of each block in the destination.
        transposed: each source is stored [in, out] (Transformers' Conv1D) and is transposed first.
    """

    op: ClassVar[str] = "concat"
    names: tuple[str, ...]
    dest: str
    rows: tuple[int, ...]
    transposed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "rows", tuple(self.rows))
        if len(self.names) != len(self.rows):
            raise ValueError(f"{len(self.names)} sources, but sizes of {len(self.rows)} blocks")

    @property
    def sources(self) -> tuple[str, ...]:
        """The blocks from top to bottom."""
        return self.names

    def forward(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One new tensor of all rows.

        Raises:
            ValueError: a block has another number of rows than planned.
        """
        blocks = [tensor.t() for tensor in tensors] if self.transposed else list(tensors)
        found = tuple(block.shape[0] for block in blocks)
        if found != self.rows:
            raise ValueError(f"{self.dest}: blocks of {found} rows, planned were {self.rows}")
        return torch.cat(blocks)

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """The block's rows, a view."""
        block = tensor.narrow(0, sum(self.rows[:index]), self.rows[index])
        return block.t() if self.transposed else block


@dataclass(frozen=True)
class SwapHalves(Op):
    """The two halves of the rows exchanged: a packed [up; gate] → [gate; up], the order of TE's gated activations."""

    op: ClassVar[str] = "swap-halves"
    source: str
    dest: str
    transposed: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        """The one source."""
        return (self.source,)

    def forward(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A new tensor with the halves exchanged."""
        tensor = tensors[0].t() if self.transposed else tensors[0]
        return tensor.roll(tensor.shape[0] // 2, 0).contiguous()

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """A copy with the halves exchanged back (no view can show it)."""
        back = tensor.roll(tensor.shape[0] // 2, 0)
        return back.t() if self.transposed else back


@dataclass(frozen=True)
class Take(Op):
    """One entry of a stacked tensor: expert ``index`` of [experts, ...].  ``count`` of them together are the source."""

    op: ClassVar[str] = "take"
    source: str
    dest: str
    index: int
    count: int

    @property
    def sources(self) -> tuple[str, ...]:
        """The stacked tensor."""
        return (self.source,)

    def forward(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The entry, a view.

        Raises:
            ValueError: the stack has another length than planned.
        """
        if tensors[0].shape[0] != self.count:
            raise ValueError(f"{self.source} has {tensors[0].shape[0]} entries, planned were {self.count}")
        return tensors[0][self.index]

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """The entry itself; :meth:`WeightMap.restore` stacks all of them."""
        return tensor


@dataclass(frozen=True)
class Rows(Op):
    """Some rows of a larger tensor, for instance the queries' of a packed [q; k; v].  All its blocks together are the source."""

    op: ClassVar[str] = "rows"
    source: str
    dest: str
    start: int
    count: int
    total: int

    @property
    def sources(self) -> tuple[str, ...]:
        """The larger tensor."""
        return (self.source,)

    def forward(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows, a view.

        Raises:
            ValueError: the source has another size than planned.
        """
        if tensors[0].shape[0] != self.total:
            raise ValueError(f"{self.source} has {tensors[0].shape[0]} rows, planned were {self.total}")
        return tensors[0].narrow(0, self.start, self.count)

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """The rows themselves; :meth:`WeightMap.restore` joins all blocks."""
        return tensor


def gather(ops: Sequence[Op], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A source tensor from what each operation that uses it has of it."""
    if isinstance(ops[0], Take):
        return torch.stack(list(parts))
    return torch.cat(list(parts)) if isinstance(ops[0], Rows) else parts[0]


@dataclass(frozen=True)
class Fill(Op):
    """A frozen constant of the given length that TE needs and the original lacks (a norm's missing bias)."""

    op: ClassVar[str] = "fill"
    dest: str
    value: float
    size: int

    @property
    def sources(self) -> tuple[str, ...]:
        """Nothing."""
        return ()


WeightOp = Move | Transpose | Concat | SwapHalves | Take | Rows | Fill
_OPS: dict[str, type[WeightOp]] = {cls.op: cls for cls in (Move, Transpose, Concat, SwapHalves, Take, Rows, Fill)}


@dataclass(frozen=True)
class WeightMap:
    """An ordered weight program; each source is used once (a stacked one once per entry) and each destination is set once."""

    ops: tuple[WeightOp, ...]

    def __post_init__(self) -> None:
        dests = [op.dest for op in self.ops]
        sources = [(source, getattr(op, "index", getattr(op, "start", 0))) for op in self.ops for source in op.sources]
        if len(set(dests)) != len(dests) or len(set(sources)) != len(sources):
            raise ValueError(f"a weight map uses a tensor twice: {self.ops}")

    @property
    def sources(self) -> tuple[str, ...]:
        """Parameter names of the original module, in order."""
        return tuple(dict.fromkeys(source for op in self.ops for source in op.sources))

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
            if isinstance(op, Fill):
                like = next(iter(tensors.values()))
                out[op.dest] = torch.full((op.size,), op.value, dtype=like.dtype, device=like.device)
            else:
                out[op.dest] = op.forward([tensors[source] for source in op.sources])
        return out

    def to_original(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """TE layout → original layout, the exact inverse of :meth:`to_te` (filled constants are dropped)."""
        return {source: self.restore(source, tensors.__getitem__).contiguous() for source in self.sources}

    def restore(self, source: str, get: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """One source tensor from the destination tensors that ``get`` gives by name: a view where it can be one.

        Raises:
            KeyError: no operation takes the source.
        """
        ops = self.using(source)
        if not ops:
            raise KeyError(source)
        parts = [op.part(get(op.dest), op.sources.index(source)) for op in ops]
        return gather(ops, parts)

    def using(self, source: str) -> tuple[WeightOp, ...]:
        """The operations that take a source tensor: one, or all entries of a stacked one."""
        return tuple(op for op in self.ops if source in op.sources)


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
