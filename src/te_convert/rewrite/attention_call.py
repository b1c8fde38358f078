"""One call of an attention function, and how te.DotProductAttention computes the same, if it can."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.facts.attention import BIAS, DIRECT, SINK, AttentionFunction, is_bias_shape, is_understood
from te_convert.replacements.specs import DotProductAttentionSpec
from te_convert.rewrite.attention_bias import as_bias, combined_bias
from te_convert.rewrite.attention_masks import MaskFacts, Pattern, mask_facts

_SAME = 1e-6
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AttentionInput:
    """What an attention function was called with.

    Attributes:
        query: [b, h, s, d]; ``key`` and ``value`` [b, groups, s, d].
        mask: as Transformers made it, or None.
        base: the implementation that the caller had before the conversion.
        function: that implementation's function.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float | None
    dropout: float
    options: dict[str, Any]
    base: str
    function: AttentionFunction

    @property
    def drops(self) -> float:
        """The probability with which the original drops: eager attention asks the module's mode, SDPA does not."""
        return 0.0 if self.base == "eager" and not self.module.training else self.dropout

    @property
    def bias(self) -> Any:
        """What a call of a site with a bias brings."""
        return self.options.get(BIAS)

    def run(self) -> tuple[Tensor, Tensor | None]:
        """The original function's result: output [b, s, h, d], and the probabilities where it has them."""
        return self.function(
            self.module,
            self.query,
            self.key,
            self.value,
            self.mask,
            dropout=self.dropout,
            scaling=self.scaling,
            **self.options,
        )


@dataclass(frozen=True)
class Masking:
    """How TE masks a call.

    Attributes:
        mask_type: TE's attn_mask_type.
        window: (left, right), inclusive, or None.
        keys: how many of the keys are used, the first ones.
        padding: True for padding, of queries [b, 1, 1, sq] and of keys [b, 1, 1, skv]; None without.
        valid: bool [b, sq]: queries whose result is the original's; None for all.  The others are padding.
        bias: what is added to the scores of these keys, [1 or b, 1 or h, sq, keys]; None without.
        hidden: bool [1 or b, 1 or h, sq, 1]: queries that see no key, whose result is 0; None where that cannot be.
    """

    mask_type: str
    keys: int
    window: tuple[int, int] | None = None
    padding: tuple[Tensor, Tensor] | None = None
    valid: Tensor | None = None
    bias: Tensor | None = None
    hidden: Tensor | None = None


@dataclass(frozen=True)
class AttentionRun:
    """A call together with TE's way to mask it: what verification repeats."""

    call: AttentionInput
    masking: Masking

    def original(self) -> Tensor:
        """The original function's output [b, s, h, d], zero where a query is padding."""
        return self.visible(self.call.run()[0])

    def visible(self, output: Tensor) -> Tensor:
        """An output with zeros where a query is padding, whose result nobody may use."""
        if self.masking.valid is None:
            return output
        return output.masked_fill(~self.masking.valid[:, :, None, None], 0.0)

    def converted(self, module: nn.Module) -> Tensor:
        """te.DotProductAttention on the call: [b, s, h, d]."""
        masking, keys = self.masking, self.masking.keys
        query, key, value = (tensor.transpose(1, 2) for tensor in (self.call.query, self.call.key, self.call.value))
        device = query.device.type
        if torch.is_autocast_enabled(device):
            query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
        options: dict[str, Any] = {"attn_mask_type": masking.mask_type}
        if masking.window is not None:
            options["window_size"] = masking.window
        elif "causal" in masking.mask_type:  # else the constructor's, which is that of no mask: TE corrects it and warns
            options["window_size"] = (-1, 0)
        if masking.padding is not None:
            options["attention_mask"] = masking.padding
        if masking.bias is not None:
            bias = masking.bias.to(query.dtype).contiguous()
            options |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
        output: Tensor = module(query, key[:, :keys], value[:, :keys], **options)
        output = output.view(*output.shape[:-1], query.shape[2], value.shape[3])
        return output if masking.hidden is None else output.masked_fill(masking.hidden.transpose(1, 2), 0.0)


def fits_module(call: AttentionInput, spec: DotProductAttentionSpec, module: Any, backend: str) -> bool:
    """Whether heads, sizes, dtype, scale, softcap and dropout of a call are those that the TE module was built for."""
    query, key, value = call.query, call.key, call.value
    if query.dim() != 4 or key.dim() != 4 or key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0]:
        return False
    sizes = (query.shape[1], key.shape[1], (query.shape[3], value.shape[3]))
    if sizes != (spec.num_attention_heads, spec.num_gqa_groups, spec.kv_channels) or key.shape[3] != query.shape[3]:
        return False
    groups = None if call.base == DIRECT else getattr(call.module, "num_key_value_groups", None)
    if groups is not None and groups * key.shape[1] != query.shape[1]:
        return False
    if min(query.numel(), key.numel(), value.numel()) == 0 or (spec.bias and not _fits_bias(call)):
        return False
    return _fits_dtypes(call, backend) and _fits_numbers(call, spec, module)


def _fits_bias(call: AttentionInput) -> bool:
    """A plain tensor for all samples or for each, and all heads or each; of the queries' dtype, unless autocast makes it so."""
    query, bias = call.query, call.bias
    if type(bias) not in (Tensor, nn.Parameter) or not bias.is_floating_point():
        return False
    fits = is_bias_shape(tuple(bias.shape), (*query.shape[:3], call.key.shape[2]))
    return fits and (bias.dtype == query.dtype or torch.is_autocast_enabled(query.device.type))


def _fits_dtypes(call: AttentionInput, backend: str) -> bool:
    """One dtype that TE has (float64 only on twins, to tell rounding from error); under autocast all are cast to its own."""
    dtypes = {call.query.dtype, call.key.dtype, call.value.dtype}
    known = dtypes <= {*_DTYPES, *((torch.float64,) if backend == "reference" else ())}
    return known and (len(dtypes) == 1 or torch.is_autocast_enabled(call.query.device.type))


def _fits_numbers(call: AttentionInput, spec: DotProductAttentionSpec, module: Any) -> bool:
    default = float(spec.kv_channels[0]) ** -0.5
    scale, planned = (default if value is None else value for value in (call.scaling, spec.softmax_scale))
    softcap = call.options.get("softcap") or 0.0
    if not isinstance(scale, int | float) or abs(scale - planned) > _SAME * abs(planned) or softcap != spec.softcap:
        return False
    if softcap and getattr(module, "softcap", 0.0) != softcap:  # an older TE, which has no softcap
        return False
    if getattr(module, "softmax_type", "vanilla") != spec.softmax_type:  # or no sinks
        return False
    return call.drops == (spec.attention_dropout if module.training else 0.0)


def understands(call: AttentionInput, spec: DotProductAttentionSpec, module: Any) -> bool:
    """Whether further arguments leave the result alone: an unknown tensor does not, nor does a request for the probabilities.

    The bias of a site that has one is known, and so are sinks that are the TE module's own.
    """
    sink = call.options.get(SINK)
    if spec.softmax_type == "learnable" and sink is not module.softmax_offset:
        return False
    known = {*([BIAS] if spec.bias else []), *([SINK] if spec.softmax_type == "learnable" else [])}
    options = {name: value for name, value in call.options.items() if name not in known}
    tensors = tuple(name for name, value in options.items() if _holds_tensor(value))
    plain = {name: value for name, value in options.items() if name not in tensors and value is not None}
    return not plain.get("output_attentions") and not is_understood(call.function, tensors, plain)


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(isinstance(item, Tensor) for item in value))


def find_masking(call: AttentionInput, biased: bool = False) -> Masking | None:
    """How TE masks the call as the original does, or None; with the bias that the calls of its site bring.

    A mask that TE has no type for becomes a bias of the scores.
    """
    masking = _mask(call)
    if masking is not None:
        return replace(masking, bias=call.bias[..., : masking.keys]) if biased else masking
    if call.mask is None or (call.base == DIRECT and call.options.get("is_causal")):
        return None
    sizes = (*call.query.shape[:3], call.key.shape[2])
    if biased:
        found = combined_bias(call.mask, call.bias, sizes, call.query, eager=call.base == "eager")
    else:
        found = as_bias(call.mask, sizes, call.query, eager=call.base == "eager")
    return None if found is None else Masking("no_mask", sizes[3], bias=found[0], hidden=found[1])


def _mask(call: AttentionInput) -> Masking | None:
    queries, keys = call.query.shape[2], call.key.shape[2]
    if call.base == DIRECT:
        return _direct(call, queries, keys)
    if call.mask is None:
        return _without_mask(call, queries, keys)
    facts = mask_facts(call.mask)
    if facts is None or not facts.fits(call.mask, queries, keys) or facts.pattern is None or not facts.right:
        return None
    if facts.pattern.causal:
        return _causal(facts, facts.pattern, queries, keys)
    if facts.valid is not None:
        return None if facts.pattern.window is not None else _padded(facts.valid, queries, keys)
    if facts.pattern.window is None:
        return Masking("no_mask", keys)
    around = facts.pattern.window
    return Masking("no_mask", keys, (around, around)) if facts.shift == 0 and queries == keys else None


def _direct(call: AttentionInput, queries: int, keys: int) -> Masking | None:
    """torch's own function: its causal mask starts in the top left corner, also for a single query."""
    if call.mask is not None:
        return None
    if not call.options.get("is_causal"):
        return Masking("no_mask", keys)
    return Masking("causal", queries) if queries <= keys else None


def _without_mask(call: AttentionInput, queries: int, keys: int) -> Masking | None:
    """SDPA is causal from the top left where the module is; eager attention sees everything."""
    told = call.options.get("is_causal")
    causal = bool(getattr(call.module, "is_causal", True) if told is None else told)
    if call.base != "sdpa" or queries == 1 or not causal:
        return Masking("no_mask", keys)
    return Masking("causal", queries) if queries <= keys else None  # keys behind the last query are never seen


def _causal(facts: MaskFacts, pattern: Pattern, queries: int, keys: int) -> Masking | None:
    """A query at the end of a cache, or of its own sequence; padding on the right is behind all queries that are none."""
    if facts.shift is None or facts.shift != keys - queries:
        return None
    window = None if pattern.window is None else (pattern.window - 1, 0)
    if facts.valid is None:
        return Masking("causal" if queries == keys else "causal_bottom_right", keys, window)
    return Masking("causal", keys, window, valid=facts.valid) if queries == keys else None


def _padded(valid: Tensor, queries: int, keys: int) -> Masking:
    """Padded keys are left out; all queries run, as they do in the original."""
    padded = valid.logical_not()[:, None, None, :]
    none = torch.zeros(valid.shape[0], 1, 1, queries, dtype=torch.bool, device=valid.device)
    return Masking("padding", keys, padding=(none, padded))
