"""What attention that is written out has done to its scores so far: one step for each operation that is understood.

    softmax(scale · q @ k.T, with terms added and hidden in their order) · dropout, and then @ v

The same steps read a recorded graph and a running model, so what was proved is what runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

HIDDEN = -1e4
"""Scores at most this low have no weight: exp(-10000) is 0 in float32, and older models hide with this number."""

PRODUCTS = frozenset({"matmul", "__matmul__", "bmm", "baddbmm", "einsum"})
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
_VIEWS = frozenset({"view", "reshape", "contiguous", "unflatten", "flatten", "unsqueeze", "squeeze"})


@dataclass(frozen=True)
class Term:
    """One tensor that meets the scores.

    Attributes:
        tensor: added, or bool, True where scores are replaced by ``fill`` (where they stay, with ``keeps``).
        lead: the leading dimensions of the scores when it met them.
        fill: None for a tensor that is added.
        factor: what an added tensor is multiplied with.
        keeps: a bool tensor is True where scores stay.
    """

    tensor: Tensor
    lead: tuple[int, ...]
    fill: float | None = None
    factor: float = 1.0
    keeps: bool = False

    def hidden(self) -> Tensor:
        """True where a bool tensor hides scores."""
        return self.tensor.logical_not() if self.keeps else self.tensor


@dataclass(frozen=True)
class Scores:
    """Scores, or probabilities, as a function of queries and keys.

    Attributes:
        query: [*lead, sq, d]; ``key`` is [*lead, skv, d].
        shape: shape that the tensor has now, [..., sq, skv].
        dtype: dtype that it has now.
        scale: factor of the product.
        terms: what was added or hidden, in order; factors already with them.
        is_softmax: they have become probabilities.
        dropout: probability of the dropout on the probabilities, 0 without one.
    """

    query: Tensor
    key: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float = 1.0
    terms: tuple[Term, ...] = ()
    is_softmax: bool = False
    dropout: float = 0.0

    @property
    def lead(self) -> tuple[int, ...]:
        """The dimensions before queries and keys."""
        return self.shape[:-2]


def probabilities(scores: Scores) -> Tensor:
    """softmax of the scores, without dropout, in the leading dimensions of the queries."""
    values = scores.scale * (scores.query @ scores.key.transpose(-1, -2))
    lead = values.shape
    for term in scores.terms:
        values = values.reshape(*term.lead, *lead[-2:])
        values = values + term.factor * term.tensor if term.fill is None else values.masked_fill(term.hidden(), term.fill)
    return values.softmax(-1).reshape(lead)


def product_operands(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The two factors of a matrix product, or None for a call of another form; einsum's second one is transposed if needed."""
    if kwargs.get("out") is not None:
        return None
    if name == "einsum":
        return _einsum_operands(args) if not kwargs else None
    given = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | kwargs if name == "baddbmm" else {}
    if given:
        pair = given.get("batch1"), given.get("batch2")
    else:
        values = (*args, *kwargs.values())
        if len(values) != 2:
            return None
        pair = values[0], values[1]
    return pair if all(isinstance(item, Tensor) for item in pair) else None


def _einsum_operands(args: tuple[Any, ...]) -> tuple[Any, Any] | None:
    """``bhqd,bhkd->bhqk`` as q and k.T, ``bhqk,bhkd->bhqd`` as a plain product."""
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if not isinstance(args[0], str) or len(operands) != 2 or not all(isinstance(item, Tensor) for item in operands):
        return None
    inputs, _, output = args[0].replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    if len(left) < 3 or not len(left) == len(right) == len(output) or len(set(left)) != len(left) or "." in inputs:
        return None
    lead, rows, inner = left[:-2], left[-2], left[-1]
    if right[:-2] != lead or len(set(right)) != len(right) or output[:-2] != lead or rows in right:
        return None
    a, b = operands
    if right[-1] == inner and output[-2:] == rows + right[-2]:
        return a, b.transpose(-1, -2)
    return (a, b) if right[-2] == inner and output[-2:] == rows + right[-1] else None


def begin(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None = None) -> Scores | None:
    """The scores that a matrix product of queries and transposed keys gives, or None for a call of another form.

    Args:
        name: name of the function or method.
        args: its arguments.
        kwargs: its keyword arguments.
        dtype: of the result under autocast; None for that of the queries.
    """
    pair = product_operands(name, args, kwargs)
    if pair is None:
        return None
    query, keys = pair
    same = query.dim() == keys.dim() >= 3 and query.shape[:-2] == keys.shape[:-2] and query.shape[-1] == keys.shape[-2]
    if not same or query.dtype not in _FLOATS or query.dtype != keys.dtype or query.device != keys.device:
        return None
    shape = (*query.shape[:-1], keys.shape[-1])
    scores = Scores(query, keys.transpose(-1, -2), tuple(shape), dtype or query.dtype)
    return _with_start(scores, args, kwargs) if name == "baddbmm" else scores


def _with_start(scores: Scores, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    """``beta · start + alpha · q @ k.T``."""
    start = args[0] if args else kwargs.get("input")
    beta, alpha = _number(kwargs.get("beta", 1)), _number(kwargs.get("alpha", 1))
    if alpha is None or beta is None or len(args) > 3 or not isinstance(start, Tensor):
        return None
    scores = replace(scores, scale=alpha)
    added = _add(scores, start) if beta else scores
    return added if added is None or not beta else replace(added, terms=(replace(added.terms[0], factor=beta),))


def step(scores: Scores, lazy: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    """The scores after one more operation on them, or None when it is not understood.

    Args:
        scores: what they are.
        lazy: what stands for them among the arguments.
        name: name of the function or method, without the ``_`` of one that works in place.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    first = bool(args) and args[0] is lazy
    others = (*args[1:], *kwargs.values()) if first else (*args, *kwargs.values())
    if (not first and name not in ("add", "mul", "where", "masked_fill")) or sum(item is lazy for item in others) > (not first):
        return None
    handler = _HANDLERS.get(name)
    return None if handler is None else handler(scores, lazy, name, args, kwargs)


def _multiply(scores: Scores, lazy: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    value = _number(_other(lazy, args)) if len(args) == 2 and not kwargs else None
    if value is None or scores.is_softmax or not math.isfinite(value) or value == 0:
        return None
    factor = 1.0 / value if name == "div" else value
    if scores.terms and factor <= 0:
        return None
    terms = tuple(
        replace(term, factor=term.factor * factor) if term.fill is None else replace(term, fill=term.fill * factor)
        for term in scores.terms
    )
    if any(term.fill is not None and term.fill > HIDDEN for term in terms):
        return None
    return replace(scores, scale=scores.scale * factor, terms=terms)


def _plus(scores: Scores, lazy: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    del name
    value = _other(lazy, args)
    return _add(scores, value) if len(args) == 2 and not kwargs and isinstance(value, Tensor) else None


def _add(scores: Scores, value: Tensor) -> Scores | None:
    if scores.is_softmax or value.dtype not in _FLOATS or not _fits(scores, value):
        return None
    return replace(scores, terms=(*scores.terms, Term(value, scores.lead)), dtype=torch.promote_types(scores.dtype, value.dtype))


def _fill(scores: Scores, lazy: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    del name
    given = dict(zip(("input", "mask", "value"), args, strict=False)) | kwargs
    return _hide(scores, given.get("mask"), given.get("value")) if given.get("input") is lazy and len(given) == 3 else None


def _where(scores: Scores, lazy: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    del name
    if len(args) != 3 or kwargs:
        return None
    if args[0] is lazy:  # lazy.where(condition, other)
        condition, kept, other = args[1], lazy, args[2]
    else:
        condition, kept, other = args
    if not isinstance(condition, Tensor) or condition.dtype is not torch.bool:
        return None
    if kept is lazy:
        return _hide(scores, condition, other, keeps=True)
    return _hide(scores, condition, kept) if other is lazy else None


def _hide(scores: Scores, mask: Any, fill: Any, keeps: bool = False) -> Scores | None:
    value = _number(fill)
    if scores.is_softmax or value is None or not value <= HIDDEN or not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        return None
    term = Term(mask, scores.lead, fill=value, keeps=keeps)
    return replace(scores, terms=(*scores.terms, term)) if _fits(scores, mask) else None


def _softmax(scores: Scores, lazy: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    del lazy, name
    given = dict(zip(("input", "dim", "stacklevel" if len(args) > 3 else "dtype", "dtype"), args, strict=False)) | kwargs
    dtype = given.get("dtype")
    if scores.is_softmax or given.get("dim") not in (-1, len(scores.shape) - 1) or dtype not in (None, *_FLOATS):
        return None
    return replace(scores, is_softmax=True, dtype=dtype or scores.dtype)


def _dropout(scores: Scores, lazy: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    del lazy, name
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    p = float(given.get("p", 0.5)) if given.get("training", True) else 0.0
    if p == 0:
        return scores
    return replace(scores, dropout=p) if scores.is_softmax and not scores.dropout and p < 1 else None


def _cast(scores: Scores, lazy: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    del lazy
    if name in _CASTS:
        return replace(scores, dtype=_CASTS[name]) if len(args) == 1 and not kwargs else None
    targets = [*args[1:], *(value for key, value in kwargs.items() if key not in ("copy", "non_blocking"))]
    dtype = scores.dtype
    if name == "type" and len(targets) != 1:  # without an argument it tells the type's name
        return None
    for target in targets:
        found = target.dtype if isinstance(target, Tensor) else target
        device = target.device if isinstance(target, Tensor) else scores.query.device
        if found not in _FLOATS or device != scores.query.device:
            return None
        dtype = found
    return replace(scores, dtype=dtype)


def _view(scores: Scores, lazy: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    """A view that leaves the last two dimensions alone."""
    del lazy
    if kwargs:
        return None
    try:
        shape = tuple(getattr(torch.empty(scores.shape, device="meta"), name)(*args[1:]).shape)
    except (RuntimeError, TypeError, IndexError):
        return None
    return replace(scores, shape=shape) if len(shape) > 2 and shape[-2:] == scores.shape[-2:] else None


def _other(lazy: Any, args: tuple[Any, ...]) -> Any:
    return next((value for value in args if value is not lazy), None)


def _number(value: Any) -> float | None:
    """A plain number, also one in a tensor on the CPU; reading one from a GPU would wait for it."""
    if isinstance(value, Tensor):
        readable = value.numel() == 1 and value.dim() == 0 and value.device.type == "cpu" and not value.requires_grad
        return float(value) if readable and type(value) is Tensor and value.dtype is not torch.bool else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _fits(scores: Scores, value: Tensor) -> bool:
    """Broadcasting it changes nothing about the scores' shape, and it is on their device."""
    try:
        return torch.broadcast_shapes(value.shape, scores.shape) == scores.shape and value.device == scores.query.device
    except RuntimeError:
        return False


_HANDLERS = {
    "mul": _multiply, "div": _multiply, "add": _plus, "masked_fill": _fill, "where": _where, "softmax": _softmax,
    "dropout": _dropout, **dict.fromkeys(("to", "type", "type_as", *_CASTS), _cast), **dict.fromkeys(_VIEWS, _view),
}  # fmt: skip
_NAMES = {
    "__mul__": "mul", "__rmul__": "mul", "multiply": "mul", "__imul__": "mul_", "__truediv__": "div", "true_divide": "div",
    "divide": "div", "__itruediv__": "div_", "__idiv__": "div_", "__add__": "add", "__radd__": "add", "__iadd__": "add_",
    "truediv": "div", "iadd": "add_", "imul": "mul_", "itruediv": "div_", "true_divide_": "div_", "_softmax": "softmax",
}  # fmt: skip


@lru_cache(maxsize=4096)
def plain_name(name: str) -> tuple[str, bool]:
    """(name without its spelling as operator or method, whether it works in place)."""
    found = _NAMES.get(name, name)
    in_place = found.endswith("_") and not found.endswith("__")
    return (found.removesuffix("_"), True) if in_place else (found, False)
