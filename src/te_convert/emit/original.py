"""The original model of a converted directory: its stored source, run again, with the stored weights in its own layout."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from te_convert.emit.load import check_files, load_directory, restore_ties, set_value
from te_convert.emit.manifest import read_manifest
from te_convert.emit.slots import find_slots, find_ties, public_names
from te_convert.emit.sources import rebuild
from te_convert.errors import LoadError
from te_convert.rewrite.state import revert

_CHANGED = "the source or its packages changed; convert the model again"


def rebuild_original(path: Path | str) -> nn.Module:
    """Build the original model again from ``path``; no code of a conversion ever touched its modules.

    The weights are the stored ones, taken back through the weight maps: two loads and one build, whose tensors are copied.

    Raises:
        LoadError: as :func:`load_directory` does, or the rebuilt model has other tensors than the converted one had.
        EnvironmentLacksError: the source needs Transformers, which is not installed.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    stored = revert(load_directory(directory, backend="reference"))
    with torch.random.fork_rng(devices=[]):
        original = rebuild(manifest.source, directory)
    given, slots = find_slots(stored), find_slots(original)
    ties = find_ties(given, public_names(stored, given))
    lost = sorted(name for name, slot in slots.items() if name not in given and slot.persistent)
    extra = sorted(name for name, slot in given.items() if name not in slots and slot.persistent)
    if lost or extra:
        raise LoadError(f"the rebuilt model has other tensors than the stored one: {', '.join((lost + extra)[:8])}", _CHANGED)
    restore_ties(slots, {name: first for name, first in ties.items() if name in slots})
    for name, slot in slots.items():
        if name in given and name not in ties:
            set_value(name, slot, given[name].tensor.detach())
            if slot.is_parameter:
                slot.tensor.requires_grad_(given[name].tensor.requires_grad)
    for name, slot in given.items():
        if name not in slots:  # a buffer that the model makes while it runs
            original.get_submodule(name.rpartition(".")[0]).register_buffer(slot.key, slot.tensor, persistent=False)
    return original.train(stored.training)
