"""Calls of a Transformers layer: which argument is what, at recording and at run time alike."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from te_convert.capture.graph import ModuleCall
from te_convert.match.transformer_blocks import BlockError

CAPTURING = "transformers.utils.output_capturing"
"""The module of the hooks by which Transformers collects hidden states and attention probabilities."""
_CACHES = frozenset({"cache", "past_key_values", "past_key_value", "layer_past"})
_HARMLESS = frozenset(
    {"use_cache", "position_ids", "cache_position", "attention_mask", "is_causal", "output_hidden_states", "return_dict"}
)
"""Read elsewhere (the mask, is_causal, what the model returns), or by nothing in a layer without rotary embedding or cache."""


def bind_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the original class's forward by name, those of ``**kwargs`` among them.

    Raises:
        TypeError: they do not fit.
    """
    forward = getattr(module, "_te_base", type(module)).forward
    signature = inspect.signature(forward)
    found: dict[str, Any] = {}
    for name, value in list(signature.bind(module, *args, **kwargs).arguments.items())[1:]:
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        else:
            found[name] = value
    return found


def bound_call(module: nn.Module, call: ModuleCall) -> dict[str, str]:
    """What each argument of a recorded call was, by name.

    Raises:
        BlockError: the call cannot be read.
    """
    positional, named = call.given[: call.n_positional], call.given[call.n_positional :]
    try:
        return bind_arguments(module, positional, dict(zip(call.keywords, named, strict=True)))
    except (TypeError, ValueError) as error:
        raise BlockError(f"its arguments are not known: {error}") from None


def takes_mask(module: nn.Module) -> bool:
    """Whether the layer's forward names an ``attention_mask``, which may have no default."""
    return "attention_mask" in inspect.signature(getattr(module, "_te_base", type(module)).forward).parameters


def has_cache(given: Mapping[str, str]) -> bool:
    """Whether a call brings a cache of keys and values."""
    return any(text != "None" for name, text in given.items() if name in _CACHES)


def extra_arguments(given: Mapping[str, str]) -> list[str]:
    """Names of the arguments that may change the result in a way that te.TransformerLayer has no words for."""
    (first, text), *others = given.items()
    names = [name for name, what in others if name not in _HARMLESS | _CACHES and what not in ("None", "False")]
    mask = given.get("attention_mask", "None")
    return [*([] if text == "tensor" else [first]), *names, *([] if mask in ("None", "tensor") else ["attention_mask"])]


def is_idle_hook(hook: Any, collected: Mapping[str, Any] | None) -> bool:
    """A hook of Transformers' that collects nothing now: ``collected`` has what is being collected, None for nothing."""
    if getattr(hook, "__module__", "") != CAPTURING:
        return False
    code, cells = getattr(hook, "__code__", None), getattr(hook, "__closure__", None) or ()
    values = {name: cell.cell_contents for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False)}
    return not collected or ("key" in values and values["key"] not in collected)
