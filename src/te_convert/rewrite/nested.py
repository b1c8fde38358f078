"""TE modules inside a TE module (te.TransformerLayer's parts): the same manners of the state dict as the outer one."""

from __future__ import annotations

from typing import Any

from torch import nn

from te_convert.rewrite.loans import in_original_layout
from te_convert.rewrite.state_keys import EXTRA_STATE, drop_empty_extra_state

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


class _Quiet(nn.Module):
    """Writes no empty ``_extra_state`` and does not miss it; writes nothing in the original layout."""

    _te_base: type[nn.Module]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if in_original_layout():
            return
        super()._save_to_state_dict(destination, prefix, keep_vars)
        drop_empty_extra_state(destination, prefix)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing_keys[:] = [key for key in missing_keys if key != prefix + EXTRA_STATE]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self._te_base,), self.__dict__


def _quiet_class(base: type[nn.Module]) -> type[nn.Module]:
    if base not in _CLASSES:
        body = {"_te_base": base, "__module__": base.__module__, "__doc__": base.__doc__}
        _CLASSES[base] = type(base.__name__, (_Quiet, base), body)
    return _CLASSES[base]


def _rebuild(base: type[nn.Module]) -> nn.Module:
    cls = _quiet_class(base)
    return cls.__new__(cls)


def quiet_children(module: nn.Module) -> None:
    """Give every module inside a new TE module these manners."""
    for child in module.modules():
        if child is not module and not isinstance(child, _Quiet):
            child.__class__ = _quiet_class(type(child))
