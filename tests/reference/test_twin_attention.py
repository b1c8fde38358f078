"""DotProductAttention against ``scaled_dot_product_attention``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_convert.reference import DotProductAttention
from tests.reference.twin_samples import perturb, randn, right_padding

HEADS, DIM = 4, 8
Inputs = tuple[Tensor, Tensor, Tensor]


def inputs(queries: int = 6, keys: int = 6, groups: int = HEADS, value_dim: int = DIM) -> Inputs:
    """[s, b, h, d] of queries, keys and values."""
    return randn(queries, 2, HEADS, DIM, seed=1), randn(keys, 2, groups, DIM, seed=2), randn(keys, 2, groups, value_dim, seed=3)


def sdpa(qkv: Inputs, **arguments: Any) -> Tensor:
    """PyTorch's attention over [s, b, h, d], heads side by side in the result."""
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in qkv)
    return F.scaled_dot_product_attention(q, k, v, **arguments).permute(2, 0, 1, 3).flatten(-2)


def assert_attends(twin: DotProductAttention, qkv: Inputs, allowed: Tensor | None = None, mask: Any = None, **oracle: Any) -> None:
    """Same output and gradients as SDPA where ``allowed`` [b or 1, h or 1, sq, skv] is True."""
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in qkv] for _ in range(2))
    left, right = twin(*ours, mask), sdpa((theirs[0], theirs[1], theirs[2]), attn_mask=allowed, **oracle)
    torch.testing.assert_close(left, right)
    weights = randn(*right.shape, seed=4)
    torch.testing.assert_close(torch.autograd.grad(left, ours, weights), torch.autograd.grad(right, theirs, weights))


def lower_left(queries: int, keys: int, shift: int, left: int = 99) -> Tensor:
    """Causal from a diagonal shifted to the right, over a window of ``left``: written as loops on purpose."""
    return torch.tensor([[0 <= row + shift - column <= left for column in range(keys)] for row in range(queries)])


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("value_dim", [8, 12])
def test_no_mask(groups: int, value_dim: int) -> None:
    twin = DotProductAttention(HEADS, (DIM, value_dim), groups, attn_mask_type="no_mask")
    assert_attends(twin, inputs(6, 9, groups, value_dim), enable_gqa=True)


def test_bshd_is_transposed() -> None:
    q, k, v = inputs()
    swapped = [tensor.transpose(0, 1) for tensor in (q, k, v)]
    expected = DotProductAttention(HEADS, DIM)(q, k, v)
    torch.testing.assert_close(DotProductAttention(HEADS, DIM, qkv_format="bshd")(*swapped).transpose(0, 1), expected)
    torch.testing.assert_close(DotProductAttention(HEADS, DIM)(*swapped, qkv_format="bshd").transpose(0, 1), expected)


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 9)])
def test_causal_corners(queries: int, keys: int) -> None:
    qkv = inputs(queries, keys)
    assert_attends(DotProductAttention(HEADS, DIM), qkv, is_causal=True)
    bottom = DotProductAttention(HEADS, DIM, attn_mask_type="causal_bottom_right")
    assert_attends(bottom, qkv, lower_left(queries, keys, keys - queries))


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 9)])
def test_windows_are_inclusive(queries: int, keys: int) -> None:
    qkv, shift = inputs(queries, keys), keys - queries
    assert_attends(DotProductAttention(HEADS, DIM, window_size=(2, 0)), qkv, lower_left(queries, keys, 0, 2))
    bottom = DotProductAttention(HEADS, DIM, attn_mask_type="causal_bottom_right", window_size=(2, 0))
    assert_attends(bottom, qkv, lower_left(queries, keys, shift, 2))
    both = DotProductAttention(HEADS, DIM, attn_mask_type="no_mask", window_size=(2, 1))
    assert_attends(both, qkv, lower_left(queries, keys, shift + 1, 3))
    top = DotProductAttention(HEADS, DIM, attn_mask_type="no_mask", window_size=(2, 1), bottom_right_diagonal=False)
    assert_attends(top, qkv, lower_left(queries, keys, 1, 3))


def test_arbitrary_mask_is_true_for_masked_out() -> None:
    masked = randn(2, 1, 6, 6, seed=5) > 0.5
    masked[..., 0] = False
    twin = DotProductAttention(HEADS, DIM, attn_mask_type="arbitrary")
    assert_attends(twin, inputs(), ~masked, masked)


def test_row_without_keys_averages_them() -> None:
    masked = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
    masked[..., 2, :] = True
    qkv = inputs()
    out = DotProductAttention(HEADS, DIM, attn_mask_type="arbitrary")(*qkv, masked)
    torch.testing.assert_close(out[2], qkv[2].mean(0).flatten(-2))


@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_padding(kind: str) -> None:
    """Valid rows are those of the samples alone; padded ones are exactly 0."""
    qkv = inputs()
    out = DotProductAttention(HEADS, DIM, attn_mask_type=kind)(*qkv, right_padding(6, 4, 6))
    alone = DotProductAttention(HEADS, DIM, attn_mask_type="no_mask" if kind == "padding" else "causal")
    for sample, valid in enumerate((4, 6)):
        expected = alone(*(tensor[:valid, sample : sample + 1] for tensor in qkv))
        torch.testing.assert_close(out[:valid, sample : sample + 1], expected)
    assert out[4:, 0].abs().max() == 0


@pytest.mark.parametrize("kind", ["padding", "padding_causal_bottom_right"])
def test_padding_of_both_sides(kind: str) -> None:
    qkv = inputs(6, 7)
    masks = (right_padding(6, 4, 3), right_padding(7, 5, 7))
    out = DotProductAttention(HEADS, DIM, attn_mask_type=kind, attention_type="cross", window_size=None)(*qkv, masks)
    alone = DotProductAttention(HEADS, DIM, attn_mask_type="no_mask" if kind == "padding" else "causal_bottom_right")
    for sample, (queries, keys) in enumerate(((4, 5), (3, 7))):
        cut = (tensor[: keys if index else queries, sample : sample + 1] for index, tensor in enumerate(qkv))
        torch.testing.assert_close(out[:queries, sample : sample + 1], alone(*cut))
        assert out[queries:, sample].abs().max() == 0


def test_padded_rows_are_0_in_a_window_too() -> None:
    twin = DotProductAttention(HEADS, DIM, attn_mask_type="padding_causal", window_size=(1, 0))
    assert twin(*inputs(), right_padding(6, 4, 6))[4:, 0].abs().max() == 0


def test_scale_and_softcap() -> None:
    q, k, v = inputs()
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * 0.7
    expected = torch.einsum("bhst,tbhd->sbhd", (1.5 * torch.tanh(scores / 1.5)).softmax(-1), v).flatten(-2)
    twin = DotProductAttention(HEADS, DIM, attn_mask_type="no_mask", softmax_scale=0.7, softcap=1.5)
    torch.testing.assert_close(twin(q, k, v), expected)
    uncapped = twin(q, k, v, softcap=0.0)
    torch.testing.assert_close(uncapped, sdpa((q, k, v), scale=0.7))


@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
def test_bias_before_and_after_scaling(kind: str) -> None:
    qkv, bias = inputs(), randn(1, HEADS, 6, 6, seed=6)
    twin = DotProductAttention(HEADS, DIM, attn_mask_type="no_mask", softmax_scale=0.7)
    out = twin(*qkv, core_attention_bias_type=kind, core_attention_bias=bias)
    torch.testing.assert_close(out, sdpa(qkv, scale=0.7, attn_mask=bias * 0.7 if kind == "pre_scale_bias" else bias))


@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
def test_softcap_spares_only_a_bias_after_scaling(kind: str) -> None:
    (q, k, v), bias = inputs(), randn(1, HEADS, 6, 6, seed=6)
    scores = torch.einsum("sbhd,tbhd->bhst", q, k)
    scores = torch.tanh(scores + bias) if kind == "pre_scale_bias" else torch.tanh(scores) + bias
    expected = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), v).flatten(-2)
    twin = DotProductAttention(HEADS, DIM, attn_mask_type="no_mask", softmax_scale=1.0, softcap=1.0)
    torch.testing.assert_close(twin(q, k, v, core_attention_bias_type=kind, core_attention_bias=bias), expected)


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_sinks_add_to_the_denominator(kind: str) -> None:
    q, k, v = inputs()
    twin = perturb(DotProductAttention(HEADS, DIM, attn_mask_type="no_mask", softmax_type=kind))
    sink = dict(twin.named_parameters()).get("softmax_offset", torch.zeros(HEADS)).double()
    weights = (torch.einsum("sbhd,tbhd->bhst", q, k) / DIM**0.5).exp()
    weights = weights / (weights.sum(-1, keepdim=True) + sink.exp().view(1, HEADS, 1, 1))
    torch.testing.assert_close(twin(q, k, v), torch.einsum("bhst,tbhd->sbhd", weights, v).flatten(-2))


def test_dropout_is_in_training_only() -> None:
    qkv, twin = inputs(), DotProductAttention(HEADS, DIM, attention_dropout=0.5)
    torch.manual_seed(0)
    assert not torch.equal(twin(*qkv), twin(*qkv))
    assert torch.equal(twin.eval()(*qkv), DotProductAttention(HEADS, DIM)(*qkv))


def test_bfloat16_scores_and_softmax_are_wide() -> None:
    q, k, v = (tensor.bfloat16() for tensor in inputs())
    out = DotProductAttention(HEADS, DIM, attn_mask_type="no_mask")(q, k, v)
    probabilities = (torch.einsum("sbhd,tbhd->bhst", q.double(), k.double()) / DIM**0.5).softmax(-1).bfloat16()
    exact = torch.einsum("bhst,tbhd->sbhd", probabilities.double(), v.double()).flatten(-2)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, exact.bfloat16())


def test_autocast_computes_in_its_dtype() -> None:
    qkv = [tensor.float() for tensor in inputs()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert DotProductAttention(HEADS, DIM)(*qkv).dtype is torch.bfloat16
