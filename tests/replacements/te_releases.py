"""Releases of Transformer Engine as their recorded signatures (te_signatures.json) describe them: enough to build arguments for."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "te_signatures.json").read_text(encoding="utf-8"))
VERSIONS: tuple[str, ...] = tuple(RECORDED["versions"])


def described(name: str, version: str) -> Any:
    """What was recorded under a name for a version, or None."""
    return next((entry["is"] for entry in RECORDED[name] if version in entry["versions"].split()), None)


def signature(text: str) -> inspect.Signature:
    """Of a recorded method, with ``self``."""
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    for word in text.split():
        if word.startswith("**"):
            parameters.append(inspect.Parameter(word[2:], inspect.Parameter.VAR_KEYWORD))
        elif word.startswith("*"):
            kind = inspect.Parameter.KEYWORD_ONLY
            if word != "*":
                parameters.append(inspect.Parameter(word[1:], inspect.Parameter.VAR_POSITIONAL))
        else:
            default = None if word.endswith("=") else inspect.Parameter.empty
            parameters.append(inspect.Parameter(word.removesuffix("="), kind, default=default))
    return inspect.Signature(parameters)


def release_class(name: str, version: str) -> type[nn.Module] | None:
    """A class that takes the arguments that TE's did, and makes nothing."""
    found = described(name, version)
    if found is None:
        return None
    told = signature(found["init"])

    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        self.__dict__["bound"] = told.bind(self, *args, **kwargs)

    init.__signature__ = told  # type: ignore[attr-defined]
    return type(name, (nn.Module,), {"__init__": init, "__module__": f"transformer_engine.pytorch.{name.lower()}"})


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> ModuleType:
    """Put a release's classes, activations and functions in ``sys.modules``."""
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.module.layernorm_mlp")
    package, te, mlp = (ModuleType(name) for name in names)
    for module in (package, te, mlp):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    package.pytorch = te  # type: ignore[attr-defined]
    for name in RECORDED:
        if name[0].isupper() and (cls := release_class(name, version)) is not None:
            setattr(te, name, cls)
    mlp._act_func = look_up(described("activations", version).split())  # type: ignore[attr-defined]
    return te


def look_up(known: list[str]) -> Callable[..., tuple[str, ...]]:
    """TE's function of the same purpose: kernels of an activation, or an exception."""

    def act_func(activation: str, recipe: Any = None) -> tuple[str, ...]:
        if activation not in known:
            raise NotImplementedError(f"Activation type {activation} is not supported!")
        return (activation,)

    return act_func
