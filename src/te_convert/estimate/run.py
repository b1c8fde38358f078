"""An estimate of a model's plan, with its recording where there is one."""

from __future__ import annotations

from torch import nn

from te_convert.capture.graph import Capture
from te_convert.errors import InputError
from te_convert.estimate.gpus import Gpu
from te_convert.estimate.model import Estimate
from te_convert.estimate.predict import predict
from te_convert.estimate.traffic import find_eager_attention, find_rest
from te_convert.estimate.work import Work, find_work
from te_convert.plan.model import Plan
from te_convert.replacements.specs import GroupedExpertsSpec

DEFAULT_TOKENS = 8192
"""Taken when the inputs were derived: those are as small as they can be and say nothing about the real load."""


def find_all_work(plan: Plan, model: nn.Module | None = None, captured: Capture | None = None) -> tuple[Work, ...]:
    """The sites of a plan, and with a recording the rest of the model.

    Raises:
        InputError: the plan has no recorded shapes.
    """
    if not any(decision.shapes for decision in plan.decisions):
        raise InputError("the plan has no shapes to estimate from", "give example inputs with which the model runs")
    recording = captured.recordings[0] if captured is not None and captured.recordings else None
    if model is None or recording is None:
        return find_work(plan)
    return (*find_work(plan, find_eager_attention(recording)), *find_rest(model, recording, plan))


def estimate_plan(
    plan: Plan,
    gpu: Gpu,
    recipe: str = "all",
    mode: str = "training",
    tokens: int | None = None,
    model: nn.Module | None = None,
    captured: Capture | None = None,
) -> Estimate:
    """The estimate of a plan; with a model and its capture it covers the whole model, else the sites alone.

    Raises:
        InputError: no shapes, or an unknown recipe, mode or number of tokens.
    """
    works = find_all_work(plan, model, captured)
    whole = model is not None and captured is not None and captured.has_graph
    notes = []
    if not whole:
        notes.append("only the sites are counted: element-wise work between them is not in a plan, so speed-ups are upper limits")
    derived = captured is not None and any(r.scenario.derived for r in captured.recordings)
    if derived and tokens is None:
        tokens = DEFAULT_TOKENS
        notes.append(f"no example inputs were given: {DEFAULT_TOKENS} tokens assumed, in short sequences; name yours with tokens=")
    if any(isinstance(f.spec, GroupedExpertsSpec) and f.spec.routing is None for f in plan.fusions):
        notes.append("experts whose router is not known are left out: how many tokens each gets is not in the shapes")
    return predict(works, gpu, recipe, mode, tokens, whole, notes)
