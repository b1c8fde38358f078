"""A few optimizer steps on copies of both models: do their losses stay the same?"""

from __future__ import annotations

import copy

import torch
from torch import nn

from te_convert.capture.preserve import copy_inputs, mode, preserve_rng, seed_all
from te_convert.capture.run import SEED
from te_convert.capture.scenario import Scenario, exits_are_errors
from te_convert.verify.compare import compare
from te_convert.verify.gradients import seeded_loss
from te_convert.verify.model import ScenarioParity
from te_convert.verify.tolerance import judge_steps

LEARNING_RATE = 1e-3


def compare_steps(original: nn.Module, converted: nn.Module, scenario: Scenario, steps: int) -> ScenarioParity:
    """Losses of ``steps`` AdamW steps in eval mode (no dropout), on copies; the models themselves stay as they are.

    Raises:
        Exception: whatever the models raise.
    """
    low = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in original.parameters())
    curves = [torch.tensor(losses(model, scenario, steps), dtype=torch.float64) for model in (original, converted)]
    figures = compare(*curves)
    verdict = judge_steps(figures, low)
    return ScenarioParity(f"{scenario.name}[{steps} steps]", "float32", False, figures, None, verdict.bound, verdict.passed, "loss")


def losses(model: nn.Module, scenario: Scenario, steps: int) -> list[float]:
    """The loss before each step of a copy of the model."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    found = []
    with preserve_rng(), mode(model, training=False), torch.enable_grad(), exits_are_errors():
        seed_all(SEED)
        for _ in range(steps):
            args, kwargs = copy_inputs((scenario.args, scenario.kwargs))
            loss = seeded_loss(model(*args, **kwargs), None)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
    return found
