"""Attention scores that are not computed while only understood operations work on them.

Inside the forward of a converted module the product of queries and keys gives a :class:`LazyScores`.  Scaling, masks, softmax,
casts and dropout give further ones; when the probabilities meet the values, te.DotProductAttention takes the call.  Any other
operation, and any other reader, gets the numbers of the original operations, carried out one after the other as they were written.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from te_convert.facts.scores import PRODUCTS, Scores, begin, plain_name, product_operands, step
from te_convert.rewrite.lazy import _EXPOSING, _METADATA, _TOP_HOOKS, Mode, _in_mode, _itself, _map, can_defer, current_mode, saving
from te_convert.rewrite.score_masks import note_source

_HERE = object()
"""Stands for the scores among the arguments of an operation on them."""
_IN_PLACE = frozenset({"__setitem__"})
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "logical_not", "bitwise_not", "bool"}) | frozenset(
    {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__invert__"}
)
_SHAPE_ONLY = frozenset({"expand_as", "type_as"})
_ALIASING = frozenset(
    {"view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze", "contiguous", "to", "type", "type_as", "dropout"}
) | (frozenset({"float", "half", "bfloat16"}))
"""Operations that may return their input, or a view of it."""


class Taker(Protocol):
    """What a lazy tensor asks of the converted site that it belongs to."""

    def wants(self, scores: Scores) -> bool:
        """Whether a product may be one of the site's."""

    def finish(self, last: Pending, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The attention's output for probabilities and the call of the product with the values; None to compute as written."""

    def fell_back(self) -> None:
        """The scores were computed after all."""

    def must_be_exact(self) -> bool:
        """Whether an active dropout has to be drawn by the original operation."""


class Pending:
    """One operation that was not carried out: what it was called with, and what the scores are after it.

    Attributes:
        taker: the site.
        scores: what is known of them.
        parent: the operation before; None for the product.
        derived: another operation was called on the result.
        aliases: the result may be, or show, the memory of what it was called on.
    """

    __slots__ = ("__weakref__", "_mode", "_saving", "_value", "_value_version", "_versions", "aliases", "args", "derived", "func",
                 "kwargs", "parent", "scores", "taker", "told")  # fmt: skip

    def __init__(
        self,
        taker: Taker,
        scores: Scores,
        parent: Pending | None,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.taker, self.scores, self.parent = taker, scores, parent
        self.func, self.args, self.kwargs = func, args, kwargs
        self.derived, self.told = False, False
        self.aliases = plain_name(getattr(func, "__name__", ""))[0] in _ALIASING
        self._value: Tensor | None = None
        self._value_version = 0
        self._mode, self._saving = current_mode(scores.query.device.type), saving()
        self._versions = self._read_versions()

    @property
    def mode(self) -> Mode:
        """How torch behaved at the operation."""
        return self._mode

    def tensors(self) -> list[Tensor]:
        """The tensors that it was called with."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]

    def _read_versions(self) -> list[int]:
        return [_version(tensor) for tensor in self.tensors()]

    def unchanged(self) -> bool:
        """Whether what it was called with, and what the operations before were called with, has its values still."""
        return self._versions == self._read_versions() and (self.parent is None or self.parent.unchanged())

    def is_computed(self) -> bool:
        """Somebody may hold the values of this operation or of one before it."""
        return self._value is not None or (self.parent is not None and self.parent.is_computed())

    def value(self) -> Tensor:
        """The result of the operations as they were written, in the mode in which they were called."""
        if self._value is None:
            before = None if self.parent is None else self.parent.value()
            if self._versions != self._read_versions() or (
                self.parent is not None and not self.aliases and self.parent.was_changed()
            ):
                raise RuntimeError(
                    "te_convert: queries, keys or a mask were changed in place before somebody asked for the attention weights; "
                    "exclude the attention module"
                )
            hooks = nullcontext() if _TOP_HOOKS is not None and saving() == self._saving else _own_hooks()
            with torch._C.DisableTorchFunctionSubclass(), _in_mode(self._mode, self.scores.query.device.type), hooks:
                self._value = self._apply(before)
            self._value_version = _version(self._value)
        return self._value

    def was_changed(self) -> bool:
        """Whether somebody worked in place on the computed value."""
        return self._value is not None and _version(self._value) != self._value_version

    def replay(self) -> Tensor:
        """The same once more, in the mode of now, without keeping it."""
        return self._apply(None if self.parent is None else self.parent.replay())

    def _apply(self, before: Tensor | None) -> Tensor:
        args, kwargs = _map((self.args, self.kwargs), lambda value: before if value is _HERE else value)
        result: Tensor = self.func(*args, **kwargs)
        return result

    def sources(self) -> list[Tensor]:
        """All tensors that the values depend on."""
        return [*([] if self.parent is None else self.parent.sources()), *self.tensors()]

    def gradients(self, sources: list[Tensor], upstream: Tensor) -> list[Tensor | None]:
        """Gradients of the sources, for readers below ``__torch_function__``."""
        with torch.enable_grad():
            wanted = [tensor for tensor in sources if tensor.requires_grad]
            found = iter(torch.autograd.grad(self.value(), wanted, upstream, retain_graph=True, allow_unused=True))
        return [next(found) if tensor.requires_grad else None for tensor in sources]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _own_hooks() -> Any:
    """A checkpoint around a reader alone must not see these tensors: its replay finds the value computed."""
    return torch.autograd.graph.saved_tensors_hooks(_itself, _itself)


class _Defer(torch.autograd.Function):
    """Gives a lazy tensor a real ``grad_fn``: C++ code (reentrant checkpoint, custom Functions) does not ask it for its value."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, *sources: Tensor) -> Tensor:
        """Make the wrapper; the sources are there so that autograd connects them."""
        ctx.pending, ctx.sources = pending, sources
        return _wrapper(pending.scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        """Gradients through the operations as they were written."""
        return (None, *ctx.pending.gradients(list(ctx.sources), upstream))


def _wrapper(scores: Scores) -> Tensor:
    lazy: Tensor = Tensor._make_wrapper_subclass(LazyScores, scores.shape, dtype=scores.dtype, device=scores.query.device)
    return lazy


class LazyScores(Tensor):
    """Scores or probabilities that nobody has computed; behaves as the tensor that the original operations would have made."""

    @staticmethod
    def defer(pending: Pending) -> Tensor:
        """A lazy tensor for the result of an operation."""
        sources = pending.sources() if torch.is_grad_enabled() else []
        tracked = any(tensor.requires_grad for tensor in sources)
        lazy: Tensor = _Defer.apply(pending, *sources) if tracked else _wrapper(pending.scores)
        lazy.__dict__["pending"] = pending
        return lazy

    @property
    def pending(self) -> Pending:
        """The operation whose result it is."""
        pending: Pending = self.__dict__["pending"]
        return pending

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions about shape and dtype, stay lazy through understood operations, and give anything else the value."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name, in_place = plain_name(getattr(func, "__name__", ""))
        if name in _SHAPE_ONLY and type(args[0]) is not LazyScores:
            return args[0].expand(args[1].shape) if name == "expand_as" else args[0].to(args[1].dtype)
        if name == "type_as":
            func, name, args = Tensor.to, "to", (args[0], args[1].dtype)
        lazy = _subject(args, kwargs)
        if lazy is not None:
            result = _deferred(lazy, func, name, in_place, args, kwargs)
            if result is not None:
                return result
        return func(*_values(args), **_values(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no cls
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Below autograd: the gradient goes through the lazy tensor's own ``grad_fn``."""
        return func(*_detached(args), **_detached(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Tensor:
        """A copy of the value."""
        copied: Tensor = unwrap_scores(self).__deepcopy__(memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the value."""
        return unwrap_scores(self).__reduce_ex__(protocol)


def unwrap_scores(value: Any) -> Any:
    """The value of a lazy tensor; anything else as it is."""
    if type(value) is not LazyScores:
        return value
    pending = value.pending
    plain = pending.value()
    _tell(pending)
    if value.requires_grad and not plain.requires_grad:  # it left a reentrant checkpoint, which gave it a history
        with torch._C.DisableTorchFunctionSubclass():
            return value.clone()
    return plain


def _tell(pending: Pending) -> None:
    """Count the fallback of a product once."""
    root = pending
    while root.parent is not None:
        root = root.parent
    if not root.told:
        root.told = True
        pending.taker.fell_back()


def _values(value: Any) -> Any:
    return _map(value, unwrap_scores)


def _detached(value: Any) -> Any:
    return _map(value, lambda item: item.pending.value().detach() if type(item) is LazyScores else item)


def _subject(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyScores | None:
    """The one lazy tensor among the arguments; None when there are several, or it is deep inside."""
    found = [value for value in (*args, *kwargs.values()) if type(value) is LazyScores]
    return found[0] if len(found) == 1 else None


def _deferred(
    lazy: LazyScores, func: Any, name: str, in_place: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """The result of an operation on lazy scores as another lazy tensor, or None."""
    pending = lazy.pending
    if func in _EXPOSING or pending.is_computed() or not can_defer(pending.scores.query):
        return None
    if pending.mode != current_mode(lazy.device.type) or any(_is_odd(value) for value in (*args, *kwargs.values())):
        return None
    if in_place and (not args or args[0] is not lazy or pending.derived or pending.aliases or name == "dropout"):
        return None
    scores = step(pending.scores, lazy, name, args, kwargs)
    if scores is None or (scores.dropout and not pending.scores.dropout and pending.taker.must_be_exact()):
        return None
    if in_place and scores.dtype != pending.scores.dtype:
        return None
    if name == "softmax" and torch.is_autocast_enabled(lazy.device.type):
        scores = replace(scores, dtype=torch.float32)
    given = _map((args, kwargs), lambda value: _HERE if value is lazy else value)
    following = Pending(pending.taker, scores, pending, func, *given)
    if not in_place:
        pending.derived = True
        return LazyScores.defer(following)
    lazy.__dict__["pending"] = following
    return lazy


def _is_odd(value: Any) -> bool:
    """A tensor of another class, which may do anything with the call."""
    return isinstance(value, Tensor) and type(value) not in (Tensor, torch.nn.Parameter, LazyScores)


class WatchScores(TorchFunctionMode):
    """Runs around the forward of a converted module: its products become lazy scores, or attention."""

    def __init__(self, taker: Taker) -> None:
        super().__init__()
        self._taker = taker
        self._live: list[weakref.ref[Pending]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in PRODUCTS:
            result = self._product(func, name, args, kwargs)
            if result is not None:
                return result
        elif self._live and (_changes(name) or "out" in kwargs) and not _is_alone(args):
            self._settle()
        result = func(*args, **kwargs)
        if name in _COMPARISONS and args and type(args[0]) is Tensor and type(result) is Tensor:
            note_source(result, name, args)
        if type(result) is LazyScores:
            self._live.append(weakref.ref(result.pending))
        return result

    def _settle(self) -> None:
        """Somebody changes a tensor in place: what was not computed is computed from the values of now."""
        for pending in filter(None, (ref() for ref in self._live)):
            pending.value()
            _tell(pending)
        self._live.clear()

    def _product(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pair = product_operands(name, args, kwargs)
        if pair is None:
            return None
        first, second = pair
        if type(first) is LazyScores and type(second) is Tensor and name != "baddbmm":
            pending = first.pending
            if pending.taker is not self._taker or pending.is_computed() or not pending.unchanged():
                return None
            if pending.mode != current_mode(first.device.type):
                return None
            given = _map((args, kwargs), lambda value: _HERE if value is first else value)
            return self._taker.finish(pending, func, *given)
        if not (can_defer(first) and type(second) is Tensor):
            return None
        mode = current_mode(first.device.type)
        scores = begin(name, args, kwargs, mode.autocast)
        if scores is None or not self._taker.wants(scores):
            return None
        lazy = LazyScores.defer(Pending(self._taker, scores, None, func, _flat(args), kwargs))
        self._live.append(weakref.ref(lazy.pending))  # type: ignore[attr-defined]  # it is lazy
        return lazy


def _flat(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """einsum's operands one by one, whatever they came in."""
    return (args[0], *args[1]) if len(args) == 2 and isinstance(args[1], (list, tuple)) else args


def _is_alone(args: tuple[Any, ...]) -> bool:
    """Scores that are changed in place and that nobody else has."""
    return bool(args) and type(args[0]) is LazyScores and not (args[0].pending.derived or args[0].pending.aliases)


def _changes(name: str) -> bool:
    """Whether a function of this name works in place."""
    return name in _IN_PLACE or plain_name(name)[1]
