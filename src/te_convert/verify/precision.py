"""Run a model in a wider precision without a second copy of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from te_convert.rewrite.lazy import LazyNorm, unwrap

_CASTS = frozenset({"half", "bfloat16", "float"})
_LOW = (torch.bfloat16, torch.float16)


class Widen(TorchFunctionMode):
    """Every torch call takes and returns its floating tensors in ``target``; narrower dtype arguments are replaced by it.

    A weight is widened for the one call that uses it and freed after it, so a bf16 model gives its float32 result without a float32
    copy.  An embedding table is widened after the look-up.
    """

    def __init__(self, target: torch.dtype) -> None:
        super().__init__()
        self.target = target
        self.narrow = _LOW if target is torch.float32 else (*_LOW, torch.float32)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return func(*args, **(kwargs or {}))
        if name in _CASTS and args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            return args[0].to(self.target)
        if name == "embedding":
            return tree_map(self._widen, func(*args, **(kwargs or {})))
        args, kwargs = tree_map(self._widen, (args, kwargs or {}))
        if name == "rms_norm" and self.target is torch.float64:
            args, kwargs = _with_eps(args, kwargs)
        return tree_map(self._widen, func(*args, **kwargs))

    def _widen(self, value: Any) -> Any:
        if type(value) is LazyNorm:  # inside the handler this mode is off; the norm has to see it
            with self:
                value = unwrap(value)
        if isinstance(value, torch.Tensor):
            return value.to(self.target) if value.dtype in self.narrow else value
        if isinstance(value, torch.dtype) and value in self.narrow:
            return self.target
        return value


def _with_eps(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """``eps=None`` means the epsilon of the dtype; a model that runs in float32 has float32's also where float64 looks at it."""
    names = ("input", "normalized_shape", "weight", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("eps") is None:
        given["eps"] = torch.finfo(torch.float32).eps
    return (), given


@contextmanager
def widened(model: nn.Module, target: torch.dtype) -> Iterator[None]:
    """Run ``model`` in ``target``: buffers are widened for the time being (they may be updated in place), weights per call."""
    saved: list[tuple[nn.Module, str, torch.Tensor]] = []
    narrow = Widen(target).narrow
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in narrow:
                saved.append((module, name, buffer))
    try:
        for module, name, buffer in saved:
            module._buffers[name] = buffer.to(target)
        with Widen(target):
            yield
    finally:
        for module, name, buffer in saved:
            module._buffers[name] = buffer
