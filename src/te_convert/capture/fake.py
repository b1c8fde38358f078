"""Fake weights for models on meta, so that a plan needs no memory for tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map


def is_meta(model: nn.Module) -> bool:
    """True when any parameter lives on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def without_meta(value: Any) -> Any:
    """Nested inputs with every meta tensor as an empty CPU tensor; inside :func:`fake_weights` it is a fake one."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")

    return tree_map(move, value)


@contextmanager
def fake_weights(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Enter a fake-tensor mode and give a CPU fake for every parameter and buffer, under its name.

    Buffers that hold real values are turned into fakes too; a model that reads tensor values in Python then raises, and the
    capture degrades to the module tree.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            tensors[name] = fake.requires_grad_(tensor.requires_grad)
        yield tensors
