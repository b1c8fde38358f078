"""Which modules and parameters a model holds under several names."""

from __future__ import annotations

from collections import defaultdict

from torch import nn


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


def find_parents(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """id(module) → every (parent, attribute) that holds it."""
    parents: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                parents[id(child)].append((parent, name))
    return parents
