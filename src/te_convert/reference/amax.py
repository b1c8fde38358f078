"""Delayed scaling: the scale of a tensor comes from the largest magnitudes that were seen in earlier steps."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from te_convert.reference.quantize import Format, largest_magnitude

HISTORY = 1024
"""``amax_history_len`` of TE's DelayedScaling."""


class Amax:
    """One tensor's history: scale 1 until the first step is over, then ``(largest / max(history)) / 2^margin``.

    A step without a finite, positive amax leaves the scale as it is, and one of 0 is not remembered.

    Source: ``common/recipe/delayed_scaling.cu``; ``_default_sf_compute`` of ``pytorch/quantization.py``.
    """

    def __init__(self, fmt: Format, margin: int, length: int, device: torch.device) -> None:
        self.fmt, self.margin = fmt, margin
        self.scale = torch.ones((), device=device, dtype=torch.float32)
        self.current = torch.zeros((), device=device, dtype=torch.float32)
        self._history = torch.zeros(length, device=device, dtype=torch.float32)
        self._next = 0

    def record(self, x: Tensor) -> None:
        """Remember the largest magnitude of a tensor for the end of this step."""
        self.current = torch.maximum(self.current, largest_magnitude(x))

    def update(self) -> None:
        """End a step."""
        if float(self.current) == 0.0:
            return
        self._history[self._next] = self.current
        self._next = (self._next + 1) % len(self._history)
        amax = self._history.max()
        if bool(torch.isfinite(amax)):
            scale = torch.full_like(amax, self.fmt.largest / 2**self.margin) / amax
            self.scale = scale.clamp(max=torch.finfo(torch.float32).max)
        self.current = torch.zeros_like(self.current)


class AmaxHistories:
    """The histories of all tensors that modules quantise; a module that is gone takes its own along."""

    def __init__(self, margin: int, length: int) -> None:
        self.margin, self.length = margin, length
        self._forward: WeakKeyDictionary[nn.Module, dict[str, Amax]] = WeakKeyDictionary()
        self._backward: WeakKeyDictionary[nn.Module, dict[str, Amax]] = WeakKeyDictionary()

    def get(self, module: nn.Module, tensor: str, fmt: Format, device: torch.device, backward: bool = False) -> Amax:
        """The history of a tensor of a module, made when it is asked for first."""
        held = (self._backward if backward else self._forward).setdefault(module, {})
        if tensor not in held:
            held[tensor] = Amax(fmt, self.margin, self.length, device)
        return held[tensor]

    def update(self, backward: bool) -> None:
        """End a step for the tensors of the forward, or of the backward."""
        for held in (self._backward if backward else self._forward).values():
            for amax in held.values():
                amax.update()
