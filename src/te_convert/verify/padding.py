"""Which positions of a model's outputs are padding: nobody may use their values, and attention kernels disagree on them.

With padding on the right, causality alone hides it from every valid query, so TE's causal kernels run without a padding mask and
give other values at padded positions only.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from te_convert.capture.scenario import Scenario


def padding_mask(model: nn.Module, scenario: Scenario) -> torch.Tensor | None:
    """bool [b, s], True for padded positions of the outputs; None when the inputs have no 2-D mask with a padded position.

    Only of a Transformers model, where 0 is known to mean padding; all others are compared everywhere.  An encoder–decoder model's
    outputs have the positions of its decoder.
    """
    common: Any = sys.modules.get("transformers.modeling_utils")
    if common is None or not isinstance(model, common.PreTrainedModel):
        return None
    decodes = any(name.startswith("decoder_") for name in scenario.kwargs)
    mask = scenario.kwargs.get("decoder_attention_mask" if decodes else "attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.is_floating_point() or mask.is_meta:
        return None
    padded = mask == 0
    return padded if bool(padded.any()) and not bool(padded.all()) else None


def hide_padding(output: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
    """An output with zeros at padded positions: [b, s, ...], or keys, values and probabilities [b, heads, s, ...]."""
    if output.is_nested or output.dim() < 2 or output.shape[0] != padded.shape[0]:
        return output
    place = next((dim for dim in ((2, 1) if output.dim() == 4 else (1,)) if output.shape[dim] == padded.shape[1]), None)
    if place is None:
        return output
    shape = [1] * output.dim()
    shape[0], shape[place] = padded.shape
    return output.masked_fill(padded.to(output.device).view(shape), 0)
