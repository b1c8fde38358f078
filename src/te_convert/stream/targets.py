"""What a converted directory holds for a planned model: every tensor in TE's layout as pieces of the checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from te_convert.emit.slots import Slot, find_slots, find_ties
from te_convert.plan.model import Plan
from te_convert.stream.pieces import Layout, compose, pieces_of, whole
from te_convert.weights.ops import Fill, WeightOp

Made = tuple[WeightOp, tuple[str, ...]]
"""A weight operation and the full names of its sources."""


@dataclass
class Targets:
    """Tensors of the converted model.

    Attributes:
        weights: stored under their names in ``model.safetensors``, as pieces of the original's tensors.
        buffers: what ``state_dict()`` leaves out, with values.
        ties: further names → the stored name.
        sources: dtype and shape of the original's tensors.
    """

    weights: dict[str, Layout] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    sources: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)


def made_by(plan: Plan) -> Iterator[tuple[str, Made]]:
    """(full name of a tensor in TE's layout, how it is made) for everything that the plan converts."""
    for fusion in plan.fusions:
        for op in fusion.weights.ops:
            yield _join(fusion.fqn, op.dest), (op, tuple(_join(fusion.scope, source) for source in op.sources))
    for site in plan.swaps:
        for op in site.weights.ops if site.weights is not None else ():
            for fqn in (site.fqn, *site.aliases):
                yield _join(fqn, op.dest), (op, tuple(_join(fqn, source) for source in op.sources))


def find_targets(converted: nn.Module, plan: Plan, original: Mapping[str, Layout], names: Mapping[str, str]) -> Targets:
    """The tensors of a converted model without weights.

    Args:
        converted: the model after the plan was applied, on meta.
        plan: the plan.
        original: the original's parameters and persistent buffers by name, with the dtype to write.
        names: every name of a parameter of the original → the one in ``original`` (tied ones share it).

    Raises:
        InputError: a weight that cannot be streamed.
    """
    slots = find_slots(converted)
    public = slots.keys() & converted.state_dict().keys()
    made = dict(made_by(plan))
    found = Targets(ties=find_ties(slots, public))
    found.sources = {name: (layout.dtype, layout.shape) for name, layout in original.items()}
    for name, slot in slots.items():
        if name in found.ties:
            continue
        if name in public:
            found.weights[name] = _layout(name, made.get(name), original, names)
        else:
            found.buffers[name] = _value(slot, made.get(name), original, names)
    return found


def _layout(name: str, made: Made | None, original: Mapping[str, Layout], names: Mapping[str, str]) -> Layout:
    if made is None:
        layout = original[names[name]]
        return whole(names[name], layout.dtype, layout.shape)
    op, sources = made
    stored = tuple(names[source] for source in sources)
    shapes = {source: original[source].shape for source in stored}
    dtypes = {original[source].dtype for source in stored}
    dtype = dtypes.pop()
    for other in dtypes:
        dtype = torch.promote_types(dtype, other)
    shape = op.forward([torch.empty(shapes[source], device="meta") for source in stored]).shape
    return Layout(dtype, tuple(shape), pieces_of(op, stored, shapes.__getitem__))


def _value(slot: Slot, made: Made | None, original: Mapping[str, Layout], names: Mapping[str, str]) -> torch.Tensor:
    """A buffer, or the constant that TE needs and the original lacks, in the dtype of the site's own weights."""
    if made is None or not isinstance(made[0], Fill):
        return slot.tensor
    return torch.full((made[0].size,), made[0].value, dtype=slot.tensor.dtype)


def from_checkpoint(weights: Mapping[str, Layout], stored: Mapping[str, Layout]) -> dict[str, Layout]:
    """Tensors in terms of the checkpoint's instead of the model's."""
    return {name: compose(layout, stored) for name, layout in weights.items()}


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
