"""A run at a small size that went the same way as a large one, for probes: numbers at a recorded size could need any memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from te_convert.capture.graph import Recording
from te_convert.capture.run import record
from te_convert.capture.scenario import Scenario
from te_convert.match.leaves import LeafPolicy

MAX_ELEMENTS = 1 << 22
"""Elements of a tensor that a probe may make, 16 MiB in float32."""
_BATCH, _LENGTH = 2, 64  # two samples tell batches from rows; 64 is a multiple of what models divide a sequence into


def elements(node: fx.Node) -> int:
    """Elements of the tensor that a recorded node gave; 0 for anything else."""
    meta = node.meta.get("tensor_meta")
    return 0 if meta is None else math.prod(meta.shape)


def small_nodes(model: nn.Module, recording: Recording) -> tuple[Recording, dict[fx.Node, fx.Node]] | None:
    """A recording of the same scenario at a small size, and the node there for each node of ``recording``.

    None when the model does not run at such a size, or takes another way there: other operations, or others' results.
    """
    for scenario in _smaller(recording.scenario):
        try:
            small = record(model, scenario, LeafPolicy())
        except Exception:  # whatever the model raises on inputs of another size
            continue
        pairs = _pairs(recording.graph, small.graph)
        if pairs is not None:
            return small, pairs
    return None


def _pairs(large: fx.Graph, small: fx.Graph) -> dict[fx.Node, fx.Node] | None:
    one, other = list(large.nodes), list(small.nodes)
    if len(one) != len(other):
        return None
    pairs = dict(zip(one, other, strict=True))
    for a, b in pairs.items():
        same = (a.op, a.meta.get("nn_module_stack")) == (b.op, b.meta.get("nn_module_stack"))
        if not same or (a.op != "get_attr" and a.target != b.target) or [pairs[n] for n in a.all_input_nodes] != b.all_input_nodes:
            return None
    return pairs


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """With two samples and a short sequence; then also where further dimensions are as long as the sequence."""
    tensors = [t for t in tree_leaves((scenario.args, scenario.kwargs)) if isinstance(t, torch.Tensor) and t.dim() > 0]
    if not tensors:
        return
    batch, length = tensors[0].shape[0], tensors[0].shape[1] if tensors[0].dim() in (2, 3) else 0
    for everywhere in (False, True):
        yield scenario.with_tensors(_cutter(batch, length, everywhere))


def _cutter(batch: int, length: int, everywhere: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() and tensor.shape[0] == batch:
            tensor = tensor[:_BATCH]
        of_a_mask = range(max(tensor.dim() - 2, 0), tensor.dim()) if tensor.dim() == 4 or tensor.shape == (length, length) else ()
        for dim, size in enumerate(tensor.shape):
            if size == length and (dim == 1 or dim in of_a_mask or everywhere):
                tensor = tensor.narrow(dim, 0, min(length, _LENGTH))
        return tensor

    return cut
