"""A Transformers directory as a model without weights, and which tensors of its checkpoint each parameter is made of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from te_convert.emit.slots import find_slots
from te_convert.emit.user_code import one_line
from te_convert.errors import InputError
from te_convert.stream.checkpoint import Checkpoint
from te_convert.stream.pieces import Layout, Piece

_ALL_IN_MEMORY = "convert with --no-stream, which loads the model with Transformers"


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside keep shapes of parameters only, and their buffers with values."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class Names:
    """Which tensors of a checkpoint belong to a model, and where.

    Attributes:
        stored: parameter or persistent buffer → the checkpoint's tensors that it is made of.
        ignored: tensors of the checkpoint that the model has no place for.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint) -> None:
        """Match names as Transformers does when it loads the directory.

        Raises:
            InputError: missing tensors, other shapes, or a conversion that cannot be streamed.
        """
        slots = {name: slot for name, slot in find_slots(model).items() if slot.persistent}
        shapes = {name: tuple(slot.tensor.shape) for name, slot in slots.items()}
        groups: dict[str, dict[str | None, list[str]]] = {}
        rename = _renaming(model)
        for key in sorted(checkpoint.entries, key=_natural):
            target, pattern = rename(key)
            groups.setdefault(target, {}).setdefault(pattern, []).append(key)
        self.stored: dict[str, Layout] = {}
        self.ignored: list[str] = []
        for name, patterns in groups.items():
            if name not in shapes:
                self.ignored += [key for keys in patterns.values() for key in keys]
            else:
                self.stored[name] = _layout(name, shapes[name], patterns, model, checkpoint)
        tied: dict[int, list[str]] = {}
        for name, slot in slots.items():
            tied.setdefault(id(slot.tensor), []).append(name)
        allowed = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        lacking = [
            name
            for name, slot in slots.items()
            if not any(other in self.stored for other in tied[id(slot.tensor)]) and not any(re.search(p, name) for p in allowed)
        ]
        if lacking:
            some = ", ".join(lacking[:8])
            what = f"{len(lacking)} weights of {type(model).__name__} are missing in the checkpoint: {some}"
            raise InputError(what, "set architectures in config.json to the class whose weights these are")


def _renaming(model: nn.Module) -> Any:
    """A function from a checkpoint's key to (the model's name, the pattern of a converter or None)."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # before Transformers 5 nothing is renamed but the prefix
        return lambda key: (_with_prefix(key, model), None)
    mapping: list[Any] = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    state, prefix = dict.fromkeys(model.state_dict()), getattr(model, "base_model_prefix", None)
    return lambda key: rename_source_key(key, renamings, converters, prefix, state)


def _with_prefix(key: str, model: nn.Module) -> str:
    own, prefix = model.state_dict().keys(), f"{getattr(model, 'base_model_prefix', '')}."
    if key not in own and prefix + key in own:
        return prefix + key
    return key.removeprefix(prefix) if key not in own and key.removeprefix(prefix) in own else key


def _layout(
    name: str, shape: tuple[int, ...], patterns: Mapping[str | None, list[str]], model: nn.Module, checkpoint: Checkpoint
) -> Layout:
    keys = [key for group in patterns.values() for key in group]
    entries = [checkpoint.entries[key] for key in keys]
    dtypes = {entry.dtype for entry in entries}
    if len(dtypes) != 1:
        raise InputError(f"{name} is made of tensors of several dtypes in the checkpoint", _ALL_IN_MEMORY)
    if None in patterns:
        if len(keys) != 1:
            raise InputError(f"{name} is in the checkpoint under {len(keys)} names: {', '.join(keys[:4])}", _ALL_IN_MEMORY)
        if entries[0].shape != shape:
            found = f"{list(entries[0].shape)} in the checkpoint, {list(shape)} in the model"
            raise InputError(f"{name} is {found}", "use the config.json that belongs to the weights")
        ordered = keys
    else:
        ordered = _merged(name, patterns, model)
    sizes = {key: checkpoint.entries[key].size // entries[0].dtype.itemsize for key in ordered}
    try:
        return Layout(dtypes.pop(), shape, tuple(Piece(key, 0, sizes[key]) for key in ordered))
    except ValueError as error:
        raise InputError(f"{name}: {one_line(error)}", _ALL_IN_MEMORY) from None


def _merged(name: str, patterns: Mapping[Any, list[str]], model: nn.Module) -> list[str]:
    """Order of the tensors that Transformers stacks (experts) or joins, row by row.

    Raises:
        InputError: it does more than that with them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    mapping: list[Any] = get_model_conversion_mapping(model)
    for each in mapping:
        if isinstance(each, WeightConverter) and set(patterns) <= set(each.source_patterns):
            groups = [patterns[pattern] for pattern in each.source_patterns if pattern in patterns]
            dims = [(type(op), getattr(op, "dim", None)) for op in each.operations]
            if dims in ([(MergeModulelist, 0)], [(Concatenate, 0)]) and len({len(g) for g in groups}) == 1:
                return [key for group in groups for key in group]
            if dims == [(MergeModulelist, 0), (Concatenate, 1)] and len({len(g) for g in groups}) == 1:
                return [key for keys in zip(*groups, strict=True) for key in keys]
    raise InputError(f"{name} is computed from {', '.join(next(iter(patterns.values()))[:2])}, ... by Transformers", _ALL_IN_MEMORY)


def _natural(key: str) -> list[tuple[int, str]]:
    """Experts in the order of their numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]
