"""Twin of te.DotProductAttention."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_convert.reference.masks import (
    AttentionMask,
    FullMask,
    Masking,
    alibi_bias,
    check_mask_type,
    default_alibi_slopes,
    full_mask,
    resolve_masking,
)
from te_convert.reference.module import TwinModule, compute_dtype, without_autocast
from te_convert.reference.parallel import ranks_of, share
from te_convert.reference.precision import autocast_dtype
from te_convert.reference.unsupported import require

MASK_FILL = -10000.0
"""Score of a masked pair (``attention_mask_func`` in TE's utils.py): a row with nothing to attend to averages all keys."""

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class DotProductAttention(TwinModule):
    """``softmax(mask(softcap(q @ k.T · softmax_scale) + bias)) @ v``, heads side by side in the output.

    Scores and softmax are computed in float32, probabilities are rounded to the input's dtype before they meet the values.
    Where a padding type is used, padded queries, and queries without a key, give exactly 0.

    Args:
        num_attention_heads: h, heads of the queries.
        kv_channels: d, size of a head; a pair when values have another one than keys.
        num_gqa_groups: heads of keys and values; query head i reads group ``i // (h / groups)``.
        attention_dropout: on the probabilities, in training; 0.0 here, 0.1 in te.MultiheadAttention.
        qkv_format: "sbhd" or "bshd".
        attn_mask_type: see :mod:`te_convert.reference.masks`.
        window_size: (left, right), inclusive, −1 for no limit.
        bottom_right_diagonal: corner of window and ALiBi for mask types that do not imply one.
        softcap: ``cap · tanh(score / cap)`` after scaling, before a post-scale bias; 0.0 for none.
        attention_type: "self" takes one padding mask, "cross" two.
        softmax_scale: ``1 / sqrt(d)`` when None.
        softmax_type: "vanilla"; "off-by-one" and "learnable" add a sink to the denominator, the latter the float32 parameter
            ``softmax_offset`` [h].
        tp_group: process group of the ranks that hold the other heads; h and the groups are those of all ranks together.
        tp_size: their number, where there is no group.

    Source: ``attention/dot_product_attention/``.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        *,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        tp_group: Any = None,
        tp_size: int = 1,
    ) -> None:
        super().__init__()
        self.tp_group, self.tp_size = tp_group, ranks_of(tp_group, tp_size)
        num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        num_attention_heads = share(num_attention_heads, self.tp_size)
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = share(num_gqa_groups, self.tp_size)
        require(num_attention_heads % self.num_gqa_groups == 0, "num_attention_heads is no multiple of num_gqa_groups")
        self.head_dims = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.attention_dropout, self.softcap = attention_dropout, _checked_softcap(softcap)
        self.qkv_format, self.attn_mask_type = check_format(qkv_format), check_mask_type(attn_mask_type)
        resolve_masking(attn_mask_type, window_size, bottom_right_diagonal)
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        require(attention_type in ("self", "cross"), f"attention_type {attention_type!r} is neither 'self' nor 'cross'")
        self.attention_type = attention_type
        self.softmax_scale = 1.0 / math.sqrt(self.head_dims[0]) if softmax_scale is None else softmax_scale
        require(softmax_type in SOFTMAX_TYPES, f"softmax_type {softmax_type!r} is none of {', '.join(SOFTMAX_TYPES)}")
        self.softmax_type = softmax_type
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(num_attention_heads, dtype=torch.float32))

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: AttentionMask | None = None,
        qkv_format: str | None = None,
        *,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """Queries [s, b, h, d], keys and values [s, b, groups, d] ("bshd": [b, s, …]) → [s, b, h · d] ("bshd": [b, s, h · d]).

        Arguments that are None are the constructor's.  A bias is broadcastable to [b, h, sq, skv], ``alibi_slopes`` is [h] or
        [b, h] and only for "alibi".

        Raises:
            NotSupportedError: a mask or bias that would not be read, or tensors that do not fit the constructor.
        """
        layout = self.qkv_format if qkv_format is None else check_format(qkv_format)
        q, k, v = self._heads_first(query_layer, key_layer, value_layer, layout)
        masking = resolve_masking(
            self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            self.window_size if window_size is None else window_size,
            self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal,
        )
        cap = self.softcap if softcap is None else _checked_softcap(softcap)
        mask = full_mask(masking, attention_mask, (q.shape[0], q.shape[2], k.shape[2]), self.attention_type, q.device)
        with without_autocast(q):
            bias = _bias(core_attention_bias_type, core_attention_bias, alibi_slopes, q, k, mask)
            scores = self._scores(q, k, core_attention_bias_type, bias, cap)
            probabilities = self._probabilities(scores, mask.masked, masking).to(v.dtype)
            probabilities = F.dropout(probabilities, self.attention_dropout, self.training)
            context = probabilities @ v  # [b, h, sq, dv]
        order = (2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3)
        return context.permute(order).flatten(-2)

    def _heads_first(self, query: Tensor, key: Tensor, value: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
        """All three as [b, h, s, d]: keys and values repeated for their groups, in autocast's dtype under autocast."""
        heads = (self.num_attention_heads, self.num_gqa_groups, self.num_gqa_groups)
        dims = (self.head_dims[0], *self.head_dims)
        for tensor, expected in zip((query, key, value), zip(heads, dims, strict=True), strict=True):
            fits = tensor.dim() == 4 and tuple(tensor.shape[-2:]) == expected and tensor.dtype == query.dtype
            require(
                fits, f"expected {layout} with heads of {expected} in {query.dtype}, not {list(tensor.shape)} in {tensor.dtype}"
            )
        require(key.shape[:-1] == value.shape[:-1], f"keys {list(key.shape)} and values {list(value.shape)} do not belong together")
        dtype = autocast_dtype(query) or query.dtype
        order = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
        q, k, v = (tensor.to(dtype).permute(order) for tensor in (query, key, value))
        require(q.shape[0] == k.shape[0], f"{q.shape[0]} samples of queries and {k.shape[0]} of keys")
        repeats = self.num_attention_heads // self.num_gqa_groups
        return q, k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)

    def _scores(self, q: Tensor, k: Tensor, bias_type: str, bias: Tensor | None, softcap: float) -> Tensor:
        """float32 [b, h, sq, skv] before masking."""
        wide = compute_dtype(q.dtype)
        scores = q.to(wide) @ k.to(wide).transpose(-1, -2)
        if bias is not None and bias_type == "pre_scale_bias":
            scores = scores + bias
        scores = scores * self.softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        return scores if bias is None or bias_type == "pre_scale_bias" else scores + bias

    def _probabilities(self, scores: Tensor, masked: Tensor, masking: Masking) -> Tensor:
        """Softmax over the keys, without the share of a sink."""
        scores = scores.masked_fill(masked, MASK_FILL)
        if self.softmax_type == "vanilla":
            probabilities = scores.softmax(dim=-1)
        else:
            heads = self.num_attention_heads
            learnt = self.softmax_type == "learnable"
            sink = self.softmax_offset.to(scores.dtype) if learnt else scores.new_zeros(heads)
            column = sink.view(1, heads, 1, 1).expand(scores.shape[0], heads, scores.shape[2], 1)
            probabilities = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
        return probabilities.masked_fill(masked, 0.0) if masking.pads else probabilities

    def extra_repr(self) -> str:
        """Constructor facts for printing."""
        heads = f"heads={self.num_attention_heads}, groups={self.num_gqa_groups}, head_dims={self.head_dims}"
        return f"{heads}, {self.qkv_format}, {self.attn_mask_type}, softmax_scale={self.softmax_scale:g}"


def check_format(qkv_format: str) -> str:
    """The format as it is, if it is "sbhd" or "bshd".

    Raises:
        NotSupportedError: the packed "thd" format, or no format of TE.
    """
    require(qkv_format in ("sbhd", "bshd"), f"qkv_format {qkv_format!r} is not supported, only 'sbhd' and 'bshd'")
    return qkv_format


def _checked_softcap(softcap: float) -> float:
    require(math.isfinite(softcap) and softcap >= 0.0, f"softcap must be finite and not negative, not {softcap}")
    return softcap


def _bias(kind: str, bias: Tensor | None, slopes: Tensor | None, q: Tensor, k: Tensor, mask: FullMask) -> Tensor | None:
    """The bias of the scores in their dtype, or None."""
    require(kind in BIAS_TYPES, f"core_attention_bias_type {kind!r} is none of {', '.join(BIAS_TYPES)}")
    takes_tensor = kind in ("pre_scale_bias", "post_scale_bias")
    require(
        (bias is not None) == takes_tensor, f"core_attention_bias {'is missing' if takes_tensor else 'is not read'} with {kind!r}"
    )
    require(slopes is None or kind == "alibi", f"alibi_slopes are not read with {kind!r}")
    wide = compute_dtype(q.dtype)
    if kind == "alibi":
        slopes = default_alibi_slopes(q.shape[1], q.device) if slopes is None else slopes
        return alibi_bias(slopes, q.shape[2], k.shape[2], mask.shift).to(wide)
    return None if bias is None else bias.to(wide)
