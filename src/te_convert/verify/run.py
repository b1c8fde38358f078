"""One run of a model for comparison: seeded, in a given mode and precision, leaving the model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from te_convert.capture.preserve import mode, preserve_model, seed_all
from te_convert.capture.run import SEED
from te_convert.capture.scenario import Scenario
from te_convert.capture.tensors import iter_tensors
from te_convert.rewrite.attention import exact_dropout
from te_convert.verify.compare import Outputs
from te_convert.verify.padding import hide_padding, padding_mask
from te_convert.verify.perturb import perturbed
from te_convert.verify.precision import widened


@dataclass(frozen=True)
class Setting:
    """How to run a scenario.

    Attributes:
        perturb: move every 1-D parameter first.
        widen: compute in this dtype instead of the model's own.
        hide_padding: put zeros at padded positions of the outputs, whose values converted attention need not reproduce.
    """

    perturb: bool = False
    widen: torch.dtype | None = None
    hide_padding: bool = False


@contextmanager
def arranged(model: nn.Module, scenario: Scenario, setting: Setting) -> Iterator[None]:
    """Everything around a run but its precision and its seed."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(preserve_model(model))
        stack.enter_context(mode(model, bool(scenario.training)))
        stack.enter_context(exact_dropout())
        stack.enter_context(perturbed(model, setting.perturb))
        yield


@contextmanager
def prepared(model: nn.Module, scenario: Scenario, setting: Setting) -> Iterator[Scenario]:
    """Everything around a run; yields the scenario with its floating inputs in the precision of the run."""
    with ExitStack() as stack:
        stack.enter_context(arranged(model, scenario, setting))
        if setting.widen is not None:
            stack.enter_context(widened(model, setting.widen))
        seed_all(SEED)
        yield scenario


def run(model: nn.Module, scenario: Scenario, setting: Setting) -> Outputs:
    """The floating and integer outputs of one run as (path, tensor), detached; eval mode unless the scenario says train.

    Positions that the inputs mark as padding are zero.

    Raises:
        Exception: whatever the model raises.
    """
    with prepared(model, scenario, setting) as ready:
        output, padded = ready.call(model), padding_mask(model, ready) if setting.hide_padding else None
        tensors = [(path, tensor.detach().clone()) for path, tensor in iter_tensors(output)]
        return tensors if padded is None else [(path, hide_padding(tensor, padded)) for path, tensor in tensors]


def in_eval(scenario: Scenario) -> Scenario:
    """The scenario in eval mode under its own name."""
    return replace(scenario, training=False)
