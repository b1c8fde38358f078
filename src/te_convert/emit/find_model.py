"""Finding the model that a Python file or module offers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

from te_convert.emit.user_code import one_line
from te_convert.errors import InputError

STANDARD_NAMES = ("model", "build_model")
_OFFER = "offer `model` or `build_model()`"


@dataclass(frozen=True)
class Found:
    """A model that a namespace offers.

    Attributes:
        entry: its name in the namespace.
        value: the instance, or what is called without arguments to get one.
    """

    entry: str
    value: Any

    @property
    def label(self) -> str:
        """The entry as it is used: ``model``, ``build_model()`` or ``Net()``."""
        return self.entry if isinstance(self.value, nn.Module) else f"{self.entry}()"

    def build(self) -> nn.Module:
        """The model; runs the source's own code, whose exceptions pass through.

        Raises:
            InputError: what was returned is not a module.
        """
        made = self.value if isinstance(self.value, nn.Module) else self.value()
        if not isinstance(made, nn.Module):
            raise InputError(f"{self.label} returned {_kind(made)}, not a torch.nn.Module", "return the model itself")
        return made


def find_model(namespace: ModuleType, name: str | None, where: str) -> Found:
    """The named model, or the one that the namespace offers.

    Without a name: ``model``, then ``build_model()``, then the only module instance, then the only module class that the
    namespace defines and that needs no arguments.

    Args:
        namespace: the executed file or module.
        name: a (dotted) name in it, or None.
        where: how the user called it, for messages.

    Raises:
        InputError: nothing of that name, nothing usable, or several candidates.
    """
    if name is not None:
        return _named(namespace, name, where)
    for standard in STANDARD_NAMES:
        value = getattr(namespace, standard, None)
        if isinstance(value, nn.Module) or (callable(value) and not _required(value)):
            return Found(standard, value)
    if callable(value := getattr(namespace, "build_model", None)):
        raise _needs_arguments("build_model", value, where)
    return _only(namespace, where)


def _named(namespace: ModuleType, name: str, where: str) -> Found:
    value: Any = namespace
    for part in name.split("."):
        if not hasattr(value, part):
            raise InputError(f"{where} has no {name!r}{_candidates(namespace)}", f"name one that it has, or {_OFFER}")
        value = getattr(value, part)
    if isinstance(value, nn.Module):
        return Found(name, value)
    if isinstance(value, type) and not issubclass(value, nn.Module):
        raise InputError(f"{name} in {where} is a class, but not a torch.nn.Module", _OFFER)
    if not callable(value):
        raise InputError(f"{name} in {where} is {_kind(value)}, not a torch.nn.Module", _OFFER)
    if _required(value):
        raise _needs_arguments(name, value, where)
    return Found(name, value)


def _only(namespace: ModuleType, where: str) -> Found:
    instances = _instances(namespace)
    if len(instances) == 1:
        return Found(*next(iter(instances.items())))
    classes = _classes(namespace)
    ready = {name: cls for name, cls in classes.items() if not _required(cls)}
    choices = list(instances) or list(ready)
    if len(choices) > 1:
        raise InputError(f"{where} has several models: {_list(choices)}", f"name one: {where}:{choices[0]}")
    if len(ready) == 1:
        return Found(*next(iter(ready.items())))
    if len(classes) == 1:
        raise _needs_arguments(*next(iter(classes.items())), where)
    raise InputError(f"{where} has no model{_odd_model(namespace)}{_candidates(namespace)}", _OFFER + " in it")


def _instances(namespace: ModuleType) -> dict[str, nn.Module]:
    """Public module instances, each object once; those without parameters (losses) count only when there is nothing else."""
    unique: dict[int, tuple[str, nn.Module]] = {}
    for name, value in vars(namespace).items():
        if isinstance(value, nn.Module) and not name.startswith("_"):
            unique.setdefault(id(value), (name, value))
    every = dict(unique.values())
    weighty = {name: value for name, value in every.items() if next(value.parameters(), None) is not None}
    return weighty or every


def _classes(namespace: ModuleType) -> dict[str, type[nn.Module]]:
    return {
        name: value
        for name, value in vars(namespace).items()
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ == namespace.__name__
        and not inspect.isabstract(value)
        and not name.startswith("_")
    }


def _required(value: Callable[..., Any]) -> list[str]:
    """Names of the parameters without a default."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in kinds]


def _needs_arguments(name: str, value: Callable[..., Any], where: str) -> InputError:
    hint = f"add to {where} a function build_model() that returns {name}(...) with its arguments"
    if name == "build_model":
        hint = "give its parameters default values"
    return InputError(f"{name} in {where} needs arguments: {', '.join(_required(value))}", hint)


def _odd_model(namespace: ModuleType) -> str:
    value = getattr(namespace, "model", None)
    return "" if value is None or callable(value) else f" (`model` is {_kind(value)})"


def _candidates(namespace: ModuleType) -> str:
    classes = [f"{name}({', '.join(_required(cls))})" for name, cls in _classes(namespace).items()]
    functions = [
        f"{name}({', '.join(_required(value))})"
        for name, value in vars(namespace).items()
        if inspect.isfunction(value) and value.__module__ == namespace.__name__ and not name.startswith("_")
    ]
    parts = [
        f"{title} {_list(names)}"
        for title, names in (("instances", list(_instances(namespace))), ("classes", classes), ("functions", functions))
        if names
    ]
    return f"; it has {', '.join(parts)}" if parts else ""


def _list(names: list[str], most: int = 8) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _kind(value: object) -> str:
    if isinstance(value, ModuleType):
        return f"the module {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {one_line(name)}"
