"""The tracer's leaf policy for planning: torch's own leaves, and anything a rule may recognise as one operation."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import nn

from te_convert.capture.leaves import is_builtin_leaf
from te_convert.facts.activations import is_activation_candidate, probe_activation
from te_convert.facts.linears import looks_like_linear
from te_convert.facts.norms import looks_like_norm
from te_convert.facts.stand_in import kind_key


class LeafPolicy:
    """Decides per module; equal activations are probed once."""

    def __init__(self) -> None:
        self._activations: dict[Hashable, bool] = {}

    def __call__(self, module: nn.Module) -> bool:
        """True when the module becomes one ``call_module`` node."""
        if next(module.children(), None) is not None:
            return hasattr(module, "parametrizations") and (looks_like_linear(module) or looks_like_norm(module))
        if is_builtin_leaf(module) or looks_like_linear(module) or looks_like_norm(module):
            return True
        scripted = isinstance(module, torch.jit.ScriptModule)
        return not scripted and is_activation_candidate(module) and self._is_activation(module)

    def _is_activation(self, module: nn.Module) -> bool:
        key = kind_key(module)
        if key not in self._activations:
            self._activations[key] = probe_activation(module) is not None
        return self._activations[key]
