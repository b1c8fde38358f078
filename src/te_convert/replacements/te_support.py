"""What the installed Transformer Engine can build: its classes, the arguments that they take, the activations that they know.

Found out by looking at it, never by its version number.  Signatures of the releases from 2.0 to 2.20 are kept in
``tests/replacements/te_signatures.json`` and tried one by one.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

from torch import nn

from te_convert.errors import EnvironmentLacksError
from te_convert.replacements.specs import LayerNormMLPSpec, Spec, TransformerLayerSpec

_UPGRADE = "upgrade transformer-engine"


def import_te() -> Any:
    """``transformer_engine.pytorch``.

    Raises:
        EnvironmentLacksError: its import fails.
    """
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # OSError, AssertionError, RuntimeError, ...: TE fails in many ways
        raise EnvironmentLacksError(
            f"Transformer Engine cannot be imported: {type(error).__name__}: {error}", "run te-convert doctor"
        ) from error


def te_class(name: str) -> type[nn.Module]:
    """One of TE's module classes.

    Raises:
        EnvironmentLacksError: TE's import fails, or this version has no such class.
    """
    cls = getattr(import_te(), name, None)
    if cls is None:
        raise EnvironmentLacksError(f"this Transformer Engine has no {name}", _UPGRADE)
    found: type[nn.Module] = cls
    return found


def lacks(spec: Spec, cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why TE's class cannot be built for a spec with these arguments, as one clause, or ""."""
    name = spec.name.removeprefix("te.")
    try:
        inspect.signature(cls.__init__).bind(None, *args, **kwargs)
    except TypeError as error:
        return f"{name}: {error}"
    if isinstance(spec, LayerNormMLPSpec | TransformerLayerSpec) and not _knows_activation(spec.activation):
        return f"{name} does not know the activation {spec.activation!r}"
    return ""


def _knows_activation(name: str) -> bool:
    """Whether TE's MLP finds its kernels; True where this version does not tell, since then its forward will."""
    module = sys.modules.get("transformer_engine.pytorch.module.layernorm_mlp")
    look_up = getattr(module, "_act_func", None)
    try:
        return look_up is None or bool(look_up(name))
    except Exception:  # NotImplementedError
        return False
