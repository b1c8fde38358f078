"""Recipe names → Transformer Engine's recipe classes, entered through its autocast.  Needs TE and a GPU."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from te_convert.config import RECIPES
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


_ROWS = {conditions.name: alignment.rows for name, conditions in CONDITIONS.items() if (alignment := RECIPES[name]) is not None}
_GROUPED_ROWS = {**_ROWS, "NVFP4BlockScaling": 128}
_STRICTEST = 32


def recipe_in_force() -> Any:
    """TE's recipe object where its autocast is entered, else None."""
    modules = sys.modules
    home = modules.get("transformer_engine.pytorch.quantization") or modules.get("transformer_engine.pytorch.fp8")  # before 2.9
    manager = getattr(home, "FP8GlobalStateManager", None)
    return manager.get_fp8_recipe() if manager is not None and manager.is_fp8_enabled() else None


def rows_multiple(grouped: bool = False) -> int:
    """What the recipe in force wants the number of rows to be a multiple of; 1 in high precision.

    With ``grouped``, of the rows of each group (TE 2.20, ``quantization.py``: ``get_align_size_for_quantization``).
    """
    recipe = recipe_in_force()
    if recipe is None:
        return 1
    if grouped and hasattr(recipe, "quantization_alignment"):  # a custom recipe
        return int(recipe.quantization_alignment)
    return (_GROUPED_ROWS if grouped else _ROWS).get(type(recipe).__name__, _STRICTEST)
