"""Mistakes in weights: their values, their order when joined, copies that do not follow, wrong weight maps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.reference.attention import DotProductAttention
from te_convert.replacements.experts import GroupedExperts
from te_convert.rewrite.fused import fused_record
from te_convert.rewrite.loans import LOANS, Loan
from te_convert.weights.ops import Concat, Move, Rows, SwapHalves, Take, WeightMap, WeightOp
from tests.verify.mutant_tools import (
    BETA,
    BIAS,
    GAMMA,
    MATRIX,
    Change,
    Place,
    Slot,
    Way,
    add,
    slots,
    stale,
    tensor,
)


# ---- parameters ------------------------------------------------------------------------------------------------------------
def _of_another(own: Tensor, slot: Slot, place: Place) -> Tensor | None:
    for other in place.others.values():
        for candidate in slots(other, slot.role):
            value = candidate.parameter.detach()
            if value.shape == own.shape and not torch.equal(value, own):
                return value.clone()
    return None


def _changed_row(own: Tensor, slot: Slot, place: Place) -> Tensor:
    own[len(own) // 2] *= 1.01
    return own


def _zeroed_column(own: Tensor, slot: Slot, place: Place) -> Tensor:
    own[:, own.shape[1] // 2] = 0
    return own


def _one_value(own: Tensor, slot: Slot, place: Place) -> Tensor:
    own.view(-1)[own.numel() // 2] += own.abs().mean() / 10
    return own


def _square(own: Tensor, slot: Slot, place: Place) -> Tensor | None:
    return own.t().contiguous() if own.shape[0] == own.shape[1] else None


add("bias dropped", tensor(lambda t, s, p: torch.zeros_like(t), BIAS))
add("bias doubled", tensor(lambda t, s, p: t * 2, BIAS))
add("bias of another site", tensor(_of_another, BIAS))
add("bias in another order", tensor(lambda t, s, p: t.flip(0), BIAS))
add("bias of the last Linear dropped", tensor(lambda t, s, p: torch.zeros_like(t), BIAS, last=True))
add("gamma lost", tensor(lambda t, s, p: torch.ones_like(t), GAMMA))
add("gamma of another norm", tensor(_of_another, GAMMA))
add("norm bias lost", tensor(lambda t, s, p: torch.zeros_like(t), BETA))
add("norm bias doubled", tensor(lambda t, s, p: t * 2, BETA))
add("square weight transposed", tensor(_square, MATRIX))
add("weight of another site", tensor(_of_another, MATRIX))
add("one row zeroed", tensor(lambda t, s, p: _zeroed_column(t.t(), s, p).t(), MATRIX, last=True))
add("one column zeroed", tensor(_zeroed_column, MATRIX))
add("one row x 1.01", tensor(_changed_row, MATRIX))
add("one weight wrong", tensor(_one_value, MATRIX, last=True))
add("one element wrong", tensor(lambda t, s, p: t.flatten().roll(1).view_as(t), MATRIX, last=True))
add("weight rounded to bfloat16", tensor(lambda t, s, p: t.bfloat16().to(t.dtype) * (1 + torch.finfo(t.dtype).eps), MATRIX))
add("weight rounded to float8", tensor(lambda t, s, p: t.to(torch.float8_e4m3fn).to(t.dtype), MATRIX, last=True))
add("weight x 1.001", tensor(lambda t, s, p: t * (1.001 if t.dtype is torch.float32 else 1.02), MATRIX))
add("weight negated", tensor(lambda t, s, p: -t, MATRIX, last=True))
add("rows reversed", tensor(lambda t, s, p: t.flip(0), MATRIX))
add("columns reversed", tensor(lambda t, s, p: t.flip(1), MATRIX, last=True))


# ---- joined weights ----------------------------------------------------------------------------------------------------------
def exchanged(first: int, second: int) -> Change:
    """Two blocks of rows of the same size in one another's place."""

    def change(own: Tensor, slot: Slot, place: Place) -> Tensor | None:
        op = slot.op
        if not isinstance(op, Concat) or len(op.rows) <= max(first, second) or op.rows[first] != op.rows[second]:
            return None
        blocks = list(own.split(op.rows))
        blocks[first], blocks[second] = blocks[second], blocks[first]
        return torch.cat(blocks)

    return change


def _packed(first: int, second: int) -> Change:
    """The same where the original packs [q; k; v] itself."""

    def change(own: Tensor, slot: Slot, place: Place) -> Tensor | None:
        if isinstance(slot.op, Concat) or own.shape[0] != 3 * own.shape[-1] or own.dim() != 2:
            return None
        blocks = list(own.chunk(3))
        blocks[first], blocks[second] = blocks[second], blocks[first]
        return torch.cat(blocks)

    return change


def _head_size(place: Place) -> int:
    for site in place.applied.sites.values():
        for module in site.modules():
            if isinstance(module, DotProductAttention):
                return int(module.head_dims[0])
    return 0


def in_block(index: int, change: Callable[[Tensor, int], Tensor | None]) -> Change:
    """A change in one block of a joined [q; k; v] (from the start: 0, from the end: −1), given the size of a head."""

    def apply(own: Tensor, slot: Slot, place: Place) -> Tensor | None:
        size = _head_size(place)
        if isinstance(slot.op, Concat):
            rows = slot.op.rows if len(slot.op.rows) > 1 else ()
        else:
            rows = (len(own) // 3,) * 3 if len(own) == 3 * own.shape[-1] else ()
        if len(rows) < 3 or not size or any(count % size for count in rows):
            return None
        blocks = list(own.split(rows))
        changed = change(blocks[index], size)
        if changed is None:
            return None
        blocks[index] = changed
        return torch.cat(blocks)

    return apply


def _heads(block: Tensor, size: int) -> Tensor:
    return block.view(-1, size, *block.shape[1:])


def _heads_permuted(block: Tensor, size: int) -> Tensor | None:
    return block.roll(size, 0) if len(block) > size else None


def _rotary_halves(block: Tensor, size: int) -> Tensor:
    return _heads(block, size).roll(size // 2, 1).flatten(0, 1)


def _rotary_interleaved(block: Tensor, size: int) -> Tensor:
    return block.view(-1, 2, size // 2, *block.shape[1:]).transpose(1, 2).flatten(0, 2)


def _interleaved(own: Tensor, slot: Slot, place: Place) -> Tensor | None:
    """[q; k; v] head by head: the order that te.MultiheadAttention has with qkv_weight_interleaved."""
    size = _head_size(place)
    equal = isinstance(slot.op, Concat) and len(slot.op.rows) == 3 and len(set(slot.op.rows)) == 1
    if not size or not equal or len(own) % (3 * size):
        return None
    return own.view(3, -1, size, *own.shape[1:]).transpose(0, 1).flatten(0, 2)


def _half_swapped(own: Tensor, slot: Slot, place: Place) -> Tensor | None:
    """[gate; up] → [up; gate]."""
    module = slot.holder
    gated = str(getattr(module, "activation", "")).endswith("glu") and slot.leaf.startswith("fc1")
    if isinstance(place.site, GroupedExperts):
        gated = place.site.gated and slot.op.dest.startswith("fc1")
    return own.roll(len(own) // 2, 0) if gated else None


add("queries and keys swapped", tensor(exchanged(0, 1), MATRIX), tensor(_packed(0, 1), MATRIX))
add("keys and values swapped", tensor(exchanged(1, 2), MATRIX), tensor(_packed(1, 2), MATRIX))
add("queries and values swapped", tensor(exchanged(0, 2), MATRIX), tensor(_packed(0, 2), MATRIX))
add("biases of keys and values swapped", tensor(exchanged(1, 2), BIAS))
add("heads of the queries permuted", tensor(in_block(0, _heads_permuted), MATRIX))
add("KV groups of the keys permuted", tensor(in_block(1, _heads_permuted), MATRIX))
add("KV groups of the values permuted", tensor(in_block(-1, _heads_permuted), MATRIX))
add("rotary halves of the queries exchanged", tensor(in_block(0, _rotary_halves), MATRIX))
add("rotary halves of the keys interleaved", tensor(in_block(1, _rotary_interleaved), MATRIX))
add("q, k, v interleaved by head", tensor(_interleaved, MATRIX))
add("gate and up swapped", tensor(_half_swapped, MATRIX))
add("two blocks of a joined weight swapped", tensor(exchanged(0, 1), MATRIX))


# ---- weights that do not follow --------------------------------------------------------------------------------------------
add("stale copy of the weights", stale())
add("stale weight, right gradient", stale(MATRIX, straight=True))
add("stale bias, right gradient", stale(BIAS, straight=True))
add("stale norm weight, right gradient", stale(GAMMA, straight=True))
add(
    "stale copy of a transposed weight",
    stale(MATRIX, straight=True, only=lambda slot: "Transpose" in type(slot.op).__name__ or getattr(slot.op, "transposed", False)),
)


class _OldLoan(Loan):
    """A member of a fusion that shows an old copy of its weight."""

    def __init__(self, loan: Loan) -> None:
        self.__dict__.update(loan.__dict__)
        self.copy = loan.read().detach().clone()

    def read(self) -> Tensor:
        return self.copy if self.record.own is None else super().read()


def loans(place: Place) -> Iterator[tuple[dict[str, Any], str, Loan]]:
    """(where it is kept, its name there, loan) of a site's members."""
    record = fused_record(place.site)
    for module in (*(member for _, member in record.members), *place.site.modules()) if record is not None else ():
        held = module.__dict__.get(LOANS, {})
        for name, loan in held.items():
            if loan.record is record:
                yield held, name, loan


def _old_loans(place: Place) -> bool:
    found = list(loans(place))
    for held, name, loan in found:
        held[name] = _OldLoan(loan)
    return bool(found)


add("member shows an old weight", _old_loans)


# ---- weight maps -----------------------------------------------------------------------------------------------------------
def mapped(change: Callable[[tuple[WeightOp, ...]], tuple[WeightOp, ...] | None]) -> Way:
    """Another weight map than the one by which the weights were made."""

    def way(place: Place) -> bool:
        record = place.site.__dict__[SITE_ATTRIBUTE]
        changed = change(record.decision.weights.ops)
        if changed is None:
            return False
        record.decision = replace(record.decision, weights=WeightMap(changed))
        for held, name, loan in list(loans(place)):
            held[name] = Loan(loan.record, loan.source)
        return True

    return way


def _names_exchanged(ops: tuple[WeightOp, ...]) -> tuple[WeightOp, ...] | None:
    for index, op in enumerate(ops):
        if isinstance(op, Concat) and len(op.rows) > 1 and op.rows[-1] == op.rows[-2]:
            wrong = replace(op, names=(*op.names[:-2], op.names[-1], op.names[-2]))
            return (*ops[:index], wrong, *ops[index + 1 :])
    return None


def _entries_exchanged(ops: tuple[WeightOp, ...]) -> tuple[WeightOp, ...] | None:
    stacked = [index for index, op in enumerate(ops) if isinstance(op, Take)]
    if len(stacked) < 2:
        return None
    changed, (a, b) = list(ops), stacked[:2]
    changed[a], changed[b] = replace(ops[a], dest=ops[b].dest), replace(ops[b], dest=ops[a].dest)
    return tuple(changed)


def _rows_exchanged(ops: tuple[WeightOp, ...]) -> tuple[WeightOp, ...] | None:
    """[q; k; v] put together again as [k; v; q]."""
    for (a, one), (b, other) in pairwise((index, op) for index, op in enumerate(ops) if isinstance(op, Rows)):
        if one.source == other.source:
            changed = list(ops)
            changed[a], changed[b] = other, one
            return tuple(changed)
    return None


def _not_swapped_back(ops: tuple[WeightOp, ...]) -> tuple[WeightOp, ...] | None:
    for index, op in enumerate(ops):
        if isinstance(op, SwapHalves) and not op.transposed:
            return (*ops[:index], Move(op.source, op.dest), *ops[index + 1 :])
    return None


add("weight map with exchanged names", mapped(_names_exchanged))
add("weight map with exchanged experts", mapped(_entries_exchanged))
add("weight map with exchanged rows", mapped(_rows_exchanged))
add("weight map without the swap of halves", mapped(_not_swapped_back))
