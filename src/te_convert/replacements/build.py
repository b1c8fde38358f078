"""Spec → module: the pure-PyTorch twin, or the real Transformer Engine module.

The only place that constructs TE modules.  Constructor arguments are feature-tested against the installed version's signature,
never chosen by version number.  Parameters are made on the meta device: the rewrite assigns the model's own, so nothing is
initialised and no random number is drawn.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from te_convert import reference
from te_convert.errors import EnvironmentLacksError
from te_convert.replacements.specs import LayerNormSpec, LinearSpec, Spec, torch_dtype

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
}


def constructor_arguments(spec: Spec, cls: type[nn.Module]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of ``cls`` for a spec, with parameters on meta.

    ``te.LayerNorm`` and ``te.RMSNorm`` took ``hidden_size`` and ``params_dtype`` before 1.13 renamed them; the signature decides.
    """
    names = inspect.signature(cls.__init__).parameters
    dtype = torch_dtype(spec.dtype)
    if isinstance(spec, LinearSpec):
        keywords: dict[str, Any] = {"bias": spec.bias, "params_dtype": dtype, "device": META}
        if "init_method" in names:
            keywords["init_method"] = _keep
        return (spec.in_features, spec.out_features), keywords
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in names.values())
    dtype_name = "dtype" if "dtype" in names or takes_any else "params_dtype"
    return (spec.normalized_shape,), {
        "eps": spec.eps,
        "zero_centered_gamma": spec.zero_centered_gamma,
        dtype_name: dtype,
        "device": META,
    }


def _keep(weight: Any) -> None:
    """An ``init_method`` that leaves the weight alone."""


def parameter_names(spec: Spec) -> tuple[str, ...]:
    """Names of the Parameters of a spec's module, TE's and the twin's alike."""
    if isinstance(spec, LinearSpec):
        return ("weight", "bias") if spec.bias else ("weight",)
    return ("weight", "bias") if isinstance(spec, LayerNormSpec) else ("weight",)
