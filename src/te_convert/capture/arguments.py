"""What every public function checks about its arguments before it does anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

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
