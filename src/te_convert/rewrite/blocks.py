"""Whole modules on te.MultiheadAttention and te.TransformerLayer: calls translated to TE's, the original forward for the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from te_convert.rewrite.fused import FusedRecord
from te_convert.rewrite.lazy import can_defer


@dataclass(frozen=True)
class TECall:
    """Arguments for the TE module, and whether the original returns a pair (output, None)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    pair: bool = False


Translate = Callable[[FusedRecord, dict[str, Any]], "TECall | None"]
"""Bound arguments of the original → a call of the TE module; None when TE cannot express it."""


def translate_call(record: FusedRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TECall | None:
    """The TE call for a call of the original, or None: other arguments, dropout in training, tracing."""
    owner: Any = record.role("owner")[0]
    try:
        bound = _signature(cast("Hashable", owner_class(owner))).bind(owner, *args, **kwargs)
    except TypeError:
        return None  # the original raises its own error
    bound.apply_defaults()
    values = dict(list(bound.arguments.items())[1:])
    if not all(can_defer(value) and not value.is_nested for value in values.values() if isinstance(value, Tensor)):
        return None
    if record.module.training and any(module.p > 0 for module in owner.modules() if isinstance(module, nn.Dropout)):
        return None
    return TRANSLATIONS[record.decision.rule](record, values)


def owner_class(owner: nn.Module) -> type[nn.Module]:
    """The original class of a module that may be a borrower now."""
    return getattr(owner, "_te_base", type(owner))


@lru_cache(maxsize=64)
def _signature(cls: Hashable) -> inspect.Signature:
    forward: Callable[..., Any] = cls.forward  # type: ignore[attr-defined]
    return inspect.signature(forward)


def _multi_head_attention(record: FusedRecord, values: dict[str, Any]) -> TECall | None:
    """nn.MultiheadAttention.forward."""
    owner: Any = record.role("owner")[0]
    query, key, value = values["query"], values["key"], values["value"]
    if values["need_weights"] or query.dim() != 3 or key is not value or (record.module.training and owner.dropout > 0):
        return None
    is_self = record.decision.spec.attention_type == "self"  # type: ignore[union-attr]
    if is_self != (query is key):
        return None
    masking = _masking(
        values["attn_mask"], values["key_padding_mask"], values["is_causal"], _batch(query, owner.batch_first), owner.num_heads
    )
    if masking is None:
        return None
    mask, kind = masking
    source = {} if is_self else {"encoder_output": key}
    return TECall((query,), {"attention_mask": mask, "attn_mask_type": kind, **source}, pair=True)


def _encoder_layer(record: FusedRecord, values: dict[str, Any]) -> TECall | None:
    """nn.TransformerEncoderLayer.forward."""
    attention: Any = record.role("owner")[0].self_attn
    x = values["src"]
    if x.dim() != 3:
        return None
    batch = _batch(x, attention.batch_first)
    masking = _masking(values["src_mask"], values["src_key_padding_mask"], values["is_causal"], batch, attention.num_heads)
    return None if masking is None else TECall((x,), {"attention_mask": masking[0], "self_attn_mask_type": masking[1]})


def _decoder_layer(record: FusedRecord, values: dict[str, Any]) -> TECall | None:
    """nn.TransformerDecoderLayer.forward."""
    attention: Any = record.role("owner")[0].self_attn
    x, memory = values["tgt"], values["memory"]
    if x.dim() != 3 or memory.dim() != 3:
        return None
    batch, heads = _batch(x, attention.batch_first), attention.num_heads
    own = _masking(values["tgt_mask"], values["tgt_key_padding_mask"], values["tgt_is_causal"], batch, heads)
    other = _masking(values["memory_mask"], values["memory_key_padding_mask"], values["memory_is_causal"], batch, heads)
    if own is None or other is None:
        return None
    return TECall(
        (x,),
        {
            "attention_mask": own[0],
            "self_attn_mask_type": own[1],
            "encoder_output": memory,
            "enc_dec_attn_mask": other[0],
            "enc_dec_attn_mask_type": other[1],
        },
    )


def _one_tensor(record: FusedRecord, values: dict[str, Any]) -> TECall | None:
    """A block that takes one tensor [batch, sequence, hidden]; any other argument is the original's business."""
    x, *others = values.items()
    defaults = _signature(cast("Hashable", owner_class(record.role("owner")[0]))).parameters
    plain = all(value is None or (not isinstance(value, Tensor) and value == defaults[name].default) for name, value in others)
    return TECall((x[1],)) if isinstance(x[1], Tensor) and x[1].dim() == 3 and plain else None


TRANSLATIONS: dict[str, Translate] = {
    "torch-attention": _multi_head_attention,
    "torch-encoder-layer": _encoder_layer,
    "torch-decoder-layer": _decoder_layer,
    "transformer-block": _one_tensor,
}
"""By the rule that made the fusion."""


def _batch(x: Tensor, batch_first: bool) -> int:
    return x.shape[0] if batch_first else x.shape[1]


def _masking(
    mask: Tensor | None, padding: Tensor | None, is_causal: bool, batch: int, heads: int
) -> tuple[Tensor | None, str] | None:
    """(mask with True = masked out, TE's mask type) for torch's masks; None for one that is more than a mask.

    Args:
        mask: [queries, keys] or [batch * heads, queries, keys]; True or -inf is masked out.
        padding: [batch, keys]; True or -inf is masked out.
        is_causal: the caller's word that ``mask`` is the causal one.
        batch: size of the batch.
        heads: number of heads.
    """
    if is_causal and padding is None:
        return None, "causal"
    if mask is None and padding is None:
        return None, "no_mask"
    parts = []
    if mask is not None:
        mask = _as_bool(mask)
        if mask is None:
            return None
        parts.append(mask.view(batch, heads, *mask.shape[1:]) if mask.dim() == 3 else mask[None, None])
    if padding is not None:
        padding = _as_bool(padding)
        if padding is None:
            return None
        parts.append(padding[:, None, None, :])
    combined = parts[0] if len(parts) == 1 else parts[0] | parts[1]
    if bool(combined.all(dim=-1).any()):
        return None  # a query that sees nothing: NaN in torch, something else in TE
    return combined, "arbitrary"


def _as_bool(mask: Tensor) -> Tensor | None:
    """A float mask of 0 and -inf as booleans; None when it holds other values."""
    if mask.dtype is torch.bool:
        return mask
    out = mask.isneginf()
    return out if bool((out | (mask == 0)).all()) else None
