"""How te.DotProductAttention does what was added to scores or hidden in them: looked at once per mask, not once per layer."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from te_convert.facts.scores import HIDDEN, Scores, Term

_ABSORBING = -1e30
"""A score that had this added is this: rows in which all keys are hidden average them, as TE's do."""

_FACTS: Any = WeakTensorKeyDictionary()
"""Tensor that owns a mask's memory → {part of it and what was done with it: (version, facts)}."""
_SOURCES: Any = WeakTensorKeyDictionary()
"""Result of a comparison → (owner of the compared memory, key)."""


@dataclass(frozen=True)
class MaskShape:
    """What one mask shows.

    Attributes:
        is_mask: it only hides; False for a bias, of which nothing else is known.
        hides: it hides something.
        causal: it hides the keys behind each query's own position, counted from the last ones, and nothing else.
        right: all queries see the same keys, which come first in every sample, and there are some.
        empty: the largest score of a row in which everything is hidden; None without such a row.
    """

    is_mask: bool
    hides: bool = False
    causal: bool = False
    right: bool = False
    empty: float | None = None


@dataclass(frozen=True)
class ScoreMasking:
    """TE's arguments for a call.

    Attributes:
        mask_type: its attn_mask_type.
        mask: bool, True where hidden: [b, 1, 1, skv] for "padding", broadcastable to [b, h, sq, skv] for "arbitrary".
        bias: added to the scaled scores, [b or 1, h or 1, sq, skv]; None without.
    """

    mask_type: str
    mask: Tensor | None = None
    bias: Tensor | None = None


def find_masking(scores: Scores, heads: int) -> ScoreMasking | None:
    """How TE masks as the scores are masked; None where it cannot, or where that cannot be known here."""
    queries, keys = scores.query.shape[-2], scores.key.shape[-2]
    masks: list[tuple[Term, MaskShape]] = []
    biases: list[Term] = []
    for term in scores.terms:
        shape = MaskShape(False) if term.tensor.requires_grad else _shape_of(term, queries, keys)
        if shape is None:
            return None
        if not shape.is_mask:
            biases.append(term)
        elif shape.hides:
            masks.append((term, shape))
    bias = _bias(biases, scores, heads)
    if biases and bias is None:
        return None
    if not masks:
        return ScoreMasking("no_mask", bias=bias)
    if all(shape.causal for _, shape in masks):
        return ScoreMasking("causal" if queries == keys else "causal_bottom_right", bias=bias)
    if len(masks) == 1 and masks[0][1].right:
        return ScoreMasking("padding", _hidden(masks[0][0], heads)[..., :1, :], bias)
    hidden = _any_of(masks, heads)
    return None if hidden is None else ScoreMasking("arbitrary", hidden, bias)


def _any_of(masks: list[tuple[Term, MaskShape]], heads: int) -> Tensor | None:
    """True where one of the masks hides; None where rows without a key are not an average, as they are in TE."""
    hidden = _hidden(masks[0][0], heads)
    for other, _ in masks[1:]:
        hidden = hidden | _hidden(other, heads)
    empty = [shape.empty for _, shape in masks if shape.empty is not None]
    if len(masks) > 1 and bool(hidden.all(-1).any()):
        return None
    return None if any(not math.isfinite(value) or value > _ABSORBING for value in empty) else hidden


def _bias(terms: list[Term], scores: Scores, heads: int) -> Tensor | None:
    """The sum of what is added, [b or 1, h or 1, sq, skv], in the queries' dtype; None where TE has no gradient for it."""
    total: Tensor | None = None
    for term in terms:
        if term.tensor.dtype != scores.query.dtype and not torch.is_autocast_enabled(scores.query.device.type):
            return None
        part = _heads_apart(term.tensor, term, heads)
        part = part if term.factor == 1 else part * term.factor
        total = part if total is None else total + part
    if total is None:
        return None
    total = total.expand(*total.shape[:2], scores.query.shape[-2], scores.key.shape[-2])
    return None if total.requires_grad and tuple(total.shape[:2]) != (1, heads) else total


def _hidden(term: Term, heads: int) -> Tensor:
    """True where a term hides, [b or 1, h or 1, sq or 1, skv or 1]."""
    hidden = term.tensor * term.factor <= HIDDEN if term.fill is None else term.hidden()
    return _heads_apart(hidden, term, heads)


def _heads_apart(tensor: Tensor, term: Term, heads: int) -> Tensor:
    """A term's tensor with the dimensions [b or 1, h or 1, ...], as the queries get them."""
    lead = len(term.lead)
    tensor = tensor.reshape((1,) * (lead + 2 - tensor.dim()) + tuple(tensor.shape))
    if lead == 1:
        sizes = (1, 1) if tensor.shape[0] == 1 else (tensor.shape[0] // heads, heads)
        return tensor.reshape(*sizes, *tensor.shape[1:])
    if lead == 2:
        return tensor
    whole = tensor.expand(*term.lead[:-1], *tensor.shape[-3:])
    return whole.reshape(-1, *tensor.shape[-3:])


def _shape_of(term: Term, queries: int, keys: int) -> MaskShape | None:
    """What a term shows, from the last time when somebody looked; None where nobody can look."""
    tensor = term.tensor
    owner, place = _origin(tensor)
    if owner is None:
        return _look(term, queries, keys)
    key = (place, tuple(tensor.shape), term.fill, term.factor, term.keeps, queries, keys)
    known = _FACTS.get(owner)
    found = None if known is None else known.get(key)
    if found is not None and found[0] == owner._version:
        shape: MaskShape = found[1]
        return shape
    looked = _look(term, queries, keys)
    if looked is not None:
        _FACTS.setdefault(owner, {})[key] = owner._version, looked
    return looked


def _origin(tensor: Tensor) -> tuple[Tensor | None, Hashable]:
    """The memory whose values decide a mask, and how the mask comes from it."""
    made = _SOURCES.get(tensor)
    if made is not None:
        return made[0], made[1]
    owner, place = _place_of(tensor)
    made = None if owner is None else _SOURCES.get(owner)
    return (owner, place) if made is None else (made[0], (made[1], place))


def _place_of(tensor: Tensor) -> tuple[Tensor | None, Hashable]:
    """(tensor that owns the memory, which part of it); None for a tensor that counts no changes."""
    if type(tensor) is not Tensor or tensor.is_inference():
        return None, ()
    base = tensor._base
    owner = tensor if base is None else base
    return owner, (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def note_source(result: Tensor, name: str, args: tuple[Any, ...]) -> None:
    """Remember which memory a mask was made of by comparison with a number, so that the next layer's need not be looked at."""
    if len(args) <= 2 and all(isinstance(value, (int, float)) for value in args[1:]):
        owner, place = _origin(args[0])
        if owner is not None and type(result) is Tensor:
            _SOURCES[result] = owner, (place, name, args[1:])


def _look(term: Term, queries: int, keys: int) -> MaskShape | None:
    """Read the values: one transfer."""
    tensor = term.tensor
    if tensor.is_meta or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    with torch.no_grad():
        facts = [float(value) for value in _facts(term, queries, keys)]
    pure, hides, causal, right, full, value = facts
    return MaskShape(bool(pure), bool(hides), bool(causal), bool(right), value if full else None) if pure else MaskShape(False)


def _facts(term: Term, queries: int, keys: int) -> Iterator[float]:
    tensor = term.tensor.reshape((1,) * (2 - term.tensor.dim()) + tuple(term.tensor.shape)).detach()
    if term.fill is None:
        values = tensor * term.factor
        hidden = values <= HIDDEN
        pure = (hidden | (values == 0)).all()
        rows = hidden.all(-1)
        value = torch.where(rows, values.amax(-1), -math.inf).amax().double()
    else:
        hidden = tensor.logical_not() if term.keeps else tensor
        pure, rows = torch.ones((), dtype=torch.bool, device=tensor.device), hidden.all(-1)
        value = torch.full((), term.fill, dtype=torch.float64, device=tensor.device)
    false = torch.zeros_like(pure)
    causal, right = false, false
    if tuple(hidden.shape[-2:]) == (queries, keys) and 1 < queries <= keys:
        shown = torch.ones(queries, keys, dtype=torch.bool, device=tensor.device).tril(keys - queries)
        causal = (hidden == shown.logical_not()).all()
    if hidden.shape[-1] == keys and hidden.dim() > 2 and hidden.shape[-3] == 1:
        one = hidden[..., :1, :]
        right = (one[..., 1:] >= one[..., :-1]).all() & one[..., 0].logical_not().all() & (hidden == one).all()
    found = torch.stack([item.double() for item in (pure, hidden.any(), causal, right, rows.any(), value)])
    yield from found.tolist()
