"""What is measured: a converted directory, a model's source, or a model of the caller's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from te_convert import api
from te_convert.capture.inputs import derive_scenario
from te_convert.capture.scenario import Scenario, normalize_inputs
from te_convert.check.run import is_converted_directory
from te_convert.config import DTYPES
from te_convert.emit.load import read_plan
from te_convert.emit.manifest import read_manifest
from te_convert.emit.original import rebuild_original
from te_convert.emit.source_files import stored_inputs
from te_convert.errors import EnvironmentLacksError, InputError
from te_convert.pipeline import check_model
from te_convert.plan.model import Outcome, Plan


@dataclass(frozen=True)
class Subject:
    """An original on its device, its input, and how to convert it.

    Attributes:
        name: as it was named.
        choices: ``include``, ``exclude`` and ``allow`` of a conversion.
        device: where ``original`` and ``scenario`` are, "cpu" or "cuda".
        directory: where the converted model is stored, if it is.
        plan: that of the directory.
    """

    name: str
    original: nn.Module
    scenario: Scenario
    choices: Mapping[str, Any]
    device: str = "cpu"
    directory: Path | None = None
    plan: Plan | None = None
    notes: tuple[str, ...] = ()


def open_subject(
    target: str | Path | nn.Module,
    inputs: Any,
    device: str,
    dtype: str | None,
    weights: Path | None,
    choices: Mapping[str, Any],
) -> Subject:
    """The subject on its device; a model of the caller's is copied.

    Raises:
        InputError: the target, its inputs or an option cannot be used.
        LoadError: the directory is damaged, or its source changed.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}", f"use one of {', '.join(DTYPES)}")
    if isinstance(target, nn.Module):
        check_model(target)
        found = Subject(type(target).__name__, copy.deepcopy(target), _scenario(target, inputs), choices)
    elif is_converted_directory(str(target)):
        if weights is not None or dtype is not None or any(choices.values()):
            what = "leave out --weights, --dtype, --include, --exclude and --allow"
            raise InputError(f"{target} is converted already: options of a conversion mean nothing here", what)
        found = _open_directory(Path(target), inputs)
    else:
        opened = api.open_model(str(target), weights)
        given = opened.example_inputs if inputs is None else inputs
        found = Subject(str(target), opened.model, _scenario(opened.model, given), choices)
    return _placed(found, device, None if dtype is None else getattr(torch, dtype))


def _open_directory(directory: Path, inputs: Any) -> Subject:
    """Further recipes are converted again, with the same sites."""
    original, plan = rebuild_original(directory), read_plan(directory)
    given = stored_inputs(read_manifest(directory).source, directory / "source") if inputs is None else inputs
    choices = {
        "include": tuple(decision.fqn for decision in plan.converting),
        "exclude": tuple(decision.fqn for decision in plan if decision.outcome is Outcome.EXCLUDED),
        "allow": tuple(dict.fromkeys(fusion.approximation for fusion in plan.fusions if fusion.approximation)),
    }
    return Subject(str(directory), original, _scenario(original, given), choices, directory=directory, plan=plan)


def _scenario(model: nn.Module, inputs: Any) -> Scenario:
    """The first scenario of the inputs, or a derived one."""
    given = normalize_inputs(inputs)
    found = given[0] if given else derive_scenario(model)
    if found is None:
        raise InputError("no example inputs were given and none could be derived", "give --inputs, for instance 'x:float32[2,16]'")
    return found


def _placed(subject: Subject, device: str, dtype: torch.dtype | None) -> Subject:
    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, dtype if dtype is not None and value.is_floating_point() else None)

    scenario, notes = subject.scenario, subject.notes
    if scenario.derived:
        notes = (*notes, f"no example inputs were given; used {scenario.derived}")
    args, kwargs = tree_map(place, (scenario.args, scenario.kwargs))
    moved = Scenario(scenario.name, args, kwargs, derived=scenario.derived)
    original = subject.original.to(device=device, dtype=dtype)
    return replace(subject, original=original, scenario=moved, device=device, notes=notes)


def choose_device(device: str | None) -> str:
    """The GPU where there is one, unless the caller names a device.

    Raises:
        InputError: neither "cpu" nor "cuda".
        EnvironmentLacksError: "cuda" where there is no GPU.
    """
    there = torch.cuda.is_available()
    if device is None:
        return "cuda" if there else "cpu"
    if device not in ("cpu", "cuda"):
        raise InputError(f"unknown device {device!r}", "use cpu or cuda; CUDA_VISIBLE_DEVICES chooses a GPU")
    if device == "cuda" and not there:
        raise EnvironmentLacksError("no CUDA device is available", "leave out --device; te-convert doctor says what is missing")
    return device
