"""Run a model in a wider precision without a second copy of its weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from te_convert.rewrite.lazy import LazyNorm, unwrap

_CASTS = frozenset({"half", "bfloat16", "float"})
_LOW = (torch.bfloat16, torch.float16)


class Widen(TorchFunctionMode):
    """Every torch call takes and returns its floating tensors in ``target``; narrower dtype arguments are replaced by it.

    A weight is widened for the one call that uses it and freed after it, so a bf16 model gives its float32 result without a float32
    copy.  An embedding table is widened after the look-up.  With :meth:`pack` and :meth:`unpack` as hooks of saved tensors, a
    backward pass widens it again instead of keeping it.
    """

    def __init__(self, target: torch.dtype) -> None:
        super().__init__()
        self.target = target
        self._sources: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
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
            if value.dtype not in self.narrow:
                return value
            wide = value.to(self.target)
            if type(value) is nn.Parameter and not wide.is_meta:
                self._sources[wide.untyped_storage().data_ptr()] = (weakref.ref(wide), value)
            return wide
        if isinstance(value, torch.dtype) and value in self.narrow:
            return self.target
        return value

    def pack(self, saved: torch.Tensor) -> torch.Tensor | _Again:
        """A widened weight, or a view of one, as what it was made of; anything else as it is."""
        if type(saved) is not torch.Tensor or saved.layout is not torch.strided or saved.dtype is not self.target or saved.is_meta:
            return saved
        wide, source = self._sources.get(saved.untyped_storage().data_ptr(), (None, None))
        # While an operation saves its arguments they are alive; an address of one that is not is that of another tensor by now.
        if wide is None or wide() is None or source is None:
            return saved
        return _Again(source, source._version, saved.size(), saved.stride(), int(saved.storage_offset()))

    def unpack(self, packed: torch.Tensor | _Again) -> torch.Tensor:
        """The tensor that was packed.

        Raises:
            RuntimeError: the weight changed in the meantime.
        """
        if isinstance(packed, torch.Tensor):
            return packed
        if packed.source._version != packed.version:
            raise RuntimeError("a weight that backward needs was changed in place")
        return packed.source.detach().to(self.target).as_strided(packed.size, packed.stride, packed.offset)


class _Again(NamedTuple):
    """A view of a widened weight, to be widened again."""

    source: torch.Tensor
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


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
    mode = Widen(target)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in mode.narrow:
                saved.append((module, name, buffer))
    try:
        for module, name, buffer in saved:
            module._buffers[name] = buffer.to(target)
        with saved_tensors_hooks(mode.pack, mode.unpack), mode:
            yield
    finally:
        for module, name, buffer in saved:
            module._buffers[name] = buffer
