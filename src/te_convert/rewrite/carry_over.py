"""What a converted module takes over from the module it replaces, and gives back on undo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
    "_non_persistent_buffers_set",
)
_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_OWN = frozenset({"_parameters", "_buffers", "_modules", "training"})


def carry_hooks(source: nn.Module, dest: nn.Module) -> None:
    """Share the hook dictionaries, so that handles given out before the conversion still remove their hook."""
    for name in _HOOKS:
        if name in source.__dict__:
            dest.__dict__[name] = source.__dict__[name]
    for name in _STATE_HOOKS:
        if not dest.__dict__.get(name):  # a TE module may have registered its own
            dest.__dict__[name] = source.__dict__[name]


def carry_attributes(source: nn.Module, dest: nn.Module) -> None:
    """Plain attributes that other code may read (``variance_epsilon``, ``in_features``, a user's own) and TE's module lacks."""
    for name, value in source.__dict__.items():
        if name not in dest.__dict__ and name not in _OWN and not hasattr(type(dest), name):
            dest.__dict__[name] = value


Switch = tuple[nn.Module, str, Any]
"""(module, attribute, original value) of something changed so that a converted child runs at all."""


Known = dict[tuple[int, str], Any]
"""(id of a module, attribute) → original value, shared by all sites of a model."""
_FAST_PATHS: tuple[tuple[type[nn.Module], str, Any], ...] = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)
"""torch's own switches for kernels and nested tensors that read the weights past the modules that hold them."""


def has_fast_path(module: nn.Module) -> bool:
    """One of torch's encoders."""
    return isinstance(module, tuple(cls for cls, _, _ in _FAST_PATHS))


def disable_fast_path(holders: list[nn.Module], known: Known) -> list[Switch]:
    """Make torch's encoders call their parts.

    Args:
        holders: modules that hold a converted one, directly or not.
        known: original values of what was switched before.
    """
    switches: list[Switch] = []
    for holder in holders:
        for cls, name, off in _FAST_PATHS:
            if isinstance(holder, cls) and hasattr(holder, name):
                value = known.setdefault((id(holder), name), getattr(holder, name))
                switches.append((holder, name, value))
                setattr(holder, name, off)
    return switches


def reset_switches(switches: list[Switch], is_needed: Callable[[nn.Module], bool]) -> None:
    """Undo switches whose module holds nothing any more that needs them."""
    for module, name, value in switches:
        if not any(is_needed(part) for part in module.modules() if part is not module):
            setattr(module, name, value)


def find_hooks(hooks: dict[int, Any], function: Any) -> list[int]:
    """Keys under which a function is registered in one of nn.Module's hook dictionaries."""
    return [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is function]


def remove_hook(hooks: dict[int, Any], function: Any) -> None:
    """Take a function out of one of nn.Module's hook dictionaries."""
    for key in find_hooks(hooks, function):
        del hooks[key]
