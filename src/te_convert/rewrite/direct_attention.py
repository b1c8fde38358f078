"""Modules that call torch's scaled_dot_product_attention: their forward runs with a stand-in among its globals.

    forward's globals:   F, nn, torch  ->  the same, but for F.scaled_dot_product_attention

Where a helper function calls it for them (diffusers' attention processors), a TorchFunctionMode around the forward catches the
call.  The class is swapped for a subclass, so that the module keeps its identity, and code that runs in no such forward is not
touched.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from te_convert.facts.attention import DIRECT, calls_itself, with_heads
from te_convert.rewrite.attention_call import AttentionInput
from te_convert.rewrite.lazy import can_defer
from te_convert.rewrite.loans import Borrower

RECORD = "_te_convert_attention"
"""Where an attention module keeps its record."""

_SDPA = F.scaled_dot_product_attention
_RUNNING = threading.local()
_FORWARDS: dict[Any, Callable[..., Any]] = {}


class _Redirect:
    """A module of torch as seen by a redirected forward."""

    def __init__(self, target: types.ModuleType) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return _seen(getattr(self._target, name))


def _seen(value: Any) -> Any:
    if value is _SDPA:
        return attend
    return _Redirect(value) if value is torch or value is nn or value is F else value


class _Globals(dict[str, Any]):
    """The globals of a forward as they are now, with torch's attention function replaced."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__(__builtins__=names.get("__builtins__", __builtins__))
        self._names = names

    def __missing__(self, name: str) -> Any:
        return _seen(self._names[name])


def _redirected(forward: Any) -> Callable[..., Any]:
    if forward not in _FORWARDS:
        made = types.FunctionType(
            forward.__code__, _Globals(forward.__globals__), forward.__name__, forward.__defaults__, forward.__closure__
        )
        made.__kwdefaults__ = forward.__kwdefaults__
        _FORWARDS[forward] = made
    return _FORWARDS[forward]


class _Catch(TorchFunctionMode):
    """Sends every call of torch's attention function to the stand-in."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (attend if func is _SDPA else func)(*args, **(kwargs or {}))


class DirectAttention(Borrower):
    """A module whose call of scaled_dot_product_attention goes to te.DotProductAttention."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward, with the stand-in where it may be used."""
        record: Any = self.__dict__.get(RECORD)
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if record is None or not record.enabled or not can_defer(_plain(first)):
            return self.eager(*args, **kwargs)
        stack = _RUNNING.__dict__.setdefault("stack", [])
        stack.append(self)
        forward = self._te_base.forward
        try:
            if calls_itself(forward):
                return _redirected(forward)(self, *args, **kwargs)
            with _Catch():
                return forward(self, *args, **kwargs)
        finally:
            stack.pop()


class SinkLender(Borrower):
    """An attention module whose sinks live in te.DotProductAttention; its Linears take a deferred norm's output as it comes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward."""
        return self._te_base.forward(self, *args, **kwargs)


def _plain(value: Any) -> Any:
    """A deferred norm's output stands for an ordinary tensor."""
    pending = getattr(value, "pending", None)
    return value if pending is None else pending.x


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """What a redirected forward calls: [b, h, s, d], [b, s, d] or with several dimensions before the heads, as torch's function."""
    module: nn.Module = _RUNNING.stack[-1]
    record: Any = module.__dict__[RECORD]
    scale = options.get("scale")
    queries, keys, values = (tensor.reshape(with_heads(tuple(tensor.shape))) for tensor in (query, key, value))
    keys, values = (_repeated(tensor, queries, record.spec.num_gqa_groups) for tensor in (keys, values))
    mask, options_of_torch = _mask_with_heads(attn_mask, query), {"is_causal": is_causal}
    call = AttentionInput(module, queries, keys, values, mask, scale, dropout_p, options_of_torch, DIRECT, torch_attention)
    output: Tensor | None = record.attend(call) if can_defer(query) else None
    if output is None:
        return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return output.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])


def _mask_with_heads(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask of queries with other leading dimensions than [b, h], as their [b, h, s, d] take it."""
    if mask is None or query.dim() == 4 or mask.dim() < 3:
        return mask
    if query.dim() == 3:
        return mask.unsqueeze(1)
    if all(size == 1 for size in mask.shape[:-3]):
        return mask.reshape(mask.shape[-3:])
    return mask.expand(*query.shape[:-3], *mask.shape[-3:]).flatten(0, -4)


def _repeated(tensor: Tensor, query: Tensor, groups: int) -> Tensor:
    """Keys or values with as many heads as TE's module was built for, where other calls brought them repeated."""
    heads = tensor.shape[1] if tensor.dim() == 4 else 0
    if not 0 < heads < groups or groups % heads or query.dim() != 4 or query.shape[1] % heads:
        return tensor
    return tensor.repeat_interleave(groups // heads, 1)


def torch_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """torch's function with the arguments and the layout of Transformers' attention functions."""
    del module
    grouped = query.shape[1] != key.shape[1]
    output = _SDPA(query, key, value, attention_mask, dropout, is_causal, scale=scaling, enable_gqa=grouped)
    return output.transpose(1, 2), None
