"""What every twin shares with TransformerEngineBaseModule: the ``_extra_state`` key."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


class TwinModule(nn.Module):
    """A pure-PyTorch stand-in for a TE module: same parameter names, state-dict keys, shapes and mathematics.

    Like TE's, its state dict has an ``_extra_state`` entry, a 0-element uint8 tensor for a module that was never quantised.
    """

    def get_extra_state(self) -> torch.Tensor:
        """The empty extra state of a module without quantisation history."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Accept what TE writes for stateless recipes (None or an empty tensor).

        Raises:
            RuntimeError: a delayed-scaling history, which TE stores as a pickle and a twin cannot use.
        """
        if state is None or (isinstance(state, torch.Tensor) and state.numel() == 0):
            return
        raise RuntimeError("the checkpoint holds delayed-scaling history in _extra_state; drop those keys to load it without TE")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which TE computes a norm: float32, and float64 only for tests of rounding."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def without_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Leave autocast, as TE's norms do: they compute in float32 whatever it says.  Meta tensors have no autocast."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def output_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """te.LayerNorm and te.RMSNorm return the autocast dtype under autocast, else the weight's dtype."""
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return weight.dtype
