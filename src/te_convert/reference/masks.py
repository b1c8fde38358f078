"""Which query may attend to which key, and ALiBi: TE's mask types, windows and diagonals.

True means masked *out*, the inverse of ``scaled_dot_product_attention``'s boolean masks.
Source: ``attention/dot_product_attention/utils.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from te_convert.reference.unsupported import NotSupportedError, require

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)

AttentionMask = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Masking:
    """How one call masks: a consistent mask type, window and corner of the diagonal."""

    mask_type: str
    window: tuple[int, int]
    bottom_right: bool

    @property
    def pads(self) -> bool:
        """Whether a padding mask is read."""
        return "padding" in self.mask_type


def check_mask_type(mask_type: str) -> str:
    """The mask type in TE's canonical spelling: "padding,causal" and "causal,padding" are "padding_causal".

    Raises:
        NotSupportedError: not one of :data:`MASK_TYPES`.
    """
    name = mask_type.replace(",", "_")
    name = "padding_causal" if name == "causal_padding" else name
    require(name in MASK_TYPES, f"attn_mask_type {mask_type!r} is none of {', '.join(MASK_TYPES)}")
    return name


def resolve_masking(mask_type: str, window_size: tuple[int, int] | None, bottom_right_diagonal: bool | None) -> Masking:
    """Mask type, window (left, right), inclusive with −1 for no limit, and corner to which the diagonal is aligned.

    Causal types have a right limit of 0.  The diagonal starts in the top left corner for "causal" and "padding_causal", and ends
    in the bottom right one for the others unless ``bottom_right_diagonal`` is False.

    Raises:
        NotSupportedError: a window or a corner that contradicts the mask type, where TE overrides it.
    """
    name = check_mask_type(mask_type)
    causal = "causal" in name
    left, right = (-1, 0 if causal else -1) if window_size is None else window_size
    if causal:
        require(left >= -1 and (right == 0 or (left, right) == (-1, -1)), f"window_size {window_size} contradicts {name!r}")
        right = 0
    else:
        fits = (left, right) == (-1, -1) or (left >= 0 and right >= 0)
        require(fits, f"window_size {window_size} must be (-1, -1) or not negative with {name!r}")
    implied = {"causal": False, "padding_causal": False, "causal_bottom_right": True, "padding_causal_bottom_right": True}.get(name)
    if bottom_right_diagonal is None:
        return Masking(name, (left, right), True if implied is None else implied)
    agrees = implied is None or implied == bottom_right_diagonal
    require(agrees, f"bottom_right_diagonal={bottom_right_diagonal} contradicts {name!r}")
    return Masking(name, (left, right), bottom_right_diagonal)


@dataclass(frozen=True)
class FullMask:
    """A mask over scores [b, h, sq, skv], and how far the diagonal is shifted.

    Args:
        masked: bool, broadcastable to the scores; True is masked out.
        shift: key position minus query position on the diagonal: a number, or [b, 1, 1, 1] with padding.
    """

    masked: Tensor
    shift: Tensor | int


def full_mask(
    masking: Masking, mask: AttentionMask | None, sizes: tuple[int, int, int], attention_type: str, device: torch.device
) -> FullMask:
    """Everything that masks a call.

    Args:
        masking: mask type, window and corner.
        mask: bool; [b, 1, 1, s] for padding types in self-attention, a pair [b, 1, 1, sq], [b, 1, 1, skv] in cross-attention,
            anything broadcastable to [b, h, sq, skv] for "arbitrary", None otherwise.
        sizes: b, sq, skv.
        attention_type: "self" or "cross".
        device: where the scores are.

    Raises:
        NotSupportedError: a mask that the mask type does not read, a missing one, one of another shape, or left padding.
    """
    _, queries, keys = sizes
    given: Tensor | None = None
    shift: Tensor | int = keys - queries if masking.bottom_right else 0
    if masking.pads:
        query_pad, key_pad = _padding(mask, sizes, attention_type, masking.mask_type)
        given = query_pad.transpose(-1, -2) | key_pad
        if masking.bottom_right:
            lengths = [pad.logical_not().sum(-1, keepdim=True) for pad in (query_pad, key_pad)]
            shift = lengths[1] - lengths[0]
    elif masking.mask_type == "arbitrary":
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            raise NotSupportedError("mask type 'arbitrary' needs one bool attention_mask, broadcastable to [b, h, sq, skv]")
        given = mask
    else:
        require(mask is None, f"attention_mask is not read with {masking.mask_type!r}; TE's backends disagree on what it does")
    # With a top left diagonal and no limit, TE's unfused backend still masks what is more than skv left or sq right of it.
    far_left, far_right = masking.window[0] < 0 and queries > keys + 1, masking.window[1] < 0 and keys > queries + 1
    agreed = masking.bottom_right or not (far_left or far_right)
    require(agreed, f"{masking.mask_type!r} from the top left with {queries} queries and {keys} keys: TE's backends disagree")
    band = _outside_window(masking.window, queries, keys, shift, device)
    return FullMask(band if given is None else band | given, shift)


def _padding(mask: AttentionMask | None, sizes: tuple[int, int, int], attention_type: str, mask_type: str) -> tuple[Tensor, Tensor]:
    """Padding of queries [b, 1, 1, sq] and keys [b, 1, 1, skv]."""
    batch, queries, keys = sizes
    if attention_type == "self":
        if not isinstance(mask, Tensor):
            raise NotSupportedError(f"mask type {mask_type!r} needs one attention_mask in self-attention")
        return _checked_padding(mask, batch, queries, mask_type), _checked_padding(mask, batch, keys, mask_type)
    if not isinstance(mask, tuple) or len(mask) != 2:
        raise NotSupportedError(f"mask type {mask_type!r} needs two attention masks in cross-attention, of queries and of keys")
    return _checked_padding(mask[0], batch, queries, mask_type), _checked_padding(mask[1], batch, keys, mask_type)


def _checked_padding(pad: Tensor, batch: int, length: int, mask_type: str) -> Tensor:
    """The mask itself, if it is bool [b, 1, 1, s] and pads on the right."""
    shape = (batch, 1, 1, length)
    if pad.dtype is not torch.bool or pad.shape != shape:
        raise NotSupportedError(f"mask type {mask_type!r} needs bool attention_mask {list(shape)}, True for padding")
    # Data is looked at only where there is some: not on meta, under tracing or in a compiled graph.
    if type(pad) is Tensor and not pad.is_meta and not torch.compiler.is_compiling():
        on_the_right = not bool((pad[..., :-1] & ~pad[..., 1:]).any())
        require(on_the_right, "padding must be on the right: TE's fused backends read only how many tokens are valid")
    return pad


def _outside_window(window: tuple[int, int], queries: int, keys: int, shift: Tensor | int, device: torch.device) -> Tensor:
    """True where a key is more than ``left`` before or ``right`` after the query's place on the diagonal; [1 or b, 1, sq, skv]."""
    left, right = window
    distance = _distance(queries, keys, shift, device)
    outside = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        outside = outside | (distance > left)
    if right >= 0:
        outside = outside | (distance < -right)
    return outside


def _distance(queries: int, keys: int, shift: Tensor | int, device: torch.device) -> Tensor:
    """How far a key lies left of the diagonal: [1 or b, 1, sq, skv]."""
    rows = torch.arange(queries, device=device).view(1, 1, queries, 1)
    columns = torch.arange(keys, device=device).view(1, 1, 1, keys)
    return rows - columns + shift


def default_alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """float32 [heads]: powers of ``2 ** (-8 / n)`` for the largest power of two n, then odd powers of its root."""
    power = 2 ** math.floor(math.log2(heads))
    exponents = [-8.0 * index / power for index in range(1, power + 1)]
    exponents += [-4.0 * index / power for index in range(1, 2 * (heads - power), 2)]
    return torch.tensor([2.0**exponent for exponent in exponents], dtype=torch.float32, device=device)


def alibi_bias(slopes: Tensor, queries: int, keys: int, shift: Tensor | int) -> Tensor:
    """``−slope · distance from the diagonal``.

    Args:
        slopes: [h] or [b, h].
        queries: sq.
        keys: skv.
        shift: see :class:`FullMask`.

    Returns:
        float32 [1 or b, h, sq, skv].
    """
    require(slopes.dim() in (1, 2), f"alibi_slopes must be [h] or [b, h], not {list(slopes.shape)}")
    per_head = slopes[None, :, None, None] if slopes.dim() == 1 else slopes[:, :, None, None]
    return -_distance(queries, keys, shift, slopes.device).abs() * per_head.float()
