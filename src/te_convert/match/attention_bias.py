"""Masks that are none: float tensors made of parameters, buffers and sizes alone, which torch's attention adds to the scores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from te_convert.match.attention_cores import name_of

_LIKE_SECOND = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as"})
"""The second tensor gives dtype or shape only."""


def position_bias(node: fx.Node, modules: dict[str, nn.Module]) -> tuple[int, ...] | None:
    """Shape of a mask that is a bias: it follows from the model alone, and hides nothing by an infinite number; else None.

    A mask that depends on what the model is given may hide all keys from a query in another call, where torch and TE disagree.
    """
    meta = node.meta.get("tensor_meta")
    if meta is None or not meta.dtype.is_floating_point:
        return None
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        found = waiting.pop()
        if found in seen:
            continue
        seen.add(found)
        if found.op == "placeholder" or _is_infinite(found) or (found.op == "get_attr" and not _is_known(found, modules)):
            return None
        waiting += _sources(found)
    return tuple(meta.shape)


def _sources(node: fx.Node) -> Sequence[fx.Node]:
    """The nodes whose values a node's value depends on."""
    name = name_of(node)
    if name.endswith("_like") or name.startswith("new_"):
        return ()
    return node.all_input_nodes[:1] if name in _LIKE_SECOND else node.all_input_nodes


def _is_infinite(node: fx.Node) -> bool:
    return any(isinstance(value, float) and not math.isfinite(value) for value in tree_leaves((node.args, node.kwargs)))


def _is_known(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """A tensor of the model without an infinite number."""
    owner, _, name = str(node.target).rpartition(".")
    tensor = getattr(modules.get(owner), name, None)
    if node.meta.get("unknown") or not isinstance(tensor, torch.Tensor):
        return False
    return tensor.is_meta or not tensor.is_floating_point() or bool(tensor.isfinite().all())
