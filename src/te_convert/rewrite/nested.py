"""TE modules inside a TE module (te.TransformerLayer's parts): the same manners of the state dict as the outer one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.rewrite.loans import holder_of, in_original_layout
from te_convert.rewrite.rows import PADDED, run_padded
from te_convert.rewrite.state_keys import EXTRA_STATE, drop_empty_extra_state
from te_convert.weights.ops import Fill, WeightMap

_FILLED = "_te_convert_filled"
"""Where a nested module keeps the names of its constants, which a checkpoint of the original does not have."""
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
PLACE = "_te_convert_place"
"""Where a part keeps the converted module that it is in, and its name there."""


class _Quiet(nn.Module):
    """Writes neither an empty ``_extra_state`` nor a constant, and misses neither; writes nothing in the original layout."""

    _te_base: type[nn.Module]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if in_original_layout():
            return
        super()._save_to_state_dict(destination, prefix, keep_vars)
        drop_empty_extra_state(destination, prefix)
        for name in self.__dict__.get(_FILLED, ()):
            destination.pop(prefix + name, None)

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
        forgiven = {prefix + name for name in (EXTRA_STATE, *self.__dict__.get(_FILLED, ()))}
        missing_keys[:] = [key for key in missing_keys if key not in forgiven]

    def __reduce_ex__(self, protocol: Any) -> Any:
        outer, name = self.__dict__[PLACE]
        record = outer.__dict__.get(SITE_ATTRIBUTE)
        if record is not None and record.backend == "te":  # the outer module is built anew, with its parts
            return _get_part, (outer, name)
        return _rebuild, (self._te_base,), self.__dict__

    def __deepcopy__(self, memo: Any) -> nn.Module:
        return deepcopy_module(self, memo)


class _Padded(_Quiet):
    """A part with quantised products takes any number of rows."""

    def forward(self, inp: Tensor, *args: Any, **kwargs: Any) -> Any:
        """TE's, on rows as the recipe wants them."""
        return run_padded(super().forward, inp, *args, **kwargs)


def _is_padded(base: type[nn.Module]) -> bool:
    return base.__module__.startswith("transformer_engine.") and base.__name__ in PADDED


def _quiet_class(base: type[nn.Module]) -> type[nn.Module]:
    if base not in _CLASSES:
        body = {"_te_base": base, "__module__": base.__module__, "__doc__": base.__doc__}
        _CLASSES[base] = type(base.__name__, (_Padded if _is_padded(base) else _Quiet, base), body)
    return _CLASSES[base]


def _rebuild(base: type[nn.Module]) -> nn.Module:
    cls = _quiet_class(base)
    return cls.__new__(cls)


def _get_part(outer: nn.Module, name: str) -> nn.Module:
    return outer.get_submodule(name)


def deepcopy_module(module: nn.Module, memo: Any) -> nn.Module:
    """``copy.deepcopy`` of a module whose ``__reduce_ex__`` is for pickling only."""
    new = module.__class__.__new__(module.__class__)
    memo[id(module)] = new
    parallel = getattr(module.__dict__.get(SITE_ATTRIBUTE), "parallel", None)
    if parallel is not None:  # a copy belongs to the same ranks
        memo[id(parallel.group)] = parallel.group
    nn.Module.__setstate__(new, copy.deepcopy(module.__dict__, memo))
    return new


def quiet_children(module: nn.Module, weights: WeightMap) -> None:
    """Give every module inside a new TE module, which ``weights`` fill, these manners."""
    for place, child in module.named_modules():
        if child is not module and not isinstance(child, _Quiet):
            child.__class__ = _quiet_class(type(child))
            child.__dict__[PLACE] = (module, place)
    for op in weights.ops:
        holder, name = holder_of(module, op.dest)
        if isinstance(op, Fill) and holder is not module:
            holder.__dict__[_FILLED] = (*holder.__dict__.get(_FILLED, ()), name)


def te_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A converted module and the TE modules inside it, with their names in it."""
    yield "", module
    for name, child in module.named_modules():
        if isinstance(child, _Quiet):
            yield name, child
