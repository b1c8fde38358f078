"""Checkpoints in the original layout read into fused modules: a load hook on the module that holds all members."""

from __future__ import annotations

from typing import Any

from torch import nn

from te_convert.facts.sharing import module_names
from te_convert.match.groups import inside
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.rewrite.carry_over import remove_hook

_SCOPE = "_te_convert_scope"
"""Where a module keeps the fused modules that it is the scope of."""


def watch_scope(scope: nn.Module, module: nn.Module) -> None:
    """Let ``scope.load_state_dict`` accept the original's keys for a fused module."""
    modules = scope.__dict__.setdefault(_SCOPE, [])
    modules.append(module)
    if len(modules) == 1:
        scope.register_load_state_dict_pre_hook(accept_original)


def unwatch_scope(scope: nn.Module, module: nn.Module) -> None:
    """Undo :func:`watch_scope`."""
    modules = scope.__dict__.get(_SCOPE, [])
    if module in modules:
        modules.remove(module)
    if not modules:
        scope.__dict__.pop(_SCOPE, None)
        remove_hook(scope._load_state_dict_pre_hooks, accept_original)


def accept_original(scope: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rewrite a state dict's original entries of every fused module below ``scope`` to TE's names and layout, in place.

    A fusion of which only some tensors are there is left alone: the load then reports what is missing.
    """
    used: set[str] = set()
    fused = scope.__dict__.get(_SCOPE, ())
    names = module_names(scope) if fused else {}
    for module in fused:
        record = module.__dict__[SITE_ATTRIBUTE]
        for op in (record.whole or record.decision).weights.ops:
            keys = [prefix + source for source in op.sources]
            if keys and all(key in state_dict for key in keys):
                tensor = op.forward([state_dict[key] for key in keys])
                for name in names[id(module)]:
                    state_dict[f"{prefix}{name}.{op.dest}" if name else prefix + op.dest] = tensor
                used.update(keys)
        used |= _aliases(record, names, prefix) & state_dict.keys() if used else set()
    for key in used:
        del state_dict[key]


def _aliases(record: Any, names: dict[int, list[str]], prefix: str) -> set[str]:
    """Keys of the members' parameters under every name that the scope has for them."""
    leaves: dict[str, list[str]] = {}
    for source in record.decision.weights.sources:
        owner, _, leaf = source.rpartition(".")
        leaves.setdefault(owner, []).append(leaf)
    found = set()
    for (_, module), member in zip(record.members, record.decision.members, strict=True):
        for name in names.get(id(module), ()):
            head = f"{prefix}{name}." if name else prefix
            found |= {head + leaf for leaf in leaves.get(inside(member.fqn, record.decision.scope), ())}
    return found
