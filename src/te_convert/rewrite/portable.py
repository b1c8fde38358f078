"""Pickling of converted modules: TE's hold functions that do not pickle, so the copy is built anew and takes over the rest.

What TE keeps for itself, such as the amax history of delayed scaling, starts afresh; ``copy.deepcopy`` copies everything.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.replacements.build import new_module
from te_convert.replacements.parallel import Parallel
from te_convert.rewrite.loans import holder_of
from te_convert.rewrite.nested import deepcopy_module, quiet_children, te_parts

_PARAMETERS = "te_convert_parameters"
_LOAD_HOOKS = "_load_state_dict_post_hooks"


class Portable(nn.Module):
    """Mixin of every converted module."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        record = self.__dict__.get(SITE_ATTRIBUTE)
        if record is not None and record.parallel is not None:
            raise TypeError("a tensor-parallel module belongs to its process group and cannot be pickled; save its state dict")
        if record is None or record.backend != "te":
            return super().__reduce_ex__(protocol)
        arguments = (type(self), record.decision, record.backend)
        return build_converted, arguments, _portable_state(self, build_converted(*arguments))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The inverse, on a module that :func:`build_converted` made; of a twin, nn.Module's."""
        if _PARAMETERS not in state:
            inherited: Any = super().__setstate__
            inherited(state)
            return
        rest = dict(state)
        parameters, hooks = rest.pop(_PARAMETERS), rest.pop(_LOAD_HOOKS)
        self.__dict__.update(rest)
        self.__dict__[_LOAD_HOOKS].update(hooks)
        for name, parameter in parameters.items():
            holder, last = holder_of(self, name)
            holder._parameters[last] = parameter
        for _, part in te_parts(self):
            part.training = self.training

    def __deepcopy__(self, memo: Any) -> nn.Module:
        return deepcopy_module(self, memo)


def build_converted(cls: type[nn.Module], decision: Any, backend: str, parallel: Parallel | None = None) -> nn.Module:
    """A converted module, or one rank's part of it, with its parameters on meta."""
    module: nn.Module = new_module(cls, decision.spec, backend, parallel)
    quiet_children(module, decision.weights)
    return module


def _portable_state(module: nn.Module, fresh: nn.Module) -> dict[str, Any]:
    """Parameters, and what a new module of the same decision does not have from its constructor."""
    made = fresh.__dict__.keys() - nn.Module().__dict__.keys() | {"_parameters"}
    state = {name: value for name, value in module.__dict__.items() if name not in made}
    state[_LOAD_HOOKS] = {key: hook for key, hook in module.__dict__[_LOAD_HOOKS].items() if not is_tes(hook)}
    names = [name for name, _ in fresh.named_parameters(remove_duplicate=False)]
    state[_PARAMETERS] = {name: module.get_parameter(name) for name in dict.fromkeys((*names, *module._parameters))}
    return state


def is_tes(hook: Any) -> bool:
    """A hook that TE's constructor registered."""
    return str(getattr(hook, "__module__", "")).startswith("transformer_engine.")
