"""What an estimate does to a plan: an advice at each site where the recipe is predicted to lose, and on request high precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from te_convert.capture.graph import Capture
from te_convert.config import ConvertConfig
from te_convert.errors import InputError
from te_convert.estimate.gpus import Gpu, chosen_gpu
from te_convert.estimate.model import BF16, Estimate, SiteEstimate
from te_convert.estimate.run import estimate_plan
from te_convert.plan.model import Plan
from te_convert.reasons import Reason, ReasonCode, reason


def benefit_gpu(config: ConvertConfig) -> Gpu | None:
    """The GPU that a conversion is weighed for: the named one, else this machine's; None where nothing is to be weighed.

    Raises:
        InputError: an unknown name, or ``policy="benefit"`` without a GPU or without a recipe to weigh.
    """
    low = config.recipe not in (None, BF16)
    if config.policy == "benefit" and not low:
        raise InputError("policy='benefit' weighs a low-precision recipe, and none was given", "pass recipe='fp8' or another")
    if config.policy == "benefit" or config.gpu is not None:
        return chosen_gpu(config.gpu)
    try:
        return chosen_gpu(None) if low else None
    except InputError:  # without a GPU nobody asked for a prediction
        return None


@dataclass(frozen=True)
class Weighed:
    """A plan after its benefit was estimated.

    Attributes:
        warning: a line for the report when the recipe does not pay at all, or "".
        figures: the estimate without its single sites, for the report; None when there is none.
    """

    plan: Plan
    warning: str = ""
    figures: dict[str, Any] | None = None


def weigh(plan: Plan, model: nn.Module, captured: Capture, gpu: Gpu | None, config: ConvertConfig) -> Weighed:
    """The plan after its benefit was estimated.

    Nothing changes without a GPU, a low-precision recipe, or a recording.

    Raises:
        InputError: a number of tokens that is not positive.
    """
    if gpu is None or plan.recipe in (None, BF16) or not captured.has_graph or not plan.converting:
        return Weighed(plan)
    estimate = estimate_plan(plan, gpu, str(plan.recipe), "training", config.tokens, model, captured)
    line = not_worth_it(estimate)
    kept = apply_estimate(plan, estimate, config.policy == "benefit")
    note = f"benefit: predicted for training on {estimate.gpu} with {estimate.tokens} tokens; {estimate.verdict.text}"
    return Weighed(replace(kept, notes=(*kept.notes, note)), line, _figures(estimate))


def _figures(estimate: Estimate) -> dict[str, Any]:
    recipes = [{key: value for key, value in each.to_dict().items() if key != "sites"} for each in estimate.recipes]
    return {**estimate.to_dict(), "recipes": recipes}


def apply_estimate(plan: Plan, estimate: Estimate, keep: bool) -> Plan:
    """A copy of the plan that says where its recipe is predicted to be slower than high precision.

    Args:
        plan: with a recipe.
        estimate: of this plan, with that recipe's figures last.
        keep: also keep those sites in high precision (``policy="benefit"``).
    """
    chosen = estimate.recipes[-1]
    if chosen.unavailable or chosen.recipe == BF16:
        return plan
    for site in chosen.losing:
        why = reason(ReasonCode.BENEFIT_FP8_SLOWER, slower_text(site, chosen.recipe, estimate.gpu))
        plan = plan.keep_high(site.fqn, why) if keep else _advise(plan, site.fqn, why)
    return plan


def slower_text(site: SiteEstimate, recipe: str, gpu: str) -> str:
    """The figures of one site, predicted."""
    low, high = site.recipe, site.te
    return (
        f"{recipe} on {gpu}: {site.speedup:.2f}x of bf16 predicted (GPU {low.gpu_us:.0f} µs against {high.gpu_us:.0f}, "
        f"host {low.host_us:.0f} µs against {high.host_us:.0f})"
    )


def not_worth_it(estimate: Estimate) -> str:
    """One line for the report when the recipe does not pay for the model as a whole, "" when it does."""
    high, chosen = estimate.recipes[0], estimate.recipes[-1]
    if chosen.unavailable or chosen.recipe == BF16 or chosen.gated_speedup > max(high.speedup, 1.0):
        return ""
    code = ReasonCode.BENEFIT_NOT_WORTH_IT.value
    return (
        f"{code}: {chosen.recipe} is predicted not to be worth it on {estimate.gpu} for {estimate.tokens} tokens "
        f"({estimate.mode}): {chosen.speedup:.2f}x of the eager original, bf16 on Transformer Engine {high.speedup:.2f}x"
    )


def _advise(plan: Plan, fqn: str, why: Reason) -> Plan:
    """The advice alone, at the site or at the products of a fusion."""
    fusion = next((fusion for fusion in plan.fusions if fusion.fqn == fqn), None)
    norms = {member.fqn for member in fusion.members if member.role == "norm"} if fusion is not None else set()

    def told(decision_fqn: str, place: str | None) -> bool:
        return decision_fqn not in norms and (place == fqn if fusion is not None else decision_fqn == fqn)

    decisions = (replace(d, reasons=(*d.reasons, why)) if told(d.fqn, d.fused_into) else d for d in plan.decisions)
    return replace(plan, decisions=tuple(decisions))
