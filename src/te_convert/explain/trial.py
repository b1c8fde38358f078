"""A trial of one fusion: the model is copied, rewritten and run, and the fusion says how often it ran and why not."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from torch import nn

from te_convert.capture.graph import Capture
from te_convert.capture.preserve import mode, preserve_model, seed_all
from te_convert.capture.run import SEED, describe_error
from te_convert.capture.scenario import Scenario
from te_convert.capture.tensors import model_device
from te_convert.explain.model import Trial
from te_convert.plan.model import Plan
from te_convert.rewrite.apply import apply_plan
from te_convert.rewrite.fused import fused_record
from te_convert.runtime.backend import choose_backend


def try_fusion(model: nn.Module, capture: Capture, plan: Plan, fqn: str) -> Trial:
    """Run the recorded scenarios on a converted copy and read the counters of the fusion at ``fqn``; the model is unchanged."""
    backend = choose_backend("auto", model_device(model).type).name
    if any(parameter.is_meta for parameter in model.parameters()):
        return Trial(backend, problem="the model has no weights to run with")
    try:
        applied = apply_plan(copy.deepcopy(model), plan, backend)
        for recording in capture.recordings:
            _run(applied.model, recording.scenario)
    except Exception as error:
        return Trial(backend, problem=describe_error(error))
    records = (fused_record(module) for module in applied.model.modules())
    record = next((each for each in records if each is not None and each.decision.fqn == fqn), None)
    if record is None:
        return Trial(backend, problem=f"{fqn} is not in the converted model")
    return Trial(backend, record.executed, record.fallbacks, dict(getattr(record, "why_not", {})))


def _run(model: nn.Module, scenario: Scenario) -> None:
    switch = nullcontext() if scenario.training is None else mode(model, scenario.training)
    with preserve_model(model), switch, torch.no_grad():
        seed_all(SEED)
        scenario.call(model)
