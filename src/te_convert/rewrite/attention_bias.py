"""Masks that TE has no type for, as what they add to the scores: te.DotProductAttention's post-scale bias.

    True, 0   ->  0         a key that is seen
    False     ->  -inf      one that is not
    a number  ->  itself    what is added to the score

A query that sees no key gives 0 in torch's function and NaN in a kernel that is given -inf alone: its bias is 0, and its result
is set to 0.  Eager attention adds the most negative number instead, and such a query averages all values, on TE as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_convert.rewrite.attention_masks import mask_facts
from te_convert.rewrite.lazy import can_defer

_KEPT = "_te_bias"
"""Where a mask that all layers share keeps its bias."""

Sizes = tuple[int, int, int, int]
"""b, h, sq, skv."""
ScoreBias = tuple[Tensor, Tensor | None]
"""(bias [1 or b, 1 or h, sq, skv], bool [1 or b, 1 or h, sq, 1] of queries that see no key, or None where that cannot be)."""


def as_bias(mask: Tensor, sizes: Sizes, query: Tensor, *, eager: bool) -> ScoreBias | None:
    """The bias that a mask is, in the dtype that TE computes in; None for a mask that does not fit the call.

    Args:
        mask: bool, True for keys that are seen, or what is added to the scores; broadcastable to ``sizes``.
        sizes: of the scores.
        query: of the call.
        eager: the original adds the mask by itself, which a bool mask is not made for.
    """
    dtype = _dtype(query)
    key = (mask._version if not mask.is_inference() else -1, dtype, sizes)
    kept: Any = getattr(mask, _KEPT, None)
    if kept is not None and kept[0] == key:
        found: ScoreBias = kept[1]
        return found
    wide = _fitting(mask, sizes)
    if wide is None or (eager and wide.dtype is torch.bool):
        return None
    result = _finish(_numbers(wide, dtype), dtype, eager)
    if mask_facts(mask) is not None and not mask.requires_grad and not mask.is_inference():
        setattr(mask, _KEPT, (key, result))
    return result


def combined_bias(mask: Tensor, bias: Tensor, sizes: Sizes, query: Tensor, *, eager: bool) -> ScoreBias | None:
    """A mask and a bias in one: Transformers' SDPA hides a key by the most negative number where there is a bias as well."""
    wide = _fitting(mask, sizes)
    if wide is None or (eager and wide.dtype is torch.bool):
        return None
    total = torch.where(wide, bias, torch.finfo(query.dtype).min) if wide.dtype is torch.bool else bias + wide
    return _finish(total, _dtype(query), eager)


def _dtype(query: Tensor) -> torch.dtype:
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def _fitting(mask: Tensor, sizes: Sizes) -> Tensor | None:
    """The mask as [1 or b, 1 or h, sq, skv], or None: TE's kernels know no other shapes."""
    if not can_defer(mask) or mask.dim() > 4 or not (mask.dtype is torch.bool or mask.is_floating_point()):
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    if any(size not in (1, full) for size, full in zip(mask.shape, sizes, strict=True)):
        return None
    return mask.expand(-1, -1, *sizes[2:])


def _numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask.logical_not(), -torch.inf)


def _finish(bias: Tensor, dtype: torch.dtype, eager: bool) -> ScoreBias:
    if eager:
        finite = bias if bias.dtype == dtype else bias.clamp(min=torch.finfo(dtype).min)
        return finite.to(dtype), None
    bias = bias.to(dtype)
    hidden = (bias == -torch.inf).all(-1, keepdim=True)
    return bias.masked_fill(hidden, 0.0), hidden
