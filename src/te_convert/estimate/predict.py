"""From work items to an estimate: add up the times, compare, and decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from te_convert.config import RECIPES
from te_convert.errors import InputError
from te_convert.estimate.cost import Times, can_run, original_times, takes_recipe, te_times
from te_convert.estimate.gpus import FRACTIONS, Gpu
from te_convert.estimate.kernels import FORMATS
from te_convert.estimate.model import BF16, PREDICTED, Estimate, RecipeEstimate, SiteEstimate
from te_convert.estimate.verdict import judge
from te_convert.estimate.work import Work
from te_convert.runtime.recipes import CONDITIONS, best_recipe, why_unavailable

MODES = ("training", "inference")
_NEWEST_CUDA = (99, 0)
"""A GPU is named here, not a machine: whatever CUDA the recipe needs can be installed."""


def predict(
    works: Sequence[Work],
    gpu: Gpu,
    recipe: str = "all",
    mode: str = "training",
    tokens: int | None = None,
    whole: bool = True,
    notes: Iterable[str] = (),
) -> Estimate:
    """The estimate of a list of work items.

    Args:
        works: of one forward.
        gpu: where it would run.
        recipe: "all", "fp8" for the best of the GPU, or one.
        mode: "training" (forward and backward, no optimizer) or "inference".
        tokens: scale the shapes to so many rows; None keeps them.
        whole: ``works`` has the element-wise work between the sites.
        notes: to carry along.

    Raises:
        InputError: an unknown recipe or mode, a number of tokens that is not positive, or nothing to scale.
    """
    if mode not in MODES:
        raise InputError(f"unknown mode {mode!r}", f"use {' or '.join(MODES)}")
    recorded = recorded_tokens(works)
    if tokens is not None:
        given: object = tokens
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise InputError(f"tokens takes a positive number, got {tokens!r}", "pass for instance tokens=8192")
        works = [work.scaled(tokens / recorded) for work in works] if recorded else works
    training = mode == "training"
    originals = [original_times(gpu, work, training) for work in works]
    original = sum(originals, Times())
    high = [te_times(gpu, work, None, training) for work in works]
    estimates = [
        _of_recipe(gpu, name, works, (originals, high), original, training) for name in (BF16, *_asked(recipe, gpu)) if name
    ]
    shares = Counter[str]()
    for work in works:
        shares[work.share] += work.flops  # type: ignore[assignment]
    total = sum(shares.values())
    any_site = any(work.converted for work in works)
    more = (
        []
        if FRACTIONS[gpu.generation].checked
        else [f"nothing published on {gpu.name} or its generation was found to check against"]
    )
    return Estimate(
        gpu=gpu.name,
        mode=mode,
        tokens=recorded_tokens(works),
        original=original,
        recipes=tuple(estimates),
        flop_shares={name: flops / total for name, flops in shares.items() if flops},
        verdict=judge(estimates, gpu.name, any_site, None if recipe == "all" else recipe),
        whole=whole,
        notes=(PREDICTED, *notes, *more),
    )


def recorded_tokens(works: Iterable[Work]) -> int:
    """Rows of the products that have most of the FLOPs; 0 without any."""
    flops = Counter[int]()
    for work in works:
        for product in work.products:
            flops[product.rows] += product.flops * work.calls
    return flops.most_common(1)[0][0] if flops else 0


def _asked(recipe: str, gpu: Gpu) -> tuple[str, ...]:
    if recipe == "all":
        return tuple(FORMATS)
    if recipe == BF16:
        return ()
    if recipe == "fp8":
        return (best_recipe(gpu.capability, _NEWEST_CUDA) or "fp8-current",)
    if recipe not in RECIPES:
        raise InputError(f"unknown recipe {recipe!r}", f"use all or one of {', '.join(RECIPES)}")
    return (recipe,)


def unavailable_on(gpu: Gpu, recipe: str) -> str:
    """Why a recipe cannot run on a GPU, "" when it can (given the right CUDA)."""
    if recipe in CONDITIONS:
        why = why_unavailable(recipe, gpu.capability, _NEWEST_CUDA)
        if why or not can_run(gpu, recipe):
            return why.replace("this GPU has", f"{gpu.name} has") or f"{gpu.name} has no such products"
    return ""


def _of_recipe(
    gpu: Gpu,
    recipe: str,
    works: Sequence[Work],
    known: tuple[Sequence[Times], Sequence[Times]],
    original: Times,
    training: bool,
) -> RecipeEstimate:
    why = unavailable_on(gpu, recipe)
    if why:
        return RecipeEstimate(recipe, why)
    originals, high = known
    low = high if recipe == BF16 else [te_times(gpu, work, recipe, training) for work in works]
    times = sum(low, Times())
    on_host = times.host_us > times.gpu_us
    sites = []
    for index, work in enumerate(works):
        kept = recipe == BF16 or not takes_recipe(work, recipe)
        speedup = 1.0 if kept else _felt(high[index], on_host) / _felt(low[index], on_host)
        sites.append(
            SiteEstimate(work.fqn, work.kind, work.share, work.flops, originals[index], high[index], low[index], kept, speedup)
        )
    gated = sum((site.te if site.loses else site.recipe for site in sites), Times())
    if gated.step_us > times.step_us:  # the sites' times alone do not tell what the host's queue hides
        gated, sites = times, [replace(site, speedup=max(site.speedup, 1.0)) for site in sites]
    weights, activations = _memory(gpu, works, recipe, training)
    return RecipeEstimate(
        recipe=recipe,
        times=times,
        gated=gated,
        speedup=_ratio(original.step_us, times.step_us),
        gated_speedup=_ratio(original.step_us, gated.step_us),
        sites=tuple(sites),
        weight_bytes=weights,
        activation_bytes=activations,
    )


def _felt(times: Times, on_host: bool) -> float:
    """A site's time as it counts in the step: with the host's where the host is what the step waits for."""
    return max(times.gpu_us, times.host_us) if on_host else times.gpu_us


def _ratio(before: float, after: float) -> float:
    return before / after if after > 0 else 1.0


def _memory(gpu: Gpu, works: Iterable[Work], recipe: str, training: bool) -> tuple[float, float]:
    """Bytes of the weights' copies, and the change in what is saved for the backward (inputs of the products)."""
    if recipe == BF16:
        return 0.0, 0.0
    form = FORMATS[recipe]
    copies = 2 if training and (not form.one_scale or FRACTIONS[gpu.generation].transposes) else 1
    weights = activations = 0.0
    for work in works:
        if takes_recipe(work, recipe):
            weights += copies * form.element_bytes * work.weights
            saved = sum(product.rows * product.ins for product in work.te_products) * work.calls
            activations -= (2.0 - form.element_bytes) * saved if training else 0.0
    return weights, activations
