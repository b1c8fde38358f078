"""Keys of TE's state dicts that the originals do not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from te_convert.match.parallel_regions import divide
from te_convert.plan.model import SITE_ATTRIBUTE

EXTRA_STATE = "_extra_state"


def drop_empty_extra_state(destination: Any, prefix: str) -> None:
    """Leave out the ``_extra_state`` of a module that was never quantised."""
    extra = destination.get(prefix + EXTRA_STATE)
    if isinstance(extra, torch.Tensor) and extra.numel() == 0:
        del destination[prefix + EXTRA_STATE]


def take_part(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Of whole tensors for a module that is divided among ranks, this rank's part."""
    record = module.__dict__[SITE_ATTRIBUTE]
    for name, (dim, segments) in record.cuts.items():
        tensor = state_dict.get(prefix + name)
        if isinstance(tensor, torch.Tensor) and tensor.dim() > dim and tensor.shape[dim] == sum(length for length, _ in segments):
            state_dict[prefix + name] = divide(tensor, dim, segments, record.parallel.rank, record.parallel.size)
