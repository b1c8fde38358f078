"""Other shapes and values from the example inputs, so that parity is not judged at one shape alone."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from te_convert.capture.scenario import Scenario

_Change = Callable[[torch.Tensor], torch.Tensor]


def shape_variants(scenario: Scenario) -> list[Scenario]:
    """The scenario with a doubled batch, with one sample, and with a shorter sequence where the inputs look like sequences.

    The new batch rows hold other values (the old ones rolled).  Whether the model takes a variant is for the caller to try.
    """
    tensors = [t for t in tree_leaves((scenario.args, scenario.kwargs)) if isinstance(t, torch.Tensor) and t.dim() > 0]
    if not tensors:
        return []
    batch = tensors[0].shape[0]
    variants = [_changed(scenario, "batch doubled", lambda t: _double(t) if t.dim() and t.shape[0] == batch else t)]
    if batch > 1:
        variants.append(_changed(scenario, "one sample", lambda t: t[:1] if t.dim() and t.shape[0] == batch else t))
    length = tensors[0].shape[1] if tensors[0].dim() in (2, 3) else 0
    if length > 2:
        half = length // 2
        variants.append(_changed(scenario, "shorter", lambda t: t[:, :half] if t.dim() in (2, 3) and t.shape[1] == length else t))
    return variants


def padded_variants(model: nn.Module, scenario: Scenario) -> list[Scenario]:
    """A Transformers model's batch with padding on the right and on the left, where the inputs are token ids of one length."""
    common: Any = sys.modules.get("transformers.modeling_utils")
    ids = scenario.kwargs.get("input_ids")
    if common is None or not isinstance(model, common.PreTrainedModel) or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return []
    given = scenario.kwargs.get("attention_mask")
    if ids.shape[1] < 4 or (given is not None and (not isinstance(given, torch.Tensor) or given.shape != ids.shape)):
        return []
    if "attention_mask" not in inspect.signature(type(model).forward).parameters:
        return []
    variants = []
    for side, start, stop in (("right", ids.shape[1] - ids.shape[1] // 3, None), ("left", 0, ids.shape[1] // 3)):
        mask = torch.ones_like(ids) if given is None else given.clone()
        mask[0, start:stop] = 0
        # Padding repeats the row's first token: a model that looks for a token (CLIP's end of text) must not find it there first.
        padded = torch.where(mask == 0, ids[:, :1], ids)
        kwargs = {**scenario.kwargs, "input_ids": padded, "attention_mask": mask}
        variants.append(replace(scenario, name=f"{scenario.name}[padded {side}]", kwargs=kwargs))
    return variants


def other_values(scenario: Scenario, seed: int = 0) -> Scenario:
    """The same shapes with other values: integers redrawn from the range seen (masks of 0 and 1 stay), floats shifted."""
    generator = torch.Generator().manual_seed(seed + 1)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.device, tensor.dtype)
            return tensor + noise
        if tensor.dtype is torch.bool or tensor.is_complex() or tensor.numel() == 0 or int(tensor.max()) <= 1:
            return tensor
        low, high = int(tensor.min()), int(tensor.max())
        return torch.randint(low, high + 1, tensor.shape, generator=generator).to(tensor.device, tensor.dtype)

    return _changed(scenario, "other values", change)


def wider_batch(scenario: Scenario, times: int) -> Scenario:
    """The inputs repeated along the batch dimension (those that share the first tensor's)."""
    tensors = [t for t in tree_leaves((scenario.args, scenario.kwargs)) if isinstance(t, torch.Tensor) and t.dim() > 0]
    batch = tensors[0].shape[0] if tensors else 0

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * times) if tensor.dim() and tensor.shape[0] == batch else tensor

    return _changed(scenario, f"batch x{times}", repeat)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor.roll(1, -1)])


def _changed(scenario: Scenario, what: str, change: _Change) -> Scenario:
    return replace(scenario.with_tensors(change), name=f"{scenario.name}[{what}]")
