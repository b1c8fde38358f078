"""Experts that run on grouped products: the same module object, its stacked weights borrowed from te.GroupedLinear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_convert.facts.experts import argument_names
from te_convert.rewrite.fused import RECORDS, FusedRecord
from te_convert.rewrite.lazy import can_defer, unwrap
from te_convert.rewrite.loans import Borrower


class GroupedForward(Borrower):
    """Takes (tokens, expert indices, weights) to the grouped products; anything else to the original forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[tokens, hidden], [tokens, k], [tokens, k] → [tokens, hidden]."""
        record: FusedRecord = self.__dict__[RECORDS]
        tensors = [unwrap(value) for value in self._in_order(args, kwargs)]
        if record.enabled and len(tensors) == 3 and _fits(*tensors):
            module: Any = record.module
            y: Tensor = module.te_forward(*tensors)
            record.ran((tuple(tensors), {}), y)
            return y
        if record.enabled:
            record.fallbacks += 1
        return self.eager(*args, **kwargs)

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments as the original's signature orders them; () when it does not take them."""
        if not kwargs:
            return args
        names = argument_names(self._te_base)[len(args) :]
        return (*args, *[kwargs[name] for name in names if name in kwargs]) if kwargs.keys() <= set(names) else ()


def _fits(hidden: Any, index: Any, weights: Any) -> bool:
    if not (can_defer(hidden) and isinstance(index, Tensor) and isinstance(weights, Tensor)):
        return False
    integers = index.dtype in (torch.int64, torch.int32)
    return integers and hidden.dim() == index.dim() == 2 and index.shape == weights.shape and len(hidden) == len(index)
