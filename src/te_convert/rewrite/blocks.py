"""Whole modules on te.MultiheadAttention and te.TransformerLayer: calls translated to TE's, the original forward for the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from te_convert.replacements.specs import TransformerLayerSpec
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
    """The TE call for a call of the original, or None: other arguments, dropout in training, tracing, parts changed since."""
    owner: Any = record.role("owner")[0]
    try:
        bound = _signature(cast("Hashable", owner_class(owner))).bind(owner, *args, **kwargs)
    except TypeError:
        return None  # the original raises its own error
    bound.apply_defaults()
    values = dict(list(bound.arguments.items())[1:])
    if not all(can_defer(value) and not value.is_nested for value in values.values() if isinstance(value, Tensor)):
        return None
    if (record.module.training and any(map(drops, owner.modules()))) or not record.intact():
        return None
    if isinstance(record.decision.spec, TransformerLayerSpec) and would_round_residuals(values.values()):
        return None
    return TRANSLATIONS[record.decision.rule](record, values)


def would_round_residuals(values: Iterable[Any]) -> bool:
    """Under autocast te.TransformerLayer has its residual stream in the low precision, where the original keeps its input's."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return any(
        torch.is_autocast_enabled(tensor.device.type) and tensor.dtype is not torch.get_autocast_dtype(tensor.device.type)
        for tensor in tensors[:1]
    )


def drops(module: nn.Module) -> bool:
    """A dropout that is active in training, also one that was switched on after the conversion."""
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.dropout > 0)
    return isinstance(module, nn.Dropout) and module.p > 0


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
    if values["need_weights"] or query.dim() != 3 or key.dim() != 3 or key is not value:
        return None
    is_self = record.decision.spec.attention_type == "self"  # type: ignore[union-attr]
    if is_self != (query is key):
        return None
    sizes = _sizes(query, key, owner)
    masking = None if sizes is None else _masking(values["attn_mask"], values["key_padding_mask"], values["is_causal"], sizes)
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
    sizes = _sizes(x, x, attention)
    masking = None if sizes is None else _masking(values["src_mask"], values["src_key_padding_mask"], values["is_causal"], sizes)
    return None if masking is None else TECall((x,), {"attention_mask": masking[0], "self_attn_mask_type": masking[1]})


def _decoder_layer(record: FusedRecord, values: dict[str, Any]) -> TECall | None:
    """nn.TransformerDecoderLayer.forward."""
    attention: Any = record.role("owner")[0].self_attn
    x, memory = values["tgt"], values["memory"]
    if x.dim() != 3 or memory.dim() != 3:
        return None
    sizes, cross = _sizes(x, x, attention), _sizes(x, memory, attention)
    own = None if sizes is None else _masking(values["tgt_mask"], values["tgt_key_padding_mask"], values["tgt_is_causal"], sizes)
    other = (
        None
        if cross is None
        else _masking(values["memory_mask"], values["memory_key_padding_mask"], values["memory_is_causal"], cross)
    )
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
    (_, x), *others = values.items()
    parameters = _signature(cast("Hashable", owner_class(record.role("owner")[0]))).parameters
    plain = all(_is_default(value, parameters[name]) for name, value in others)
    return TECall((x,)) if isinstance(x, Tensor) and x.dim() == 3 and plain else None


def _is_default(value: Any, parameter: inspect.Parameter) -> bool:
    """Whether an argument says nothing: left out, None, or an empty ``*args`` or ``**kwargs``."""
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return not value
    return value is None or (not isinstance(value, Tensor) and value == parameter.default)


TRANSLATIONS: dict[str, Translate] = {
    "torch-attention": _multi_head_attention,
    "torch-encoder-layer": _encoder_layer,
    "torch-decoder-layer": _decoder_layer,
    "transformer-block": _one_tensor,
}
"""By the rule that made the fusion."""


@dataclass(frozen=True)
class _Sizes:
    batch: int
    heads: int
    queries: int
    keys: int


def _sizes(query: Tensor, key: Tensor, attention: Any) -> _Sizes | None:
    """Sizes of one attention; None for batches that do not belong together, about which the original complains."""
    batch, length = (0, 1) if attention.batch_first else (1, 0)
    if query.shape[batch] != key.shape[batch]:
        return None
    return _Sizes(query.shape[batch], attention.num_heads, query.shape[length], key.shape[length])


def _masking(mask: Tensor | None, padding: Tensor | None, is_causal: bool, sizes: _Sizes) -> tuple[Tensor | None, str] | None:
    """(mask with True = masked out, TE's mask type) for torch's masks; None for one that is more than a mask.

    Args:
        mask: [queries, keys] or [batch * heads, queries, keys]; True or -inf is masked out.
        padding: [batch, keys]; True or -inf is masked out.
        is_causal: the caller's word that ``mask`` is the causal one; torch demands the mask, too.
        sizes: of the attention.
    """
    if (is_causal and mask is None) or not all(map(_is_mask, (mask, padding))):
        return None
    if is_causal and padding is None:  # the corner of the diagonal is TE's only where it is the only one
        return (None, "causal") if sizes.queries == sizes.keys else None
    if mask is None and padding is None:
        return None, "no_mask"
    combined: Tensor | None = None
    for part in (*(() if mask is None else (_widened(mask, sizes),)), *(() if padding is None else (_padded(padding, sizes),))):
        if part is None:
            return None
        combined = part if combined is None else combined | part
    assert combined is not None  # one of the two was given
    if bool(combined.all(dim=-1).any()):
        return None  # a query that sees nothing: NaN in torch, something else in TE
    return combined, "arbitrary"


def _is_mask(mask: Tensor | None) -> bool:
    """Nothing, or a mask of a dtype that torch takes and that learns nothing."""
    return mask is None or mask.dtype is torch.bool or (mask.is_floating_point() and not mask.requires_grad)


def _widened(mask: Tensor, sizes: _Sizes) -> Tensor | None:
    """An attention mask as [batch or 1, heads or 1, queries, keys]; None for another shape or a bias."""
    scores = (sizes.queries, sizes.keys)
    fits = mask.shape == scores or mask.shape == (sizes.batch * sizes.heads, *scores)
    out = _as_bool(mask) if fits else None
    if out is None:
        return None
    return out.view(1, 1, *scores) if mask.dim() == 2 else out.view(sizes.batch, sizes.heads, *scores)


def _padded(padding: Tensor, sizes: _Sizes) -> Tensor | None:
    """A padding mask as [batch, 1, 1, keys]; None for another shape or a bias."""
    out = _as_bool(padding) if padding.shape == (sizes.batch, sizes.keys) else None
    return None if out is None else out[:, None, None, :]


def _as_bool(mask: Tensor) -> Tensor | None:
    """A float mask of 0 and -inf as booleans; None when it holds other values."""
    if mask.dtype is torch.bool:
        return mask
    out = mask.isneginf()
    return out if bool((out | (mask == 0)).all()) else None
