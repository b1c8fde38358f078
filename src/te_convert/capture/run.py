"""capture(): record a model in several scenarios without changing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn

from te_convert.capture.fake import fake_weights, is_meta, without_meta
from te_convert.capture.graph import Capture, Recording
from te_convert.capture.preserve import mode, preserve_model, seed_all
from te_convert.capture.scenario import Scenario
from te_convert.capture.tracer import ConcreteTracer, LeafPolicy

SEED = 20240  # any fixed number: every run of a model, original or converted, starts from the same random state


def other_mode(scenario: Scenario, training: bool) -> Scenario:
    """The same call in the other mode, under its own name."""
    return replace(scenario, name=f"{scenario.name}[{'train' if training else 'eval'}]", training=training)


def record(model: nn.Module, scenario: Scenario, leaf: LeafPolicy) -> Recording:
    """Record one scenario; the model, random states and inputs are as before afterwards, also after an exception."""
    switch = nullcontext() if scenario.training is None else mode(model, scenario.training)
    with preserve_model(model), switch:
        seed_all(SEED)
        if not is_meta(model):
            before = [id(module) for module in model.modules()]
            recording = ConcreteTracer(leaf).record(model, scenario)
            return replace(recording, restructures=[id(module) for module in model.modules()] != before)
        leaves = {id(module) for module in model.modules() if leaf(module)}  # probes need real numbers
        with fake_weights(model) as fake:
            args, kwargs = without_meta((scenario.args, scenario.kwargs))
            tracer = ConcreteTracer(lambda module: id(module) in leaves)
            recording = tracer.record(model, replace(scenario, args=args, kwargs=kwargs), fake)
        return replace(recording, scenario=scenario)


def capture(
    model: nn.Module,
    scenarios: Sequence[Scenario],
    leaf: LeafPolicy,
    progress: Callable[[int, int], None] | None = None,
) -> Capture:
    """Record every scenario that runs; those that raise are listed with their error.

    Never raises for a model that cannot run: the result then has no graph and the conversion degrades to the module tree.
    """
    recordings: list[Recording] = []
    failures: list[tuple[str, str]] = []
    for index, scenario in enumerate(scenarios):
        try:
            recordings.append(record(model, scenario, leaf))
        except Exception as error:
            failures.append((scenario.name, describe_error(error)))
        if progress is not None:
            progress(index + 1, len(scenarios))
    return Capture(tuple(recordings), tuple(failures))


def describe_error(error: BaseException) -> str:
    """``"RuntimeError: mat1 and mat2 shapes cannot be multiplied"`` on one line, at most 300 characters."""
    first = " ".join(str(error).split())
    return f"{type(error).__name__}: {first}"[:300]


def runs(model: nn.Module, scenario: Scenario) -> BaseException | None:
    """None when the model runs on the scenario, else the exception; the model is unchanged."""
    try:
        with preserve_model(model), torch.no_grad():
            seed_all(SEED)
            if not is_meta(model):
                scenario.call(model)
                return None
            with fake_weights(model) as fake:
                args, kwargs = without_meta((scenario.args, scenario.kwargs))
                torch.func.functional_call(model, fake, args, kwargs)
    except Exception as error:
        return error
    return None
