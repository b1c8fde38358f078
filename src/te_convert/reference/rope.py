"""Rotary position embedding as TE has it: tensors of angles, applied in float32 and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from te_convert.reference.module import compute_dtype, without_autocast
from te_convert.reference.unsupported import require


class RotaryPositionEmbedding(nn.Module):
    """Angles for :func:`apply_rotary_pos_emb`; the persistent buffer ``inv_freq`` [dim / 2] is part of the state dict.

    Args:
        dim: rotary dimension of a head.
        rotary_percent: use only this part of ``dim``.
        seq_len_interpolation_factor: divide positions by this factor, or by the length over the pretrained length where that is
            larger; only together with ``pretrained_max_position_embeddings``.
        pretrained_max_position_embeddings: length before interpolation.
        rotary_base: base of the frequencies.
        interleaved: repeat each angle next to itself (pairs) instead of in the second half (halves).

    Source: ``attention/rope.py``.
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        if rotary_percent < 1.0:
            dim = int(dim * rotary_percent)
        require(dim > 0 and dim % 2 == 0, f"a rotary dimension must be even and positive, not {dim}")
        alone = (seq_len_interpolation_factor is None) != (pretrained_max_position_embeddings is None)
        require(not alone, "seq_len_interpolation_factor and pretrained_max_position_embeddings work only together")
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base = rotary_base
        self.interleaved = interleaved
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.register_buffer("inv_freq", 1.0 / rotary_base**exponents)

    inv_freq: Tensor

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles [max_seq_len, 1, 1, dim] of the positions from ``offset`` on, in the buffer's dtype."""
        with without_autocast(self.inv_freq):
            positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=self.inv_freq.dtype) + offset
            positions = positions * self._position_scale(max_seq_len)
            angles = torch.outer(positions, self.inv_freq)
        both = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return both[:, None, None, :]

    def _position_scale(self, max_seq_len: int) -> float:
        pretrained, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if pretrained is None or factor is None:
            return 1.0
        return 1 / (max_seq_len / pretrained) if max_seq_len > pretrained * factor else 1 / factor


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Rotate the leading part of each head by angles, in float32, rounded once (TE's fused kernel).

    Args:
        t: [s, b, h, d] for "sbhd", [b, s, h, d] for "bshd".
        freqs: angles [s2, 1, 1, d2] with s2 ≥ s (plus the largest start) and d2 ≤ d; what is past d2 passes through.
        tensor_format: "sbhd" or "bshd".
        start_positions: int [b], first position of each sample; 0 when None.
        interleaved: rotate pairs (2i, 2i + 1) instead of (i, i + d2 / 2).

    Returns:
        The shape and dtype of ``t``.

    Raises:
        NotSupportedError: the packed "thd" format, angles that differ by sample, or too few of them.
    """
    require(tensor_format in ("sbhd", "bshd"), f"rotary embedding for tensor_format {tensor_format!r} is not supported")
    require(freqs.dim() == 4 and freqs.shape[1:3] == (1, 1), f"angles must be [s, 1, 1, d], not {list(freqs.shape)}")
    length, width = t.shape[0 if tensor_format == "sbhd" else 1], freqs.shape[-1]
    require(freqs.shape[0] >= length, f"{freqs.shape[0]} angles do not reach over {length} positions")
    require(width <= t.shape[-1] and width % 2 == 0, f"rotary width {width} does not fit heads of {t.shape[-1]}")
    wide = compute_dtype(t.dtype)
    with without_autocast(t):
        angles = _angles_by_sample(freqs.to(wide).squeeze(2), length, start_positions)  # [s, 1 or b, d2]
        angles = (angles if tensor_format == "sbhd" else angles.transpose(0, 1)).unsqueeze(2)
        rotated, passed = t[..., :width].to(wide), t[..., width:]
        rotated = rotated * angles.cos() + _turn(rotated, interleaved) * angles.sin()
        return torch.cat((rotated.to(t.dtype), passed), dim=-1)


def _angles_by_sample(angles: Tensor, length: int, start_positions: Tensor | None) -> Tensor:
    """[s2, 1, d2] → [s, 1, d2], or [s, b, d2] when samples start at different positions."""
    if start_positions is None:
        return angles[:length]
    positions = torch.arange(length, device=angles.device)[:, None] + start_positions.to(angles.device)
    return angles.squeeze(1)[positions]


def _turn(x: Tensor, interleaved: bool) -> Tensor:
    """Each pair (a, b) → (−b, a)."""
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack((-second, first), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
