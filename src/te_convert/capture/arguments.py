"""What every public function checks about its arguments before it does anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from te_convert.capture.fake import is_meta
from te_convert.errors import InputError


def require_module(value: Any, function: str, hint: str = "pass the model itself") -> None:
    """Only instances of ``nn.Module`` are models.

    Raises:
        InputError: it is something else; a class says that it has to be instantiated.
    """
    if isinstance(value, nn.Module):
        return
    if isinstance(value, type) and issubclass(value, nn.Module):
        raise InputError(
            f"{function} takes an nn.Module, got the class {value.__name__}", f"pass an instance: {value.__name__}(...)"
        )
    raise InputError(f"{function} takes an nn.Module, got {_kind(value)}", hint)


def require(value: Any, kind: type, text: str, hint: str) -> None:
    """A value of one class; ``text`` says who takes what.

    Raises:
        InputError: it is something else.
    """
    if not isinstance(value, kind):
        raise InputError(f"{text}, got {_kind(value)}", hint)


def require_weights(model: nn.Module) -> None:
    """A model whose weights have values.

    Raises:
        InputError: some are on meta.
    """
    if is_meta(model):
        hint = "load the weights first, or use te_convert.analyze for a plan"
        raise InputError("the model's weights are on the meta device", hint)


def check_pair(original: Any, converted: Any, steps: Any) -> None:
    """The arguments of verify().

    Raises:
        InputError: no modules, or no number of steps.
    """
    for model in (original, converted):
        require_module(model, "verify", "pass the original and the converted model")
    if not isinstance(steps, int) or steps < 0:
        raise InputError(f"verify takes a number of steps, got {steps!r}", "pass for instance steps=4, or 0 for none")


def as_path(value: Any, function: str) -> Path:
    """A path from a string or a path.

    Raises:
        InputError: it is neither.
    """
    if isinstance(value, str | os.PathLike):
        return Path(value)
    raise InputError(f"{function} takes a path, got {_kind(value)}", "pass a string or a pathlib.Path")


def _kind(value: Any) -> str:
    return type(value).__name__
