"""State dicts in the original layout and in TE's, and the way back to the original modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from te_convert.capture.ambient import plain_modes
from te_convert.capture.arguments import require_module
from te_convert.errors import InputError
from te_convert.facts.sharing import module_names
from te_convert.rewrite.apply import restore_site
from te_convert.rewrite.fused import fused_record
from te_convert.rewrite.loans import original_layout
from te_convert.rewrite.nested import te_parts
from te_convert.rewrite.optimizer import move_optimizer, plan_back
from te_convert.rewrite.rollback import all_or_nothing
from te_convert.rewrite.site import LAYOUT_KEY, get_record, is_converted
from te_convert.rewrite.state_keys import EXTRA_STATE
from te_convert.rewrite.tensor_parallel import is_parallel, unsplit_model, whole_parameters
from te_convert.weights.ops import Fill, Transpose, WeightMap

_CONVERTED = "pass the converted model"


def converted_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every converted module with its canonical name, in module order."""
    return [(name, module) for name, module in model.named_modules() if is_converted(module)]


def _sites_by_prefix(model: nn.Module) -> dict[str, WeightMap]:
    """State-dict prefix → weight map, for every name of every converted module (a shared module has several)."""
    names = module_names(model)
    found: dict[str, WeightMap] = {}
    for _, module in converted_modules(model):
        weights = get_record(module).decision.weights
        if weights is None or fused_record(module) is not None:
            continue
        for name in names[id(module)]:
            found[f"{name}." if name else ""] = weights
    return found


def _split(key: str, sites: dict[str, WeightMap]) -> tuple[str, str]:
    head, dot, leaf = key.rpartition(".")
    prefix = head + dot
    return (prefix, leaf) if prefix in sites else ("", "")


def te_state_dict(model: nn.Module) -> dict[str, Any]:
    """The complete state in TE's layout: as real TE modules would have it.

    Unlike ``model.state_dict()`` it includes the constants that TE needs and the original lacks (a norm's zero bias) and the empty
    ``_extra_state`` entries, so it loads strictly into plain TE modules of the same names.  Of a model that is divided among
    tensor-parallel ranks it has the whole tensors; all ranks have to call it.

    Raises:
        InputError: not a module.
    """
    require_module(model, "te_state_dict", _CONVERTED)
    with whole_parameters(model):
        return _te_state(model)


def _te_state(model: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = dict(model.state_dict())
    names = module_names(model)
    for _, module in converted_modules(model):
        for name in names[id(module)]:
            for path, part in te_parts(module):
                for parameter_name, parameter in part._parameters.items():
                    if parameter is not None:
                        state[".".join(filter(None, (name, path, parameter_name)))] = parameter.detach()
                if type(part).get_extra_state is not nn.Module.get_extra_state:
                    key = ".".join(filter(None, (name, path, EXTRA_STATE)))
                    state.setdefault(key, torch.empty(0, dtype=torch.uint8))
    return state


def original_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state in the original model's layout: its keys, in its order, with its shapes.

    Tensors share memory with the model where the layout is the same; transposed ones are copies.  Of a model that is divided among
    tensor-parallel ranks it has the whole tensors; all ranks have to call it.

    Raises:
        InputError: not a module.
    """
    require_module(model, "original_state_dict", _CONVERTED)
    with whole_parameters(model):
        return _original_state(model)


def _original_state(model: nn.Module) -> dict[str, Any]:
    sites = _sites_by_prefix(model)
    result: dict[str, Any] = OrderedDict()
    with original_layout():
        state = model.state_dict()
    for key, tensor in state.items():
        prefix, leaf = _split(key, sites)
        if leaf == EXTRA_STATE:  # TE's quantisation history; the original knows nothing of it
            continue
        op = next((op for op in sites[prefix].ops if op.dest == leaf), None) if leaf else None
        if op is None:
            result[key] = tensor
        elif not isinstance(op, Fill):
            result[prefix + op.sources[0]] = op.part(tensor, 0).contiguous() if isinstance(op, Transpose) else tensor
    return result


def load_original_state_dict(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """Load a state dict of the original model into a converted one, whatever the shapes look like.

    Returns:
        What ``nn.Module.load_state_dict`` returns (missing and unexpected keys, in TE's names).

    Raises:
        InputError: not a module, or no mapping of names to tensors.
        RuntimeError: as ``nn.Module.load_state_dict`` does when keys or shapes do not fit.
    """
    require_module(model, "load_original_state_dict", _CONVERTED)
    given: Any = state_dict
    if not isinstance(given, Mapping):
        hint = "load the file first, for instance with safetensors.torch.load_file"
        raise InputError(f"load_original_state_dict takes a state dict, got {type(given).__name__}", hint)
    sites = _sites_by_prefix(model)
    translated: OrderedDict[str, Any] = OrderedDict()
    for key, tensor in state_dict.items():
        prefix, leaf = _split(key, sites)
        ops = sites[prefix].ops if leaf else ()
        op = next((op for op in ops if leaf in op.sources), None)
        translated[key if op is None else prefix + op.dest] = tensor if op is None else op.forward([tensor])
    metadata = {prefix[:-1]: {"version": 1, LAYOUT_KEY: "te"} for prefix in sites}
    translated._metadata = metadata  # type: ignore[attr-defined]  # what load_state_dict reads
    return model.load_state_dict(translated, strict=strict)


@plain_modes()
def revert(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    """Put every original module back, with the values that the converted ones have now; in place.

    Args:
        model: the converted model.
        optimizer: one of its parameters; it is given the original ones, with their state, in place.

    Returns:
        The root: ``model`` itself, or the original when the root was converted.

    A model that is divided among tensor-parallel ranks is put together first; all ranks have to take part.

    Raises:
        InputError: not a module; or the optimizer's state cannot be moved.  After this or any other exception model and optimizer
            are as they were.
    """
    require_module(model, "revert", _CONVERTED)
    if is_parallel(model):
        if optimizer is not None:
            raise InputError(
                "the optimizer of a tensor-parallel model has the state of one rank's part",
                "revert the model, make a new optimizer",
            )
        unsplit_model(model)
    with all_or_nothing(model, optimizer):
        links = None if optimizer is None else plan_back(model)
        for _, module in converted_modules(model):
            model = restore_site(model, module)
        if optimizer is not None and links is not None:
            move_optimizer(optimizer, links(model), inplace=True)
    return model
