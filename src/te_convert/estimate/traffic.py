"""Element-wise work of a recording outside of any site: bytes and kernels that a conversion leaves as they are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from te_convert.capture.graph import Recording
from te_convert.estimate.work import Work
from te_convert.facts.flops import function_flops
from te_convert.plan.model import Plan

_FREE = frozenset(
    {
        *("view", "view_as", "reshape", "flatten", "unflatten", "transpose", "t", "permute", "movedim", "swapaxes"),
        *("expand", "expand_as", "unsqueeze", "squeeze", "__getitem__", "getitem", "narrow", "select"),
        *("chunk", "split", "unbind", "detach", "size", "dim", "numel", "after_mutation"),
        *("arange", "zeros", "ones", "new_zeros", "new_ones"),
    }
)
"""Calls that move no data, or little of it."""
_CASTS = frozenset(("to", "type", "float", "half", "bfloat16", "type_as"))


def find_rest(model: nn.Module, recording: Recording, plan: Plan) -> tuple[Work, ...]:
    """One item for each module whose own code moves data that no site accounts for."""
    modules = dict(model.named_modules())
    skipped = _Skipped(plan)
    found: dict[str, list[float]] = {}
    for node in recording.graph.nodes:
        where = _where(node)
        if node.op not in ("call_function", "call_method", "call_module") or skipped(node, where):
            continue
        moved = _moved_bytes(node, modules)
        flops = function_flops(node) if node.op != "call_module" else 0
        if moved or flops:
            sums = found.setdefault(where, [0.0, 0.0, 0.0])
            sums[0] += moved
            sums[1] += 1
            sums[2] += flops
    return tuple(
        Work(f"(rest of {where or 'the root'})", "elementwise", "other", False, moved_bytes=a, kernels=b, other_flops=c)
        for where, (a, b, c) in found.items()
    )


def find_eager_attention(recording: Recording) -> set[str]:
    """Modules that call softmax themselves."""
    return {_where(node) for node in recording.graph.nodes if node.op != "call_module" and _name(node) == "softmax"}


class _Skipped:
    """Which nodes belong to a site."""

    def __init__(self, plan: Plan) -> None:
        self.owners = tuple(fusion.whole for fusion in plan.fusions if fusion.whole is not None)
        self.sites = {d.fqn for d in plan.decisions if d.flops or d.kind in ("LayerNorm", "RMSNorm")}
        self.attention = {d.fqn: d.shapes[0].input[-2] for d in plan.decisions if d.kind == "Attention" and d.shapes}

    def __call__(self, node: fx.Node, where: str) -> bool:
        if node.op == "call_module" and str(node.target) in self.sites:
            return True
        if any(not owner or where == owner or where.startswith(owner + ".") for owner in self.owners):
            return True
        length = self.attention.get(where)
        return length is not None and (function_flops(node) > 0 or (len(_shape(node)) > 2 and _shape(node)[-1] == length))


def _moved_bytes(node: fx.Node, modules: dict[str, nn.Module]) -> float:
    name = _name(node)
    if name in _FREE or not _shape(node) or function_flops(node):
        return 0.0
    inputs = list(_tensors(node.args)) + list(_tensors(tuple(node.kwargs.values())))
    if name in _CASTS and inputs and inputs[0].meta["tensor_meta"].dtype == node.meta["tensor_meta"].dtype:
        return 0.0
    if name == "contiguous" and inputs and _strides(inputs[0]) == _strides(node):
        return 0.0
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    if isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and not module.p):
        return 0.0
    return _bytes(node) + sum(_bytes(value) for value in inputs)


def _tensors(values: Any) -> Iterator[fx.Node]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, fx.Node) and _shape(value):
            yield value


def _bytes(node: fx.Node) -> float:
    return float(math.prod(_shape(node)) * node.meta["tensor_meta"].dtype.itemsize)


def _shape(node: fx.Node) -> tuple[int, ...]:
    meta: Any = node.meta.get("tensor_meta")
    return tuple(meta.shape) if hasattr(meta, "shape") else ()


def _strides(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["tensor_meta"].stride)


def _where(node: fx.Node) -> str:
    stack = tuple(node.meta.get("nn_module_stack") or ())
    return str(stack[-1]) if stack else ""


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))
