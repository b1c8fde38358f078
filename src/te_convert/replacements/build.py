"""Spec → module: the pure-PyTorch twin, or the real Transformer Engine module.

The only place that constructs TE modules.  Constructor arguments are feature-tested against the installed version's signature,
never chosen by version number.  Parameters are made on the meta device: the rewrite assigns the model's own, so nothing is
initialised and no random number is drawn.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from te_convert import reference
from te_convert.errors import EnvironmentLacksError
from te_convert.replacements.specs import (
    DotProductAttentionSpec,
    LayerNormLinearSpec,
    LayerNormSpec,
    LinearSpec,
    RMSNormSpec,
    Spec,
    torch_dtype,
)

META = "meta"  # the string: TE tests ``device == "meta"``, which is False for torch.device("meta")


def module_class(spec: Spec, backend: str) -> type[nn.Module]:
    """The class that carries out a spec on a backend ("reference" or "te").

    Raises:
        EnvironmentLacksError: the backend is "te" and its import fails.
    """
    name = spec.name.removeprefix("te.")
    if backend == "reference":
        return _TWINS[name]
    try:
        import transformer_engine.pytorch as te
    except Exception as error:  # OSError, AssertionError, RuntimeError, ...: TE fails in many ways
        raise EnvironmentLacksError(
            f"Transformer Engine cannot be imported: {type(error).__name__}: {error}", "run te-convert doctor"
        ) from error
    cls: type[nn.Module] = getattr(te, name)
    return cls


_TWINS: dict[str, type[nn.Module]] = {
    "Linear": reference.Linear,
    "LayerNorm": reference.LayerNorm,
    "RMSNorm": reference.RMSNorm,
    "LayerNormLinear": reference.LayerNormLinear,
    "LayerNormMLP": reference.LayerNormMLP,
    "DotProductAttention": reference.DotProductAttention,
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
        }
    keywords: dict[str, Any] = {"bias": spec.bias, "params_dtype": torch_dtype(spec.dtype), "device": META}
    keywords |= {name: _keep for name in ("init_method", "output_layer_init_method") if name in names}
    if isinstance(spec, LinearSpec):
        return (spec.in_features, spec.out_features), keywords
    keywords |= {"eps": spec.eps, "normalization": spec.normalization, "zero_centered_gamma": spec.zero_centered_gamma}
    if isinstance(spec, LayerNormLinearSpec):
        return (spec.in_features, spec.out_features), keywords
    return (spec.hidden_size, spec.ffn_hidden_size), {**keywords, "activation": spec.activation}


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
    if isinstance(spec, DotProductAttentionSpec):
        return ()
    norm = ("layer_norm_weight", "layer_norm_bias") if spec.normalization == "LayerNorm" else ("layer_norm_weight",)
    if isinstance(spec, LayerNormLinearSpec):
        return (*norm, "weight", "bias") if spec.bias else (*norm, "weight")
    biases = ("fc1_bias", "fc2_bias") if spec.bias else ()
    return (*norm, "fc1_weight", "fc2_weight", *biases)
