"""Spec → module: the pure-PyTorch twin, or the real Transformer Engine module.

The only place that constructs TE modules.  Constructor arguments are feature-tested against the installed version's signature,
never chosen by version number.  Parameters are made on the meta device: the rewrite assigns the model's own, so nothing is
initialised and no random number is drawn.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from te_convert import reference
from te_convert.errors import EnvironmentLacksError
from te_convert.replacements.experts import META, experts_class, grouped_arguments
from te_convert.replacements.parallel import Parallel, parallel_arguments
from te_convert.replacements.specs import (
    DotProductAttentionSpec,
    GroupedExpertsSpec,
    LayerNormLinearSpec,
    LayerNormSpec,
    LinearSpec,
    MultiheadAttentionSpec,
    RMSNormSpec,
    Spec,
    TransformerLayerSpec,
    torch_dtype,
)
from te_convert.replacements.te_support import import_te, lacks, te_class


def module_class(spec: Spec, backend: str) -> type[nn.Module]:
    """The class that carries out a spec on a backend ("reference" or "te").

    Raises:
        EnvironmentLacksError: the backend is "te", and its import fails or this version has no such class.
    """
    if isinstance(spec, GroupedExpertsSpec):
        return experts_class(_te_class("GroupedLinear", backend))
    return _te_class(spec.name.removeprefix("te."), backend)


def _te_class(name: str, backend: str) -> type[nn.Module]:
    if backend == "reference":
        return _TWINS[name]
    cls = te_class(name)
    if name == "DotProductAttention":
        # Queries, keys and values that are columns of one fused projection: TE finds that out by itself, needs no copy, and warns.
        warnings.filterwarnings("ignore", "Relying on pointer-based detection of packed q/k/v layouts", DeprecationWarning)
    return cls


def why_not_built(spec: Spec, backend: str) -> str:
    """What a backend lacks for a spec, in words, or "": an old Transformer Engine takes fewer arguments.

    Raises:
        EnvironmentLacksError: the backend is "te" and its import fails.
    """
    if backend == "reference":
        return ""
    import_te()
    try:
        cls: Any = te_class(spec.name.removeprefix("te."))
        return _lacks(spec, cls)
    except EnvironmentLacksError as error:
        return str(error)


def new_module(cls: type[nn.Module], spec: Spec, backend: str, parallel: Parallel | None = None) -> Any:
    """An instance of ``cls``, which is the backend's class for ``spec`` or derived from it, with its parameters on meta.

    With ``parallel`` it is one rank's part of the module.

    Raises:
        EnvironmentLacksError: the installed Transformer Engine is too old for the spec.
    """
    why = why_not_built(spec, backend)
    if why:
        raise EnvironmentLacksError(f"the installed Transformer Engine is too old: {why}", "upgrade transformer-engine")
    base = module_class(spec, backend)
    args, kwargs = constructor_arguments(spec, base)
    if parallel is not None:
        kwargs |= parallel_arguments(spec, parallel)
        why = lacks(spec, base, args, kwargs)
        if why:
            raise EnvironmentLacksError(f"the installed Transformer Engine is too old: {why}", "upgrade transformer-engine")
    return cls(*args, **kwargs)


@functools.lru_cache(maxsize=4096)
def _lacks(spec: Spec, cls: type[nn.Module]) -> str:
    if isinstance(spec, GroupedExpertsSpec):
        return lacks(spec, cls, *grouped_arguments(cls, 1, 1, 1, spec.dtype))
    return lacks(spec, cls, *constructor_arguments(spec, cls))


_TWINS: dict[str, type[nn.Module]] = {
    "Linear": reference.Linear,
    "LayerNorm": reference.LayerNorm,
    "RMSNorm": reference.RMSNorm,
    "LayerNormLinear": reference.LayerNormLinear,
    "LayerNormMLP": reference.LayerNormMLP,
    "DotProductAttention": reference.DotProductAttention,
    "GroupedLinear": reference.GroupedLinear,
    "MultiheadAttention": reference.MultiheadAttention,
    "TransformerLayer": reference.TransformerLayer,
}


def constructor_arguments(spec: Spec, cls: type[nn.Module]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of ``cls`` for a spec, with parameters on meta.

    ``te.LayerNorm`` and ``te.RMSNorm`` took ``hidden_size`` and ``params_dtype`` before 1.13 renamed them; the signature decides.
    """
    names = inspect.signature(cls.__init__).parameters
    if isinstance(spec, LayerNormSpec | RMSNormSpec):
        return _norm_arguments(spec, names)
    if isinstance(spec, DotProductAttentionSpec):
        return (spec.num_attention_heads, _channels(spec)), {
            "num_gqa_groups": spec.num_gqa_groups,
            "attention_dropout": spec.attention_dropout,
            "qkv_format": "bshd",
            "attn_mask_type": "no_mask",
            "softmax_scale": spec.softmax_scale,
            "attention_type": "cross",  # padding of queries and of keys is given apart
            **({"softcap": spec.softcap} if spec.softcap else {}),  # not known to TE before 2.20
            **({"softmax_type": spec.softmax_type} if spec.softmax_type != "vanilla" else {}),  # nor this before 2.8
        }
    if isinstance(spec, GroupedExpertsSpec):
        return (spec,), {}
    keywords: dict[str, Any] = {"bias": spec.bias, "params_dtype": torch_dtype(spec.dtype), "device": META}
    keywords |= {name: _keep for name in ("init_method", "output_layer_init_method") if name in names}
    if isinstance(spec, MultiheadAttentionSpec | TransformerLayerSpec):
        return attention_arguments(spec, keywords)
    if isinstance(spec, LinearSpec):
        return (spec.in_features, spec.out_features), keywords
    keywords |= {"eps": spec.eps, "normalization": spec.normalization, "zero_centered_gamma": spec.zero_centered_gamma}
    if isinstance(spec, LayerNormLinearSpec):
        return (spec.in_features, spec.out_features), keywords
    return (spec.hidden_size, spec.ffn_hidden_size), {**keywords, "activation": spec.activation}


def attention_arguments(
    spec: MultiheadAttentionSpec | TransformerLayerSpec, keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the modules that hold an attention: one fused projection with rows [q; k; v], not interleaved by head."""
    keywords = {**keywords, "fuse_qkv_params": True, "qkv_weight_interleaved": False}
    if isinstance(spec, MultiheadAttentionSpec):
        return (spec.hidden_size, spec.num_attention_heads), {
            **keywords,
            "attention_dropout": spec.attention_dropout,
            "attn_mask_type": "no_mask",
            "attention_type": spec.attention_type,
            "qkv_format": spec.qkv_format,
        }
    return (spec.hidden_size, spec.ffn_hidden_size, spec.num_attention_heads), {
        **keywords,
        "layernorm_epsilon": spec.eps,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "self_attn_mask_type": spec.self_attn_mask_type,
        "normalization": spec.normalization,
        "zero_centered_gamma": spec.zero_centered_gamma,
        "activation": spec.activation,
        "output_layernorm": spec.post_layernorm,
        "apply_residual_connection_post_layernorm": spec.post_layernorm,
        "parallel_attention_mlp": spec.parallel_attention_mlp,
        "layer_type": spec.layer_type,
        "attn_input_format": spec.attn_input_format,
    }


def _norm_arguments(
    spec: LayerNormSpec | RMSNormSpec, names: Mapping[str, inspect.Parameter]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in names.values())
    dtype_name = "dtype" if "dtype" in names or takes_any else "params_dtype"
    return (spec.normalized_shape,), {
        "eps": spec.eps,
        "zero_centered_gamma": spec.zero_centered_gamma,
        dtype_name: torch_dtype(spec.dtype),
        "device": META,
    }


def _channels(spec: DotProductAttentionSpec) -> int | tuple[int, int]:
    """One size where queries and values have the same, as every version of TE takes it."""
    query, value = spec.kv_channels
    return query if query == value else (query, value)


def _keep(weight: Any) -> None:
    """An ``init_method`` that leaves the weight alone."""


def parameter_names(spec: Spec) -> tuple[str, ...]:
    """Names of the Parameters of a spec's module, TE's and the twin's alike."""
    if isinstance(spec, LinearSpec):
        return ("weight", "bias") if spec.bias else ("weight",)
    if isinstance(spec, LayerNormSpec | RMSNormSpec):
        return ("weight", "bias") if isinstance(spec, LayerNormSpec) else ("weight",)
    if isinstance(spec, DotProductAttentionSpec) and spec.softmax_type == "learnable":
        return ("softmax_offset",)
    if isinstance(spec, DotProductAttentionSpec | MultiheadAttentionSpec | TransformerLayerSpec):
        return ()  # none of its own: its parts have them
    if isinstance(spec, GroupedExpertsSpec):
        return tuple(f"{layer}.weight{index}" for layer in ("fc1", "fc2") for index in range(spec.num_gemms))
    norm = ("layer_norm_weight", "layer_norm_bias") if spec.normalization == "LayerNorm" else ("layer_norm_weight",)
    if isinstance(spec, LayerNormLinearSpec):
        return (*norm, "weight", "bias") if spec.bias else (*norm, "weight")
    biases = ("fc1_bias", "fc2_bias") if spec.bias else ()
    return (*norm, "fc1_weight", "fc2_weight", *biases)
