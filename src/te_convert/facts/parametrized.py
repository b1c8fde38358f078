"""Is a module's weight computed from other tensors before each call?"""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize


def describe_parametrization(module: nn.Module) -> str | None:
    """What computes the module's parameters, or None when they are plain.

    Knows torch's parametrizations and the older hook-based weight_norm, spectral_norm and pruning, which replace a Parameter by a
    plain tensor attribute that a forward pre-hook writes.
    """
    if parametrize.is_parametrized(module):
        names = ", ".join(sorted(module.parametrizations))  # type: ignore[arg-type]
        return f"torch parametrization on {names}"
    hooks = [type(hook).__name__ for hook in module._forward_pre_hooks.values()]
    written = [name for name in ("weight", "bias") if name in module.__dict__ and name not in module._parameters]
    if written and hooks:
        return f"{', '.join(hooks)} writes {', '.join(written)} before each call"
    return None
