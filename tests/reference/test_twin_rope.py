"""Rotary embedding against Transformers' and against complex multiplication."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_as_llama

from te_convert.reference import NotSupportedError, RotaryPositionEmbedding, apply_rotary_pos_emb
from tests.reference.twin_samples import randn


def turned(t: Tensor, angles: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1) of ``t`` [s, b, h, d] as complex numbers, turned by ``angles`` [s, d / 2]."""
    pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.exp(1j * angles)[:, None, None]).flatten(-2)


def test_angles_are_positions_times_frequencies() -> None:
    rope = RotaryPositionEmbedding(8, rotary_base=500.0)
    frequencies = 1 / 500.0 ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(rope.state_dict(), {"inv_freq": frequencies})
    expected = torch.arange(3, 8)[:, None] * frequencies
    torch.testing.assert_close(rope(5, offset=3), torch.cat((expected, expected), dim=-1).view(5, 1, 1, 8))
    rope.interleaved = True
    torch.testing.assert_close(rope(5, offset=3), expected.repeat_interleave(2, dim=-1).view(5, 1, 1, 8))


def test_position_interpolation() -> None:
    rope = RotaryPositionEmbedding(8, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=4)
    plain = RotaryPositionEmbedding(8)
    torch.testing.assert_close(rope(8), plain(8) / 2)
    torch.testing.assert_close(rope(12), plain(12) / (12 / 4))
    assert RotaryPositionEmbedding(8, rotary_percent=0.5)(3).shape == (3, 1, 1, 4)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_halves_are_those_of_llama(layout: str) -> None:
    angles = RotaryPositionEmbedding(8)(6).double()
    t = randn(6, 2, 3, 8)
    both = angles[:6, 0]  # [s, 1, d]
    expected, _ = rotate_as_llama(t, t, both.cos(), both.sin(), unsqueeze_dim=2)
    given, expected = (t, expected) if layout == "sbhd" else (t.transpose(0, 1), expected.transpose(0, 1))
    torch.testing.assert_close(apply_rotary_pos_emb(given, angles, layout), expected)


@pytest.mark.parametrize("width", [8, 4])
def test_pairs_are_complex_numbers_and_the_rest_passes(width: int) -> None:
    angles = RotaryPositionEmbedding(width, interleaved=True)(9).double()
    t = randn(6, 2, 3, 8)
    rotated = apply_rotary_pos_emb(t, angles, interleaved=True)
    torch.testing.assert_close(rotated[..., :width], turned(t[..., :width], angles[:6, 0, 0, ::2]))
    assert torch.equal(rotated[..., width:], t[..., width:])


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_samples_may_start_at_different_positions(layout: str) -> None:
    angles, t = RotaryPositionEmbedding(8)(20), randn(6, 2, 3, 8)
    given = t if layout == "sbhd" else t.transpose(0, 1)
    rotated = apply_rotary_pos_emb(given, angles, layout, torch.tensor([0, 11]))
    rotated = rotated if layout == "sbhd" else rotated.transpose(0, 1)
    for sample, start in enumerate((0, 11)):
        torch.testing.assert_close(rotated[:, sample : sample + 1], apply_rotary_pos_emb(t[:, sample : sample + 1], angles[start:]))


def test_bfloat16_is_rounded_once() -> None:
    angles, t = RotaryPositionEmbedding(8)(6), randn(6, 2, 3, 8).bfloat16()
    assert torch.equal(apply_rotary_pos_emb(t, angles), apply_rotary_pos_emb(t.float(), angles).bfloat16())


def test_refusals() -> None:
    angles, t = RotaryPositionEmbedding(8)(6), randn(6, 2, 3, 8)
    with pytest.raises(NotSupportedError, match="tensor_format 'thd'"):
        apply_rotary_pos_emb(t, angles, "thd")
    with pytest.raises(NotSupportedError, match="6 angles do not reach over 7 positions"):
        apply_rotary_pos_emb(randn(7, 2, 3, 8), angles)
    with pytest.raises(NotSupportedError, match="rotary width 8 does not fit heads of 6"):
        apply_rotary_pos_emb(randn(6, 2, 3, 6), angles)
    with pytest.raises(NotSupportedError, match=r"angles must be \[s, 1, 1, d\], not \[6, 2, 1, 8\]"):
        apply_rotary_pos_emb(t, angles.expand(6, 2, 1, 8))
    with pytest.raises(NotSupportedError, match="even and positive, not 7"):
        RotaryPositionEmbedding(7)
    with pytest.raises(NotSupportedError, match="work only together"):
        RotaryPositionEmbedding(8, seq_len_interpolation_factor=2)
