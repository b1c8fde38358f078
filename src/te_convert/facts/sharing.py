"""Which modules and parameters a model holds under several names."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.facts.stand_in import has_no_shape


def module_names(model: nn.Module) -> dict[int, list[str]]:
    """id(module) → every name under which the model holds it, canonical (first) name first."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[id(module)].append(name)
    return names


def parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """id(parameter) → every name under which distinct modules hold it; more than one name is a tie."""
    names: dict[int, list[str]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names[id(parameter)].append(f"{prefix}.{name}" if prefix else name)
    return names


def find_shared(model: nn.Module, copied: nn.Module) -> str | None:
    """Name of a module, or of a parameter or its memory, that a copy has in common with its model; None when it is a true copy."""
    modules = {id(module) for module in model.modules()}
    for name, module in copied.named_modules():
        if id(module) in modules:
            return name or "the model itself"
    places = {place for parameter in model.parameters() for place in _places(parameter)}
    return next((name for name, parameter in copied.named_parameters() if places & set(_places(parameter))), None)


def _places(parameter: nn.Parameter) -> list[tuple[str, int]]:
    """The object, and the address of its memory where it is a plain tensor that has some."""
    found = [("object", id(parameter))]
    kind: Any = type(parameter.data)
    if has_no_shape(parameter) or kind is not Tensor or parameter.is_meta or parameter.layout is not torch.strided:
        return found
    if parameter.numel():
        found.append(("memory", parameter.untyped_storage().data_ptr()))
    return found


Parents = dict[int, list[tuple[nn.Module, str]]]


def find_parents(model: nn.Module) -> Parents:
    """id(module) → every (parent, attribute) that holds it."""
    parents: Parents = defaultdict(list)
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                parents[id(child)].append((parent, name))
    return parents
