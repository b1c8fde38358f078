"""What a Transformers mask means, told by the function that makes it, so that attention need not read its values.

Transformers builds a mask once per forward pass and hands it to every layer.  The function registered here builds the original's
mask and hangs a :class:`MaskFacts` on it.  A mask that somebody else made, cut or moved has none: the original takes it as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from te_convert.rewrite.lazy import can_defer

FACTS = "_te"
"""Where a mask tensor carries its facts."""


@dataclass(frozen=True)
class Pattern:
    """Which keys a query sees without padding.

    Attributes:
        causal: none behind its own position.
        window: only keys less than this far before it (causal), or at most this far away; None for no limit.
    """

    causal: bool
    window: int | None = None


@dataclass(frozen=True)
class MaskFacts:
    """One mask as it was made.

    Attributes:
        pattern: what it shows without padding; None when that is not known.
        queries: number of queries; ``keys`` of keys.
        shift: position of the first query minus that of the first key, or None when it is a tensor.
        valid: bool [b, keys], True for keys that are not padding; None without padding.
        right: the padding is on the right of every sample, and every sample has a key.
        version: the mask's version, to see that nobody changed it.
    """

    pattern: Pattern | None
    queries: int
    keys: int
    shift: int | None
    valid: Tensor | None
    right: bool
    version: int

    def fits(self, mask: Tensor, queries: int, keys: int) -> bool:
        """Whether the facts still describe the mask, and the mask the call."""
        return (self.queries, self.keys) == (queries, keys) and self.version == _version(mask)


def mask_facts(mask: Tensor) -> MaskFacts | None:
    """The facts that a mask carries, or None."""
    facts = getattr(mask, FACTS, None)
    return facts if isinstance(facts, MaskFacts) else None


def mask_function(base: str) -> Callable[..., Tensor | None]:
    """The mask function to register beside the stand-in for an implementation: the original's mask, with its facts."""

    def make_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        masking: Any = sys.modules["transformers.masking_utils"]
        mask: Tensor | None = masking.ALL_MASK_ATTENTION_FUNCTIONS[base](*args, **kwargs)
        if mask is not None and not args and can_defer(mask) and not _captures(mask):
            setattr(mask, FACTS, _describe(mask, kwargs))
        return mask

    make_mask.__name__ = make_mask.__qualname__ = f"te_convert_{base}_mask"
    return make_mask


def _describe(mask: Tensor, kwargs: dict[str, Any]) -> MaskFacts | None:
    """Facts from the arguments of the mask function; padding is looked at here, once per forward pass."""
    try:
        queries, keys = int(kwargs["q_length"]), int(kwargs["kv_length"])
        first_query, first_key = kwargs.get("q_offset", 0), kwargs.get("kv_offset", 0)
        pattern = _pattern(kwargs["mask_function"]) if "mask_function" in kwargs else Pattern(causal=True)
    except (KeyError, TypeError, ValueError):
        return None
    known = isinstance(first_query, int) and isinstance(first_key, int)
    valid, right = kwargs.get("attention_mask"), True
    if valid is not None and pattern is not None:
        valid = _on_keys(valid, first_key if known else 0, keys)
        valid, right = (None, False) if valid is None else _look_at(valid)
    return MaskFacts(pattern, queries, keys, first_query - first_key if known else None, valid, right, _version(mask))


def _on_keys(valid: Tensor, first: int, keys: int) -> Tensor | None:
    """The part of a padding mask [b, s] that belongs to the keys; None when it is not made for them."""
    if valid.dim() != 2 or valid.dtype is not torch.bool or valid.shape[1] < first + keys or not can_defer(valid):
        return None
    return valid[:, first : first + keys]


def _look_at(valid: Tensor) -> tuple[Tensor | None, bool]:
    """(the padding, or None when there is none; whether it is on the right of every sample and leaves a key in each)."""
    ordered = (valid[:, 1:] <= valid[:, :-1]).all() & valid[:, 0].all()
    everything, right = torch.stack((valid.all(), ordered)).tolist()
    return (None, True) if everything else (valid, right)


def _captures(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, where no value can be read."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _pattern(function: Any) -> Pattern | None:
    """The pattern of one of Transformers' own mask functions, known by its code; None for any other."""
    masking: Any = sys.modules["transformers.masking_utils"]
    if function is masking.causal_mask_function:
        return Pattern(causal=True)
    if function is masking.bidirectional_mask_function:
        return Pattern(causal=False)
    codes = _codes()
    if getattr(function, "__code__", None) is not codes.get("both"):
        return None
    parts = _closure(function).get("mask_functions", ())
    windows = {getattr(part, "__code__", None): _closure(part).get("sliding_window") for part in parts}
    for name, plain in (("before", masking.causal_mask_function), ("around", masking.bidirectional_mask_function)):
        if len(parts) == 2 and plain in parts and isinstance(windows.get(codes.get(name)), int):
            return Pattern(causal=name == "before", window=windows[codes[name]])
    return None


@lru_cache(maxsize=1)
def _codes() -> dict[str, Any]:
    """Code objects of Transformers' closures, which are shared by all closures of one function."""
    masking: Any = sys.modules["transformers.masking_utils"]
    makers = {"before": "sliding_window_overlay", "around": "sliding_window_bidirectional_overlay"}
    found = {name: getattr(masking, maker)(1).__code__ for name, maker in makers.items() if hasattr(masking, maker)}
    return found | {"both": masking.and_masks(masking.causal_mask_function).__code__}


def _closure(function: Any) -> dict[str, Any]:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
