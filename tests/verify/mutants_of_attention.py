"""Mistakes in attention: masks, scales, groups of heads, layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_convert.reference.attention import DotProductAttention
from tests.verify.mutant_tools import (
    Place,
    Way,
    add,
    set_to,
    wrap,
)

# ---- attention -------------------------------------------------------------------------------------------------------------
Attend = Callable[..., Any]


def attention(change: Attend, fits: Callable[[Any], bool] = lambda core: True) -> Way:
    """Another attention: ``change(module, right, query, key, value, **options)``, tensors [·, ·, heads, d]."""

    def way(place: Place) -> bool:
        for core in place.site.modules():
            if isinstance(core, DotProductAttention) and fits(core):
                wrap(core, _attend(change))
                return True
        return False

    return way


def _attend(change: Attend) -> Callable[..., Any]:
    def forward(core: Any, right: Any, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **options: Any) -> Any:
        if mask and mask[0] is not None:
            options["attention_mask"] = mask[0]
        return change(core, right, query, key, value, **options)

    return forward


def core_attribute(name: str, change: Callable[[Any], Any]) -> Way:
    def way(place: Place) -> bool:
        return any(set_to(name, change)(core) for core in place.site.modules() if isinstance(core, DotProductAttention))

    return way


def _length(core: Any, x: Tensor) -> int:
    return x.shape[1 if core.qkv_format == "bshd" else 0]


def with_options(change: Callable[[Any, dict[str, Any], Tensor, Tensor], dict[str, Any]]) -> Attend:
    def attend(core: Any, right: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        return right(query, key, value, **change(core, options, query, key))

    return attend


def with_tensors(change: Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Attend:
    def attend(core: Any, right: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        return right(*change(core, query, key, value), **options)

    return attend


def _is_causal(options: dict[str, Any]) -> bool:
    return "causal" in (options.get("attn_mask_type") or "")


def _no_mask(core: Any, options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
    return {**options, "attn_mask_type": "no_mask", "window_size": (-1, -1)} if _is_causal(options) else options


def _causal_added(core: Any, options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
    plain = options.get("attn_mask_type") == "no_mask"
    return {**options, "attn_mask_type": "causal", "window_size": (-1, 0)} if plain else options


def _diagonal(offset: int) -> Callable[[Any, dict[str, Any], Tensor, Tensor], dict[str, Any]]:
    def change(core: Any, options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
        window = options.get("window_size") or (-1, 0)
        if not _is_causal(options) or window[0] >= 0:
            return options
        queries, keys = _length(core, q), _length(core, k)
        masked = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries + offset)
        return {**options, "attn_mask_type": "arbitrary", "attention_mask": masked[None, None], "window_size": (-1, -1)}

    return change


def _other_corner(core: Any, options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
    kinds = {"causal": "causal_bottom_right", "causal_bottom_right": "causal"}
    return {**options, "attn_mask_type": kinds.get(options.get("attn_mask_type", ""), options.get("attn_mask_type"))}


def _window(change: Callable[[int], int]) -> Callable[[Any, dict[str, Any], Tensor, Tensor], dict[str, Any]]:
    def apply(core: Any, options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
        left, right = options.get("window_size") or (-1, -1)
        return {**options, "window_size": (change(left), right)} if left >= 0 else options

    return apply


def _polarity(core: Any, options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
    """Padding where there is none and the other way round (kept on the right where a padding type demands it)."""
    mask = options.get("attention_mask")
    if isinstance(mask, tuple):
        inverted = mask[1].logical_not().flip(-1)
        inverted[..., 0] = False
        return {**options, "attention_mask": (mask[0], inverted)}
    return options if mask is None else {**options, "attention_mask": mask.logical_not()}


def _padding_lost(core: Any, options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
    if not isinstance(options.get("attention_mask"), tuple):
        return options
    return {**options, "attn_mask_type": "no_mask", "attention_mask": None}


def _bias(change: Callable[[Tensor], Tensor]) -> Callable[[Any, dict[str, Any], Tensor, Tensor], dict[str, Any]]:
    def apply(core: Any, options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
        bias = options.get("core_attention_bias")
        return options if bias is None else {**options, "core_attention_bias": change(bias)}

    return apply


def _grouped(core: Any) -> bool:
    return bool(1 < core.num_gqa_groups < core.num_attention_heads)


def _groups_interleaved(core: Any, right: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Head i reads group i % groups instead of i // (heads / groups)."""
    heads, groups = core.num_attention_heads, core.num_gqa_groups
    order = torch.arange(heads).view(-1, groups).t().flatten()
    out = right(query[..., order, :], key, value, **options)
    return out.unflatten(-1, (heads, -1))[..., order.argsort(), :].flatten(-2)


def _dropped(core: Any, right: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    kept = core.attention_dropout, core.training
    core.attention_dropout, core.training = 0.1, True
    try:
        return right(query, key, value, **options)
    finally:
        core.attention_dropout, core.training = kept


def _across_the_batch(core: Any, right: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    if query.shape[:2] != key.shape[:2]:
        return right(query, key, value, **options)
    turned = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return right(*turned, attn_mask_type="no_mask", window_size=(-1, -1)).transpose(0, 1)


def _layout_swapped(core: Any, right: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    out = right(query, key, value, **options)
    return out.unflatten(-1, (core.num_attention_heads, -1)).transpose(1, 2).reshape(out.shape)


def _heads_flipped(core: Any, right: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    out = right(query, key, value, **options)
    return out.unflatten(-1, (core.num_attention_heads, -1)).flip(-2).flatten(-2)


def _swapped_if_alike(core: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (k, q, v) if q.shape == k.shape else (q, k, v)


def _rounded_scores(core: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.to(torch.bfloat16).to(q.dtype), k.to(torch.bfloat16).to(k.dtype), v


add("scale lost", core_attribute("softmax_scale", lambda scale: 1.0))
add("scale applied twice", core_attribute("softmax_scale", lambda scale: scale * scale))
add("softcap lost", attention(with_options(lambda core, options, q, k: {**options, "softcap": 0.0}), lambda core: core.softcap > 0))
add("causality lost", attention(with_options(_no_mask)))
add("causal where nothing is masked", attention(with_options(_causal_added)))
add("causal off by one: sees the next", attention(with_options(_diagonal(1))))
add("causal off by one: does not see itself", attention(with_options(_diagonal(-1))))
add("causal from the other corner", attention(with_options(_other_corner)))
add("window off by one", attention(with_options(_window(lambda left: left + 1))))
add("window lost", attention(with_options(_window(lambda left: -1))))
add("padding mask inverted", attention(with_options(_polarity)))
add("padding mask lost", attention(with_options(_padding_lost)))
add("position bias lost", attention(with_options(_bias(torch.zeros_like))))
add("position bias of other heads", attention(with_options(_bias(lambda bias: bias.flip(1)))))
add("position bias shifted", attention(with_options(_bias(lambda bias: bias.roll(1, -1)))))
add(
    "KV groups permuted",
    attention(with_tensors(lambda core, q, k, v: (q, k.flip(2), v.flip(2))), lambda core: core.num_gqa_groups > 1),
)
add("KV groups interleaved", attention(_groups_interleaved, _grouped))
add("heads of the result permuted", attention(_heads_flipped, lambda core: core.num_attention_heads > 1))
add("heads and positions of the result swapped", attention(_layout_swapped))
add("attention across the batch", attention(_across_the_batch))
add("dropout of attention in eval", attention(_dropped))
add("queries and keys of attention swapped", attention(with_tensors(_swapped_if_alike)))
add("rotary halves exchanged", attention(with_tensors(lambda core, q, k, v: (q.roll(q.shape[-1] // 2, -1), k, v))))
add("scores rounded", attention(with_tensors(_rounded_scores)))
