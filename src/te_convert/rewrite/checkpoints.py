"""Activation checkpointing under a recipe: TE's checkpoint in place of torch's, as long as TE's autocast is entered.

A backward after the autocast recomputes what torch's checkpoint left out, and the recipe is not in force any more: without
reentrance torch raises, with it the recomputed values are silently those of high precision.  ``te.checkpoint`` enters the recipe
again, and takes the scales that the forward had.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch.utils.checkpoint as torch_checkpoints
from torch import nn

from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.replacements.recipes import recipe_autocast, recipe_in_force
from te_convert.replacements.te_support import import_te
from te_convert.rewrite.site import is_converted

_FUNCTION = "_gradient_checkpointing_func"
"""Where Transformers keeps, on each module that checkpoints, the function that does it."""
_TORCHS = ("preserve_rng_state", "early_stop", "respect_saved_tensors_hooks")
"""Options of torch's that TE's does not take: it always preserves the random state, and never stops early."""
Checkpoint = Callable[..., Any]


def in_recipe(model: nn.Module, recipe: str | None) -> AbstractContextManager[Any]:
    """TE's autocast with a recipe, and a model's checkpointing through TE's; nothing in high precision or without TE's modules.

    Raises:
        EnvironmentLacksError: this GPU or this Transformer Engine does not have the recipe.
    """
    on_te = any(is_converted(module) and module.__dict__[SITE_ATTRIBUTE].backend == "te" for module in model.modules())
    if recipe in (None, "bf16") or not on_te:
        return nullcontext()
    return _entered(recipe_autocast(str(recipe)), checkpoints_on_te(model))


@contextmanager
def _entered(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def route(own: Checkpoint) -> Checkpoint:
    """TE's checkpoint for functions that may run TE modules under a recipe, ``own`` for all others."""

    @functools.wraps(own)
    def checkpoint(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        if function is None or recipe_in_force() is None or (isinstance(function, nn.Module) and not _holds_te(function)):
            return own(function, *args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in _TORCHS}
        if kwargs.get("use_reentrant", False) is None:
            del kwargs["use_reentrant"]
        return import_te().checkpoint(function, *args, **kwargs)

    return checkpoint


def _holds_te(module: nn.Module) -> bool:
    """As TE asks itself; what it answers with no, it hands to torch's function by the name that was replaced."""
    return any(cls.__module__.startswith("transformer_engine.") for part in module.modules() for cls in type(part).__mro__)


@contextmanager
def checkpoints_on_te(model: nn.Module) -> Iterator[None]:
    """Let a model's activation checkpointing run through :func:`route`, under every name by which it knows torch's function.

    These are torch's own module, the modules that define the model's classes, and what Transformers' models keep on themselves.
    """
    own: Checkpoint = torch_checkpoints.checkpoint
    routed = route(own)
    with ExitStack() as stack:
        for module in model.modules():
            kept = module.__dict__.get(_FUNCTION)
            replaced = _replaced(kept, own, routed)
            if replaced is not None:
                stack.enter_context(_exchanged(module.__dict__, {_FUNCTION: replaced}))
        for space in _namespaces(model):
            stack.enter_context(_exchanged(space, {name: routed for name, value in space.items() if value is own}))
        yield


def _replaced(kept: Any, own: Checkpoint, routed: Checkpoint) -> Any:
    """The function, or the partial of it, with ``routed`` in place of ``own``; None when it is another one."""
    if kept is own:
        return routed
    if isinstance(kept, functools.partial) and kept.func is own:
        return functools.partial(routed, *kept.args, **kept.keywords)
    return None


def _namespaces(model: nn.Module) -> list[dict[str, Any]]:
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__} | {torch_checkpoints.__name__}
    return [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules and not name.startswith("transformer_engine")]


@contextmanager
def _exchanged(space: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    before = {name: space[name] for name in values}
    space.update(values)
    try:
        yield
    finally:
        space.update(before)
