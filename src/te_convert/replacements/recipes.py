"""Recipe names → Transformer Engine's recipe classes, entered through its autocast.  Needs TE and a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from te_convert.errors import EnvironmentLacksError

_CLASSES = {
    "fp8-delayed": "DelayedScaling",
    "fp8-current": "Float8CurrentScaling",
    "fp8-block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}


def build_recipe(name: str) -> Any:
    """TE's recipe object; "fp8" takes TE's own default for the GPU (its first FP8 recipe in versions without that function).

    Raises:
        EnvironmentLacksError: this TE version does not know the recipe.
    """
    import transformer_engine.common.recipe as recipes

    if name == "fp8":
        import transformer_engine.pytorch as te

        default = getattr(te, "get_default_recipe", None)
        return default() if default is not None else recipes.DelayedScaling()
    cls = getattr(recipes, _CLASSES[name], None)
    if cls is None:
        raise EnvironmentLacksError(f"this Transformer Engine has no {_CLASSES[name]}", "upgrade transformer-engine")
    return cls()


def recipe_autocast(name: str) -> AbstractContextManager[Any]:
    """TE's autocast with the recipe; ``fp8_autocast`` in versions before it was renamed.

    Raises:
        EnvironmentLacksError: this TE version does not know the recipe.
    """
    import transformer_engine.pytorch as te

    recipe = build_recipe(name)
    context: AbstractContextManager[Any]
    if hasattr(te, "autocast"):
        context = te.autocast(enabled=True, recipe=recipe)
    else:
        context = te.fp8_autocast(enabled=True, fp8_recipe=recipe)
    return context
