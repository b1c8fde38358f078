"""Finding tensors in whatever a model takes or returns, and naming where they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_MAX_DEPTH = 8


def iter_tensors(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every tensor in nested tuples, lists, mappings, dataclasses and plain objects' fields.

    Paths read like Python: ``.logits``, ``[0]``, ``['a']``; objects such as Transformers' caches are entered through their
    dataclass fields only, so internal state is not mistaken for an output.
    """
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth > _MAX_DEPTH or value is None or isinstance(value, (str, bytes, int, float, bool)):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from iter_tensors(item, f"{path}[{key!r}]", depth + 1)
    elif isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None)
        for index, item in enumerate(value):
            yield from iter_tensors(item, f"{path}.{names[index]}" if names else f"{path}[{index}]", depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from iter_tensors(getattr(value, field.name, None), f"{path}.{field.name}", depth + 1)


def first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor of :func:`iter_tensors`, or None."""
    return next((tensor for _, tensor in iter_tensors(value)), None)


def model_device(model: torch.nn.Module) -> torch.device:
    """Device of the first parameter or buffer; CPU for a model that has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
