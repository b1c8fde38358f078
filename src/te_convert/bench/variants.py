"""The variants of a model that are measured, and why some are not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from te_convert import api
from te_convert.bench.model import ORIGINAL
from te_convert.bench.subject import Subject
from te_convert.errors import InputError
from te_convert.rewrite.checkpoints import in_recipe
from te_convert.runtime.backend import Backend
from te_convert.runtime.recipes import CONDITIONS, why_not_here

COMPILED = f"{ORIGINAL}, torch.compile"
CONVERTED = "converted"


@dataclass(frozen=True)
class Variant:
    """One way of running the model.

    Attributes:
        build: makes the model; may raise, which is the reason why the variant has no figures.
        recipe: entered for each forward.
        lacking: why it cannot run here, or "".
    """

    name: str
    build: Callable[[], nn.Module]
    recipe: str | None = None
    lacking: str = ""

    def enter(self, model: nn.Module) -> AbstractContextManager[Any]:
        """What a forward runs in: Transformer Engine's autocast, or nothing."""
        return nullcontext() if self.recipe is None else in_recipe(model, self.recipe)


def find_variants(
    subject: Subject, backend: Backend, device: str, recipes: Sequence[str] | None, compiler: str | None
) -> list[Variant]:
    """The original, the original compiled, the conversion in high precision, and one for each recipe.

    Args:
        subject: what is measured.
        backend: what the conversion runs on.
        device: "cpu" or "cuda".
        recipes: names, or None for all that there are.
        compiler: backend of torch.compile, None to leave it out.

    Raises:
        InputError: an unknown recipe.
    """
    wanted = _check_recipes(recipes)
    found = [Variant(ORIGINAL, lambda: subject.original)]
    if compiler is not None:
        found.append(Variant(COMPILED, partial(compiled, subject.original, compiler)))
    found.append(Variant(CONVERTED, partial(_converted, subject, backend.name, None)))
    for recipe in wanted:
        lacking = _why_not(recipe, backend, device)
        build = partial(_converted, subject, backend.name, recipe)
        found.append(Variant(f"{CONVERTED}, {recipe}", build, recipe, lacking))
    return found


def compiled(original: nn.Module, compiler: str) -> nn.Module:
    """A copy that shares all parameters and buffers and is compiled in place, so that ``generate()`` is too."""
    kept = (*original.parameters(), *original.buffers())
    model = copy.deepcopy(original, {id(tensor): tensor for tensor in kept})
    model.compile(backend=compiler)
    return model


def _check_recipes(recipes: Sequence[str] | None) -> tuple[str, ...]:
    if recipes is None:
        return tuple(CONDITIONS)
    known = (*CONDITIONS, "fp8")
    for name in recipes:
        if name not in known:
            raise InputError(f"unknown recipe {name!r}", f"use {', '.join(known)}; high precision is always measured")
    return tuple(dict.fromkeys(recipes))


def _why_not(recipe: str, backend: Backend, device: str) -> str:
    if device != "cuda":
        return "needs a GPU; on a CPU the twins only emulate a recipe, which says nothing about its speed"
    if backend.name != "te":
        return f"needs Transformer Engine: {backend.reason}"
    return why_not_here(recipe)


def _converted(subject: Subject, backend: str, recipe: str | None) -> nn.Module:
    """The directory's own model where it has the recipe, else a new conversion, which is not verified again."""
    plan, directory = subject.plan, subject.directory
    if directory is not None and plan is not None and recipe in (None, plan.recipe):
        return api.load(directory, subject.device, backend)
    inputs = (subject.scenario.args, subject.scenario.kwargs)
    return api.convert(subject.original, inputs, recipe=recipe, backend=backend, verify=False, **subject.choices).model
