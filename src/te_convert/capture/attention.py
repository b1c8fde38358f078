"""Which modules of a Transformers model hand their queries, keys and values to an attention function, and how they call it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx, nn

from te_convert.capture.values import find_tensors

LEADING = ("module", "query", "key", "value", "attention_mask")
"""Names of the first arguments of every attention function; the order of the others differs from function to function."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function that a module got from Transformers' AttentionInterface.

    Attributes:
        fqn: the module that called it.
        implementation: the name under which it asked for the function.
        function: what it got.
        query: shape [b, h, s, d] of the queries; ``key`` and ``value`` likewise.
        scaling: factor of the scores, None when it was left to the function.
        dropout: probability that was passed.
        training: the module's mode.
        tensors: names of further arguments that hold tensors.
        options: further arguments that are plain values, without those that are None.
        positional: arguments given by position.
        bias: shape of a float tensor that is added to the scores, one of ``tensors``; None without one.
        sink: name of the module's own parameter that it passes as ``s_aux``, one of ``tensors``; "" without one.
        nodes: queries, keys, values and the output [b, s, h, d] in the recorded graph.
    """

    fqn: str
    implementation: str
    function: Callable[..., Any] = field(compare=False)
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    scaling: Any
    dropout: Any
    training: bool
    tensors: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    positional: int
    bias: tuple[int, ...] | None = None
    sink: str = ""
    nodes: tuple[fx.Node | None, ...] = field(default=(), compare=False)


class AttentionListener(Protocol):
    """Takes down what the recorded run shows."""

    def attention_call(
        self, module: nn.Module, call: Callable[[str], AttentionCall], inputs: list[torch.Tensor], run: Callable[[], Any]
    ) -> Any:
        """A module calls an attention function: ``run`` does it, ``call`` builds the entry from the module's name."""


def split_options(kwargs: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of keyword arguments that hold tensors, and those that are plain values; None and other objects are dropped."""
    tensors = tuple(name for name, value in kwargs.items() if find_tensors(value))
    plain = {name: value for name, value in kwargs.items() if isinstance(value, bool | int | float | str)}
    return tensors, plain


def _describe(
    implementation: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[str], AttentionCall]:
    named = dict(zip(LEADING, args, strict=False)) | kwargs
    module, query, key, value = (named.pop(name) for name in LEADING[:4])
    named.pop("attention_mask", None)
    scaling, dropout = named.pop("scaling", None), named.pop("dropout", 0.0)
    tensors, options = split_options(named)
    bias = named.get("position_bias")
    added = tuple(bias.shape) if isinstance(bias, torch.Tensor) and bias.is_floating_point() else None
    given = named.get("s_aux")
    sink = "" if given is None else next((name for name, own in module._parameters.items() if own is given), "")

    def call(fqn: str) -> AttentionCall:
        return AttentionCall(
            fqn=fqn,
            implementation=implementation,
            function=function,
            query=tuple(query.shape),
            key=tuple(key.shape),
            value=tuple(value.shape),
            dtype=query.dtype,
            scaling=scaling,
            dropout=dropout,
            training=module.training,
            tensors=tensors,
            options=tuple(sorted(options.items())),
            positional=len(args),
            bias=added,
            sink=sink,
        )

    return call


@contextmanager
def watched_attention(listener: Callable[[], AttentionListener | None]) -> Iterator[None]:
    """Report every call of a function that Transformers' AttentionInterface gives out, where Transformers is loaded.

    Args:
        listener: who is told, asked at each call; None for calls of other threads.
    """
    module = sys.modules.get("transformers.modeling_utils")
    interface: Any = getattr(module, "AttentionInterface", None)
    original = getattr(interface, "get_interface", None)
    if original is None:
        yield
        return

    def get_interface(self: Any, attn_implementation: Any, default: Any) -> Any:
        function = original(self, attn_implementation, default)

        def attention(*args: Any, **kwargs: Any) -> Any:
            told = listener()
            if told is not None and _is_usual(args, kwargs):
                named = dict(zip(LEADING, args, strict=False)) | kwargs
                inputs = [named[name] for name in LEADING[1:4]]
                described = _describe(str(attn_implementation), function, args, kwargs)
                return told.attention_call(args[0], described, inputs, lambda: function(*args, **kwargs))
            return function(*args, **kwargs)

        return attention

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


def _is_usual(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A module by position, and queries, keys and values as tensors."""
    named = dict(zip(LEADING, args, strict=False)) | kwargs
    tensors = all(isinstance(named.get(name), torch.Tensor) for name in ("query", "key", "value"))
    return bool(args) and isinstance(args[0], nn.Module) and tensors
