"""Keys of TE's state dicts that the originals do not have."""

from __future__ import annotations

from typing import Any

import torch

EXTRA_STATE = "_extra_state"


def drop_empty_extra_state(destination: Any, prefix: str) -> None:
    """Leave out the ``_extra_state`` of a module that was never quantised."""
    extra = destination.get(prefix + EXTRA_STATE)
    if isinstance(extra, torch.Tensor) and extra.numel() == 0:
        del destination[prefix + EXTRA_STATE]
