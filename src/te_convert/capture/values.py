"""What a recorder needs to know about argument values: their tensors, their parts, and what a graph can hold of them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

_NUMBERS = (bool, int, float, complex, str)
_PLAIN = (*_NUMBERS, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format)


def describe_argument(value: Any) -> str:
    """What an argument is: "tensor", ``repr`` of None, a number or a string, or the name of its class."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def find_tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested arguments, also in slices."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(value):
        parts = (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
        found += [part for part in parts if isinstance(part, torch.Tensor)]
    return found


def children(value: Any) -> list[tuple[Callable[..., Any], Any, Any]]:
    """(accessor, key, item) for each element of a nested result."""
    if isinstance(value, Mapping):
        return [(operator.getitem, key, item) for key, item in value.items()]
    if isinstance(value, (tuple, list)):
        return [(operator.getitem, index, item) for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(getattr, field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []


def to_graph_value(value: Any, tensor: Callable[[torch.Tensor], Any], module: Callable[[nn.Module], Any]) -> Any:
    """Arguments as a graph can hold them: tensors and modules through their functions, numbers as Python's own.

    Any other object is named by its type.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return tensor(leaf)
        if isinstance(leaf, nn.Module):
            return module(leaf)
        if isinstance(leaf, slice):
            return slice(one(leaf.start), one(leaf.stop), one(leaf.step))
        if isinstance(leaf, torch.Size):
            return tuple(leaf)
        if isinstance(leaf, np.generic):
            return leaf.item()
        return _plain(leaf) if is_plain(leaf) else f"<{type(leaf).__name__}>"

    return tree_map(one, value)


def _plain(leaf: Any) -> Any:
    """A member of an enum of numbers, or of another subclass, as the number itself: the graph writes it as source text."""
    value = leaf.value if isinstance(leaf, Enum) else leaf
    kind: Any = next((number for number in _NUMBERS if isinstance(value, number)), None)
    return value if kind is None or isinstance(value, bool) else kind(value)


def is_plain(leaf: Any) -> bool:
    """Whether a graph can hold a value that is no tensor."""
    return isinstance(leaf, (*_PLAIN, torch.Size, slice, np.generic))


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor lives only inside a ``torch.func`` transform."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
