"""Linears that share an input which is no norm's: the first one called computes for all, the others take their columns."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from te_convert.rewrite.lazy import Mode, can_defer, current_mode


@dataclass
class _Waiting:
    """Columns that were not taken yet, and the input, mode and circumstances for which they hold."""

    source: weakref.ref[Tensor]
    version: int
    mode: Mode
    circumstances: Any
    columns: dict[int, Tensor]


@dataclass
class SharedInput:
    """Per thread, what the last run of a fused te.Linear left for its other readers.

    An input is recognised by identity and version, so that nothing is taken from another call; when the input dies, so do
    the columns.
    """

    waiting: dict[int, _Waiting] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> SharedInput:
        """Empty: a copy of the model has run nothing."""
        return SharedInput()

    def __reduce__(self) -> tuple[type[SharedInput], tuple[()]]:
        return SharedInput, ()

    def take(self, reader: int, x: Tensor, circumstances: Any) -> Tensor | None:
        """The columns that wait for a reader and this very input, or None."""
        thread = threading.get_ident()
        held = self.waiting.get(thread)
        if held is None or held.source() is not x or held.version != _version(x) or held.mode != current_mode(x.device.type):
            return None
        if held.circumstances != circumstances:
            return None
        y = held.columns.pop(reader, None)
        if not held.columns:
            del self.waiting[thread]
        return y

    def leave(self, x: Tensor, circumstances: Any, columns: dict[int, Tensor]) -> None:
        """Keep columns for the other readers."""
        thread = threading.get_ident()
        waiting = self.waiting
        source = weakref.ref(x, lambda _: waiting.pop(thread, None))
        waiting[thread] = _Waiting(source, _version(x), current_mode(x.device.type), circumstances, columns)


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


def can_share(x: Any) -> bool:
    """Whether an input may be shared here: an ordinary tensor, and nobody is tracing, compiling or transforming."""
    return isinstance(x, torch.Tensor) and can_defer(x)
