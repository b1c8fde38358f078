"""Does the model's config still describe the model?  Asked before a directory is written, on a model without memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from te_convert.emit.model_source import ModelSource
from te_convert.emit.slots import find_slots
from te_convert.emit.sources import rebuild
from te_convert.errors import InputError
from te_convert.plan.model import Plan


def check_skeleton(model: nn.Module, plan: Plan, source: ModelSource, directory: Path) -> None:
    """Compare names and shapes of a Transformers model with those that its config gives, outside converted sites.

    A model that was changed after it was built (layers removed, adapters added) cannot be built again from its config.  A
    model from a file was built from that file in this process, so there is nothing to compare.

    Raises:
        InputError: they differ.
    """
    converting = {name for decision in plan.converting for name in (decision.fqn, *decision.aliases)}
    converting |= {fusion.fqn for fusion in plan.fusions}
    if source.kind != "transformers" or "" in converting:
        return
    with torch.device("meta"):
        built = _shapes(rebuild(source, directory), converting)
    here = _shapes(model, converting)
    differ = {name for name in built if here.get(name) != built[name]}
    differ |= here.keys() - built.keys()
    if differ:
        raise InputError(
            f"the model differs from its config in {len(differ)} tensors: {', '.join(sorted(differ)[:8])}",
            "give a file.py whose build_model() makes the changed model",
        )


def _shapes(model: nn.Module, converting: set[str]) -> dict[str, torch.Size]:
    """Shapes of persistent tensors that lie in no converted site."""
    shapes: dict[str, torch.Size] = {}
    for name, slot in find_slots(model).items():
        parents = {name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)}
        if slot.persistent and not parents & converting:
            shapes[name] = slot.tensor.shape
    return shapes
