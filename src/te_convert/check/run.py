"""Checking a directory that te_convert wrote, a model that is converted for the purpose, or two models of the caller's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from te_convert import api
from te_convert.capture.inputs import derive_scenario
from te_convert.check.golden import compare_golden, read_golden, write_golden
from te_convert.check.model import CheckResult
from te_convert.config import Progress
from te_convert.emit.manifest import MANIFEST, read_manifest
from te_convert.emit.original import rebuild_original
from te_convert.emit.source_files import stored_inputs
from te_convert.errors import InputError
from te_convert.rewrite.fallback import fallbacks
from te_convert.rewrite.fused import fused_record
from te_convert.rewrite.state import converted_modules
from te_convert.runtime.probe import describe_environment
from te_convert.verify.model import Parity
from te_convert.verify.reference import low_precision_dtype

_VERSIONS = ("te_convert", "torch", "transformers", "transformer_engine", "python", "platform")


def check_target(
    target: str,
    *,
    inputs: Any = None,
    backend: str = "auto",
    weights: Path | None = None,
    choices: Mapping[str, Any] | None = None,
    golden: Path | None = None,
    update_golden: bool = False,
    progress: Progress | None = None,
    bisect: bool = False,
) -> CheckResult:
    """Check a converted directory, or convert a model in memory and check that; nothing but a golden file is written.

    Args:
        target: a directory that te_convert wrote, or what ``te_convert.api.open_model`` takes.
        inputs: example inputs; by default those of the model's source, else derived ones.
        backend: "auto", "te" (the models are moved to the GPU) or "reference".
        weights: weights to load into a model first.
        choices: ``recipe``, ``include``, ``exclude`` and ``allow`` of a conversion.
        golden: figures to compare with.
        update_golden: record the figures there instead, if the check passes.
        progress: called with (stage, done, total).
        bisect: when the model as a whole fails, name a smallest set of sites that fails.

    Raises:
        InputError: the target, the inputs or the golden file cannot be used.
        LoadError: the directory is damaged, or its source changed.
        EnvironmentLacksError: ``backend="te"`` where TE cannot run, or Transformers is needed and not installed.
    """
    if golden is not None and not update_golden:
        read_golden(golden)  # before minutes of work
    if is_converted_directory(target):
        if weights is not None or any((choices or {}).values()):
            raise InputError(
                f"{target} is converted already: options of a conversion mean nothing here",
                "leave out --weights, --include, --exclude, --allow and --recipe",
            )
        result = _check_directory(target, inputs, backend, bisect)
    else:
        result = _check_model(target, inputs, backend, weights, {**(choices or {}), "bisect": bisect}, progress)
    return with_golden(result, golden, update_golden)


def is_converted_directory(target: str) -> bool:
    """Whether the target is a directory that te_convert wrote, damaged ones included."""
    path = Path(target)
    return (path / MANIFEST).exists() and not (path / "config.json").is_file()


def check_pair(original: nn.Module, converted: nn.Module, inputs: Any) -> CheckResult:
    """Compare two models that the caller has, as :func:`te_convert.verify` does.

    Raises:
        InputError: no inputs, or the original fails on them.
    """
    start = time.perf_counter()
    name = type(original).__name__
    return _result(name, "pair", "", name, converted, api.verify(original, converted, inputs), start)


def with_golden(result: CheckResult, path: Path | None, update: bool) -> CheckResult:
    """The result with its golden verdict; figures of a check that did not pass are never recorded.

    Raises:
        InputError: the file cannot be read, written or compared with.
    """
    if path is None:
        return result
    if not update:
        return replace(result, golden=compare_golden(path, read_golden(path), result))
    if result.exit_code:
        return replace(result, notes=(*result.notes, f"{path} was not written: only figures of a check that passes are recorded"))
    return replace(result, golden=write_golden(path, result))


def _check_directory(target: str, inputs: Any, backend: str, bisect: bool) -> CheckResult:
    start, directory = time.perf_counter(), Path(target)
    device = _device(backend)
    converted = api.load(directory, device, backend)
    original = rebuild_original(directory).to(device or "cpu")
    notes = ["the original's weights are those of the directory, taken back through the weight maps"]
    if inputs is None:
        inputs, note = _inputs_of(directory, original)
        notes.append(note)
    parity = api.verify(original, converted, _moved(inputs, device), bisect=bisect)
    found = _result(target, "directory", str(directory / MANIFEST), type(original).__name__, converted, parity, start)
    return replace(found, notes=(*notes, *found.notes))


def _inputs_of(directory: Path, original: nn.Module) -> tuple[Any, str]:
    own = stored_inputs(read_manifest(directory).source, directory / "source")
    if own is not None:
        return own, "the inputs are example_inputs of the stored source"
    scenario = derive_scenario(original)
    if scenario is None:
        raise InputError(f"{directory} stores no inputs and none could be derived", "give --inputs, for instance 'x:float32[2,16]'")
    return (scenario.args, scenario.kwargs), f"no inputs are stored; used {scenario.derived}"


def _check_model(
    target: str, inputs: Any, backend: str, weights: Path | None, choices: Mapping[str, Any], progress: Progress | None
) -> CheckResult:
    start, device = time.perf_counter(), _device(backend)
    opened = api.open_model(target, weights)
    inputs = opened.example_inputs if inputs is None else inputs
    model = opened.model if device is None else opened.model.to(device)
    result = api.convert(model, _moved(inputs, device), backend=backend, inplace=True, progress=progress, **choices)
    file = next((str(origin) for origin in opened.source.origins if origin.name == opened.source.main), "")
    if opened.source.kind == "module":
        file = next(map(str, opened.source.origins), "")
    found = _result(target, "model", file, result.report.model_class, result.model, result.report.parity, start)
    return replace(found, notes=tuple(dict.fromkeys((*result.report.notes, *result.report.warnings))))


def _result(target: str, kind: str, file: str, model_class: str, converted: nn.Module, parity: Parity, start: float) -> CheckResult:
    environment = describe_environment()
    return CheckResult(
        target=target,
        kind=kind,
        file=file,
        model_class=model_class,
        dtype=_dtype_name(converted),
        converted=converted_names(converted),
        parity=parity,
        versions={name: None if environment.get(name) is None else str(environment[name]) for name in _VERSIONS},
        notes=parity.notes,
        fallbacks=tuple(fallbacks(converted)),
        seconds=time.perf_counter() - start,
    )


def converted_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the original modules that run on a replacement: converted ones, and the members of fusions."""
    names: list[str] = []
    for name, module in converted_modules(model):
        fused = fused_record(module)
        names += [name] if fused is None else [member.fqn for member in fused.decision.members]
    return tuple(dict.fromkeys(names))


def _dtype_name(model: nn.Module) -> str:
    first = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return str(low_precision_dtype(model) or first).removeprefix("torch.")


def _device(backend: str) -> str | None:
    """TE's modules run on a GPU only; where there is none, choosing the backend says so."""
    return "cuda" if backend == "te" and torch.cuda.is_available() else None


def _moved(inputs: Any, device: str | None) -> Any:
    if device is None:
        return inputs
    return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, inputs)
