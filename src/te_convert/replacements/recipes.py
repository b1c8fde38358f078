"""Recipe names → Transformer Engine's recipe classes, entered through its autocast.  Needs TE and a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from te_convert.errors import EnvironmentLacksError
from te_convert.replacements.te_support import import_te
from te_convert.runtime.recipes import BEST, CONDITIONS, current_capability, torch_cuda, why_not_here, why_unavailable


def choose_recipe(name: str) -> str:
    """The recipe that a name stands for here: "fp8" is the best that GPU and installed TE have, any other name itself.

    Raises:
        EnvironmentLacksError: this GPU or this TE version does not have it.
    """
    import transformer_engine.common.recipe as recipes

    lacking = why_not_here(name)
    if lacking:
        raise EnvironmentLacksError(lacking, "take a recipe that this GPU has; te-convert doctor says what it is")
    if name == "fp8":
        capability = current_capability() or (9, 0)
        able = [each for each in BEST if not why_unavailable(each, capability, torch_cuda())]
        return next((each for each in able if hasattr(recipes, CONDITIONS[each].name)), BEST[-1])
    if not hasattr(recipes, CONDITIONS[name].name):
        raise EnvironmentLacksError(f"this Transformer Engine has no {CONDITIONS[name].name}", "upgrade transformer-engine")
    return name


def build_recipe(name: str) -> Any:
    """TE's recipe object with TE's own defaults; for "fp8" that of :func:`choose_recipe`.

    Raises:
        EnvironmentLacksError: this GPU or this TE version does not have the recipe.
    """
    import transformer_engine.common.recipe as recipes

    return getattr(recipes, CONDITIONS[choose_recipe(name)].name)()


def recipe_autocast(name: str) -> AbstractContextManager[Any]:
    """TE's autocast with the recipe; ``fp8_autocast`` in versions before it was renamed.

    Raises:
        EnvironmentLacksError: this GPU or this TE version does not have the recipe.
    """
    te, recipe = import_te(), build_recipe(name)
    context: AbstractContextManager[Any]
    if hasattr(te, "autocast"):
        context = te.autocast(enabled=True, recipe=recipe)
    else:
        context = te.fp8_autocast(enabled=True, fp8_recipe=recipe)
    return context
