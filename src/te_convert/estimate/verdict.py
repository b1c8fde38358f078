"""What an estimate advises, in plain words and as a stable code."""

from __future__ import annotations

from collections.abc import Sequence

from te_convert.estimate.model import BF16, RecipeEstimate, Verdict

LEAST_GAIN = 1.05
"""A predicted speed-up below this is called none: it is about half of the median error on rows that were held out."""


def judge(estimates: Sequence[RecipeEstimate], gpu: str, any_site: bool, asked: str | None) -> Verdict:
    """The verdict over TE in high precision (first) and the recipes.

    Args:
        estimates: high precision first.
        gpu: for the text.
        any_site: the plan converts something.
        asked: the one recipe that was asked for, or None for all.
    """
    high, recipes = estimates[0], [each for each in estimates[1:] if not each.unavailable]
    if not any_site:
        return Verdict("nothing-to-convert", "no site of this model can run on Transformer Engine")
    if asked not in (None, BF16) and not recipes:
        why = estimates[1].unavailable if len(estimates) > 1 else "it is unknown"
        return Verdict("recipe-unavailable", f"{asked} cannot run on {gpu}: {why}{_instead(high)}")
    best = max(recipes, key=lambda each: each.gated_speedup, default=None)
    if best is not None and best.winning and best.gated_speedup > high.speedup and best.gated_speedup >= LEAST_GAIN:
        return _take(best, high, gpu)
    if high.speedup >= LEAST_GAIN:
        text = f"stay in bf16 on Transformer Engine: {high.speedup:.2f}x of the original is predicted on {gpu}"
        lost = f"; the best recipe ({best.recipe}) gives {best.speedup:.2f}x" if best is not None else ""
        return Verdict("stay-in-bf16", text + lost, BF16)
    top = max([high, *recipes], key=lambda each: each.gated_speedup)
    return Verdict(
        "not-worth-it", f"not worth it on {gpu}: the best that is predicted is {top.gated_speedup:.2f}x, with {top.recipe}"
    )


def _take(best: RecipeEstimate, high: RecipeEstimate, gpu: str) -> Verdict:
    figures = f"{best.gated_speedup:.2f}x of the original is predicted on {gpu} (bf16 on TE: {high.speedup:.2f}x)"
    if not best.losing:
        return Verdict("convert", f"convert with {best.recipe}: {figures}", best.recipe)
    won, lost = len(best.winning), len(best.losing)
    text = f"convert with {best.recipe}, but only {won} of the {won + lost} sites it could compute: {figures}"
    return Verdict("only-these-sites", text + "; --policy benefit keeps the others in high precision", best.recipe)


def _instead(high: RecipeEstimate) -> str:
    return f"; bf16 on Transformer Engine is predicted to give {high.speedup:.2f}x" if high.speedup >= LEAST_GAIN else ""
