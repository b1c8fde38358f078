"""Floating-point operations of a recording, and which of them belong to which module.

Counted: matrix products (linear, matmul, bmm, addmm, baddbmm, torch's multi-head attention function), scaled dot product attention
and convolutions, with two operations per multiply-add.  Element-wise work is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from te_convert.capture.graph import ModuleCall, Recording
from te_convert.facts.stand_in import has_no_shape

_Shape = tuple[int, ...]


def _shape(value: Any) -> _Shape:
    if not isinstance(value, fx.Node) or "tensor_meta" not in value.meta:
        return ()
    return tuple(value.meta["tensor_meta"].shape)


def _argument(node: fx.Node, index: int, name: str) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name)


def _linear(node: fx.Node) -> int:
    x, weight = _shape(_argument(node, 0, "input")), _shape(_argument(node, 1, "weight"))
    return 2 * math.prod(x) * weight[0] if x and len(weight) == 2 else 0


def _matmul(node: fx.Node) -> int:
    left, out = _shape(_argument(node, 0, "input")), _shape(node)
    return 2 * math.prod(out) * left[-1] if left else 0


def _addmm(node: fx.Node) -> int:
    left, out = _shape(_argument(node, 1, "mat1") or _argument(node, 1, "batch1")), _shape(node)
    return 2 * math.prod(out) * left[-1] if left else 0


def _sdpa(node: fx.Node) -> int:
    query, key, value = (_shape(_argument(node, i, n)) for i, n in enumerate(("query", "key", "value")))
    if not (query and key and value):
        return 0
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_function(node: fx.Node) -> int:
    """torch's multi_head_attention_forward: four projections of width E and two products (inputs are [L, N, E])."""
    query, key = _shape(_argument(node, 0, "query")), _shape(_argument(node, 1, "key"))
    if len(query) != 3 or len(key) != 3:
        return 0
    length, batch, width = query
    projections = 2 * width * width * batch * (2 * length + 2 * key[0])
    return projections + 4 * batch * length * key[0] * width


_FUNCTIONS: dict[str, Callable[[fx.Node], int]] = {
    "linear": _linear,
    "matmul": _matmul,
    "__matmul__": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "scaled_dot_product_attention": _sdpa,
    "multi_head_attention_forward": _attention_function,
}


def function_flops(node: fx.Node) -> int:
    """Operations of one call_function or call_method node; 0 for what is not counted."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    count = _FUNCTIONS.get(name)
    return count(node) if count is not None else 0


def module_flops(module: nn.Module, call: ModuleCall) -> int:
    """Operations of one call of a leaf module: a 2-D weight is a matrix product, a convolution by its kernel."""
    if call.input_shape is None or call.output_shape is None:
        return 0
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        per_input = math.prod(module.kernel_size) * module.out_channels // module.groups
        return 2 * math.prod(call.input_shape) * per_input
    if isinstance(module, nn.modules.conv._ConvNd):
        per_output = math.prod(module.kernel_size) * module.in_channels // module.groups
        return 2 * math.prod(call.output_shape) * per_output
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or not call.input_shape:
        return 0
    weights = [p for p in module._parameters.values() if p is not None and not has_no_shape(p) and p.dim() == 2]
    if len(weights) != 1:
        return 0
    return 2 * math.prod(call.input_shape[:-1]) * weights[0].numel()


def recording_flops(model: nn.Module, recording: Recording) -> tuple[int, dict[str, int]]:
    """(total, per leaf module) of one recording."""
    modules = dict(model.named_modules())
    per_module: dict[str, int] = {}
    for call in recording.calls:
        if call.leaf and not call.raised:
            flops = module_flops(modules[call.fqn], call)
            if flops:
                per_module[call.fqn] = per_module.get(call.fqn, 0) + flops
    functions = sum(function_flops(node) for node in recording.graph.nodes if node.op in ("call_function", "call_method"))
    return functions + sum(per_module.values()), per_module


def attention_flops(recording: Recording) -> dict[str, int]:
    """Operations of functions that each attention module ran itself: its two products, or its scaled dot product attention."""
    names = {call.fqn for call in recording.attention}
    found: dict[str, int] = {}
    for node in recording.graph.nodes if names else ():
        stack = node.meta.get("nn_module_stack") or ()
        where = tuple(stack)[-1] if stack else None
        if node.op in ("call_function", "call_method") and where in names:
            found[where] = found.get(where, 0) + function_flops(node)
    return found
