"""Mask types, windows, ALiBi, and what is refused because TE would not read it or its backends disagree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from te_convert.reference import DotProductAttention, NotSupportedError
from te_convert.reference.masks import default_alibi_slopes, resolve_masking
from tests.reference.twin_samples import randn, right_padding

CPU = torch.device("cpu")


def attend(queries: int = 6, keys: int = 6, mask: Any = None, call: dict[str, Any] | None = None, **kwargs: Any) -> torch.Tensor:
    q, k, v = randn(queries, 2, 4, 8), randn(keys, 2, 4, 8, seed=2), randn(keys, 2, 4, 8, seed=3)
    out: torch.Tensor = DotProductAttention(4, 8, **kwargs)(q, k, v, mask, **(call or {}))
    return out


def test_spellings_and_defaults() -> None:
    assert resolve_masking("causal,padding", None, None) == resolve_masking("padding_causal", (-1, -1), False)
    assert resolve_masking("causal", None, None).bottom_right is False
    assert resolve_masking("no_mask", None, None).bottom_right is True
    assert resolve_masking("causal_bottom_right", (3, 0), None).window == (3, 0)


@pytest.mark.parametrize(
    ("heads", "expected"), [(4, [2**-2, 2**-4, 2**-6, 2**-8]), (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])]
)
def test_alibi_slopes(heads: int, expected: list[float]) -> None:
    torch.testing.assert_close(default_alibi_slopes(heads, CPU), torch.tensor(expected))


@pytest.mark.parametrize(("kind", "shift"), [("causal", 0), ("causal_bottom_right", 5), ("no_mask", 5)])
def test_alibi_is_a_bias_by_distance(kind: str, shift: int) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.1, 1.0])
    distance = torch.arange(4).view(4, 1) + shift - torch.arange(9)
    bias = -distance.abs() * slopes.view(1, 4, 1, 1)
    by_hand = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    expected = attend(4, 9, attn_mask_type=kind, call=by_hand)
    alibi = {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}
    torch.testing.assert_close(attend(4, 9, attn_mask_type=kind, call=alibi), expected)
    each = {"core_attention_bias_type": "alibi", "alibi_slopes": slopes.expand(2, 4)}
    torch.testing.assert_close(attend(4, 9, attn_mask_type=kind, call=each), expected)


def test_alibi_diagonal_follows_the_valid_lengths() -> None:
    masks = (right_padding(6, 4, 6), right_padding(7, 5, 7))
    alibi = {"core_attention_bias_type": "alibi"}
    out = attend(6, 7, masks, alibi, attn_mask_type="padding", attention_type="cross")
    q, k, v = randn(6, 2, 4, 8)[:4, :1], randn(7, 2, 4, 8, seed=2)[:5, :1], randn(7, 2, 4, 8, seed=3)[:5, :1]
    expected = DotProductAttention(4, 8, attn_mask_type="no_mask")(q, k, v, core_attention_bias_type="alibi")
    torch.testing.assert_close(out[:4, :1], expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attn_mask_type": "diagonal"}, "attn_mask_type 'diagonal' is none of"),
        ({"qkv_format": "thd"}, "qkv_format 'thd' is not supported"),
        ({"window_size": (2, 1)}, r"window_size \(2, 1\) contradicts 'causal'"),
        ({"attn_mask_type": "no_mask", "window_size": (-1, 0)}, r"must be \(-1, -1\) or not negative"),
        ({"bottom_right_diagonal": True}, "bottom_right_diagonal=True contradicts 'causal'"),
        ({"softcap": -1.0}, "softcap must be finite and not negative"),
        ({"softmax_type": "hard"}, "softmax_type 'hard' is none of"),
        ({"attention_type": "both"}, "neither 'self' nor 'cross'"),
        ({"num_gqa_groups": 3}, "no multiple of num_gqa_groups"),
    ],
)
def test_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(NotSupportedError, match=message):
        DotProductAttention(4, 8, **arguments)


MASK = torch.zeros(2, 1, 6, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask", "arguments", "message"),
    [
        (MASK, {}, "attention_mask is not read with 'causal'"),
        (MASK, {"attn_mask_type": "no_mask"}, "attention_mask is not read with 'no_mask'"),
        (None, {"attn_mask_type": "arbitrary"}, "'arbitrary' needs one bool attention_mask"),
        (MASK.float(), {"attn_mask_type": "arbitrary"}, "'arbitrary' needs one bool attention_mask"),
        (None, {"attn_mask_type": "padding"}, "'padding' needs one attention_mask in self-attention"),
        (MASK, {"attn_mask_type": "padding"}, r"needs bool attention_mask \[2, 1, 1, 6\]"),
        (right_padding(6, 4, 6).float(), {"attn_mask_type": "padding"}, "needs bool attention_mask"),
        (right_padding(6, 4, 6), {"attn_mask_type": "padding", "attention_type": "cross"}, "needs two attention masks"),
        (right_padding(6, 4, 6).flip(-1), {"attn_mask_type": "padding_causal"}, "padding must be on the right"),
    ],
)
def test_refused_masks(mask: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(NotSupportedError, match=message):
        attend(mask=mask, **arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"core_attention_bias_type": "bias"}, "core_attention_bias_type 'bias' is none of"),
        ({"core_attention_bias": torch.zeros(1, 4, 6, 6)}, "core_attention_bias is not read with 'no_bias'"),
        ({"core_attention_bias_type": "post_scale_bias"}, "core_attention_bias is missing with 'post_scale_bias'"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes are not read with 'no_bias'"),
        ({"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(1, 1, 4)}, "alibi_slopes must be"),
        ({"qkv_format": "thd"}, "qkv_format 'thd' is not supported"),
        ({"window_size": (1, 1)}, "contradicts 'causal'"),
    ],
)
def test_refused_calls(call: dict[str, Any], message: str) -> None:
    with pytest.raises(NotSupportedError, match=message):
        attend(call=call)


def test_refused_tensors() -> None:
    twin, x = DotProductAttention(4, 8), randn(6, 2, 4, 8)
    with pytest.raises(NotSupportedError, match=r"expected sbhd with heads of \(4, 8\)"):
        twin(x, x[:, :, :2], x)
    with pytest.raises(NotSupportedError, match="do not belong together"):
        twin(x, x, x[:5])
    with pytest.raises(NotSupportedError, match="2 samples of queries and 1 of keys"):
        twin(x, x[:, :1], x[:, :1])


@pytest.mark.parametrize(("queries", "keys", "kind"), [(9, 4, "causal"), (4, 9, "no_mask")])
def test_shapes_on_which_backends_of_te_disagree(queries: int, keys: int, kind: str) -> None:
    with pytest.raises(NotSupportedError, match="TE's backends disagree"):
        attend(queries, keys, attn_mask_type=kind, bottom_right_diagonal=False)


def test_padding_is_not_looked_at_where_there_is_no_data() -> None:
    with FakeTensorMode():
        x, mask = torch.empty(6, 2, 4, 8), torch.empty(2, 1, 1, 6, dtype=torch.bool)
        assert DotProductAttention(4, 8, attn_mask_type="padding")(x, x, x, mask).shape == (6, 2, 32)
    meta = torch.empty(6, 2, 4, 8, device="meta")
    mask = torch.empty(2, 1, 1, 6, dtype=torch.bool, device="meta")
    assert DotProductAttention(4, 8, attn_mask_type="padding")(meta, meta, meta, mask).shape == (6, 2, 32)
