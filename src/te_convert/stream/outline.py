"""A Transformers directory as a model without weights, and which tensors of its checkpoint each parameter is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from te_convert.emit.slots import find_slots
from te_convert.emit.user_code import one_line
from te_convert.errors import InputError
from te_convert.stream.checkpoint import Checkpoint
from te_convert.stream.conversions import CannotStreamError, convert
from te_convert.stream.pieces import Layout, whole

_ALL_IN_MEMORY = "convert with --no-stream, which loads the model with Transformers"
_OTHERS = (
    (r"(^|\.)decoder\.layers\.\d+\.self_attention\.linear_(qkv|proj)\.|(^|\.)mlp\.linear_fc[12]\.", "Megatron Core"),
    (r"(^|\.)language_model\.(encoder|transformer)\.layers\.\d+\.", "Megatron-LM"),
    (
        r"\.self_attention\.layernorm_qkv\.|\.layernorm_mlp\.fc[12]_weight",
        "Transformer Engine's TransformerLayer (BioNeMo recipes)",
    ),
)
"""Keys of other layouts: Megatron Core's and Megatron-LM's module names, and te.TransformerLayer's."""


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
            InputError: missing tensors, other shapes, another program's layout, or a conversion that cannot be streamed.
        """
        slots = {name: slot for name, slot in find_slots(model).items() if slot.persistent}
        shapes = {name: tuple(slot.tensor.shape) for name, slot in slots.items()}
        groups: dict[str, dict[str | None, list[str]]] = {}
        rename, self._converters = _renaming(model)
        for key in sorted(checkpoint.entries, key=_natural):
            target, pattern = rename(key)
            groups.setdefault(target, {}).setdefault(pattern, []).append(key)
        self.stored: dict[str, Layout] = {}
        self.ignored: list[str] = []
        for name, patterns in groups.items():
            if name in shapes:
                self.stored |= self._layouts(name, shapes, patterns, checkpoint)
            else:
                self.ignored += [key for keys in patterns.values() for key in keys]
        tied: dict[int, list[str]] = {}
        for name, slot in slots.items():
            tied.setdefault(id(slot.tensor), []).append(name)
        lacking = [name for name, slot in slots.items() if not any(other in self.stored for other in tied[id(slot.tensor)])]
        if lacking:
            raise _missing(model, lacking, checkpoint)

    def _layouts(
        self, name: str, shapes: Mapping[str, tuple[int, ...]], patterns: Mapping[str | None, list[str]], checkpoint: Checkpoint
    ) -> dict[str, Layout]:
        keys = [key for group in patterns.values() for key in group]
        held = {key: whole(key, checkpoint.entries[key].dtype, checkpoint.entries[key].shape) for key in keys}
        converter = self._converters.get(next(iter(patterns)) or "")
        if converter is not None:
            groups = {str(pattern): [held[key] for key in group] for pattern, group in patterns.items()}
            found = _computed(name, converter, groups, shapes)
        elif len(keys) == 1:
            found = {name: held[keys[0]]}
        else:
            raise InputError(f"{name} is in the checkpoint under {len(keys)} names: {_some(keys)}", _ALL_IN_MEMORY)
        for target, layout in found.items():
            if layout.shape != shapes.get(target):
                own = list(shapes[target]) if target in shapes else "absent"
                what = f"{target} is {list(layout.shape)} in the checkpoint ({_some(keys)}), {own} in the model"
                raise InputError(what, "use the config.json that belongs to the weights")
        return found


def _computed(
    name: str, converter: Any, groups: Mapping[str, list[Layout]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Layout]:
    """What a Transformers WeightConverter makes of tensors.

    Raises:
        InputError: it does more than rearrange them.
    """
    targets = {name.replace(converter.target_patterns[0], each): each for each in converter.target_patterns[1:]}
    known = {target: shapes.get(target, ()) for target in (name, *targets)}
    try:
        return convert(converter.operations, groups, known, converter.source_patterns)
    except (CannotStreamError, ValueError, InputError) as error:
        keys = [piece.source for group in groups.values() for layout in group for piece in layout.pieces]
        what = f"{name} is computed from {_some(keys)} by Transformers, which is not streamed: {one_line(error)}"
        raise InputError(what, _ALL_IN_MEMORY) from None


def _some(keys: Sequence[str]) -> str:
    return ", ".join(one_line(key, 100) for key in keys[:4]) + (", …" if len(keys) > 4 else "")


def _missing(model: nn.Module, lacking: list[str], checkpoint: Checkpoint) -> InputError:
    for pattern, program in _OTHERS:
        key = next((key for key in checkpoint.entries if re.search(pattern, key)), None)
        if key is not None:
            what = f"the checkpoint is in the layout of {program} (it has {one_line(key, 100)}), which is not read"
            return InputError(what, "convert it to Transformers' layout with that program's exporter first")
    what = f"{len(lacking)} weights of {type(model).__name__} are missing in the checkpoint: {', '.join(lacking[:8])}"
    return InputError(what, "set architectures in config.json to the class whose weights these are")


def _renaming(model: nn.Module) -> tuple[Callable[[str], tuple[str, str | None]], dict[str, Any]]:
    """A function from a checkpoint's key to (the model's name, the pattern of a converter or None), and the converters."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # before Transformers 5 nothing is renamed but the prefix
        return lambda key: (_with_prefix(key, model), None), {}
    mapping: list[Any] = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    state: dict[str, Any] = dict.fromkeys(model.state_dict(), True)
    prefix = getattr(model, "base_model_prefix", None)

    def rename(key: str) -> tuple[str, str | None]:
        found: tuple[str, str | None] = rename_source_key(key, renamings, converters, prefix, state)
        if found[0] not in state and key in state:  # as Transformers: a name of the model stays
            return key, None
        return found

    return rename, {pattern: each for each in converters for pattern in each.source_patterns}


def _with_prefix(key: str, model: nn.Module) -> str:
    own, prefix = model.state_dict().keys(), f"{getattr(model, 'base_model_prefix', '')}."
    if key not in own and prefix + key in own:
        return prefix + key
    return key.removeprefix(prefix) if key not in own and key.removeprefix(prefix) in own else key


def _natural(key: str) -> list[tuple[int, str]]:
    """Experts in the order of their numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]
