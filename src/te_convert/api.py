"""The public functions: the only place that strings the stages together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from te_convert.benefit import estimate
from te_convert.capture.ambient import plain_modes
from te_convert.capture.arguments import as_path, check_pair, require, require_module, require_weights
from te_convert.capture.scenario import normalize_inputs
from te_convert.capture.tensors import model_device
from te_convert.config import ConvertConfig, Progress, patterns
from te_convert.emit.input_spec import parse_inputs
from te_convert.emit.load import load_directory
from te_convert.emit.sources import ModelSource, OpenedModel, open_source, source_of
from te_convert.emit.weights_file import load_weights
from te_convert.emit.write import check_out, write_directory
from te_convert.errors import InputError
from te_convert.estimate.gpus import check_gpu
from te_convert.explain.api import explain
from te_convert.explain.model import Explanation
from te_convert.pipeline import Conversion, check_model, observe
from te_convert.plan.choose import make_plan
from te_convert.plan.model import PLAN_ATTRIBUTE, Plan
from te_convert.report.model import Report
from te_convert.rewrite import optimizer as optimizers
from te_convert.rewrite.apply import Applied
from te_convert.rewrite.checkpoints import in_recipe
from te_convert.rewrite.fallback import SiteFallback, fallbacks
from te_convert.rewrite.fused import fused_record
from te_convert.rewrite.materialize import materialize
from te_convert.rewrite.site import get_record
from te_convert.rewrite.state import (
    converted_modules,
    load_original_state_dict,
    original_state_dict,
    revert,
    te_state_dict,
)
from te_convert.rewrite.tensor_parallel import refuse_parallel
from te_convert.runtime.backend import multiplies_in_tf32
from te_convert.runtime.doctor import Check, doctor
from te_convert.stream.api import convert_checkpoint, export
from te_convert.stream.convert import Streamed
from te_convert.verify.gate import verify_applied
from te_convert.verify.model import Parity
from te_convert.verify.reference import record_reference
from te_convert.verify.steps import compare_steps
from te_convert.verify.tolerance import products_in_tf32

__all__ = [
    "Check",
    "Explanation",
    "OpenedModel",
    "Parity",
    "Plan",
    "Report",
    "Result",
    "SiteFallback",
    "Streamed",
    "analyze",
    "autocast",
    "check_gpu",
    "check_out",
    "convert",
    "convert_checkpoint",
    "doctor",
    "estimate",
    "explain",
    "export",
    "fallbacks",
    "load",
    "load_original_state_dict",
    "materialize",
    "open_model",
    "original_state_dict",
    "parse_inputs",
    "remap_optimizer",
    "revert",
    "save",
    "te_state_dict",
    "verify",
]


@dataclass(frozen=True)
class Result:
    """What :func:`convert` returns; unpacks as ``model, report``.

    Attributes:
        model: the converted model, or the model unchanged when nothing could be converted safely.
        report: site by site, what happened and why, with parity figures.
        plan: the decisions that ``model`` carries.
        origins: the Parameter objects of the model that was converted, for :func:`remap_optimizer`.
    """

    model: nn.Module
    report: Report
    plan: Plan
    source: ModelSource | None = field(default=None, compare=False)
    origins: optimizers.Origins = field(default_factory=optimizers.Origins, compare=False, repr=False)

    @property
    def converted(self) -> bool:
        """True when at least one site of ``model`` runs on a replacement."""
        return self.report.converted

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.report))

    def save(self, out: str | Path, *, source: ModelSource | None = None, force: bool = False) -> Path:
        """Write the result as a directory that :func:`load` reads; see :func:`save`."""
        return save(self, out, source=source, force=force)


@plain_modes()
def convert(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    recipe: str | None = None,
    backend: str = "auto",
    fuse: bool = True,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    inplace: bool = False,
    allow: str | Sequence[str] = (),
    verify: bool = True,
    strict: bool = False,
    min_sqnr: float | None = None,
    bisect: bool = False,
    policy: str = "none",
    gpu: str | None = None,
    tokens: int | None = None,
    tp_mesh: Any = None,
    progress: Progress | None = None,
) -> Result:
    """Replace what Transformer Engine has an equivalent for, prove that the numbers are the same, and report every site.

    The caller's ``no_grad``, inference mode and autocast have no effect on the result.

    Args:
        model: any ``nn.Module`` with real weights, also a root ``nn.Linear``.
        example_inputs: a tensor, tuple of args, dict of kwargs, ``(args, kwargs)``, a list of those (several scenarios), or None
            to use the model's own or derived ones.
        recipe: None or "bf16" for high precision; an FP8 or FP4 recipe is recorded in the plan for :func:`autocast`.  On twins
            it is emulated, and sites that it would cost too much accuracy are planned to stay in high precision.
        backend: "te" for Transformer Engine's modules, "reference" for the pure-PyTorch twins, "auto" for TE where it can run.
        fuse: let several modules become one TE module (te.LayerNormLinear, te.LayerNormMLP, te.DotProductAttention, ...).
        include: FQN globs; only matching sites are converted when given.
        exclude: FQN globs that are left alone.
        inplace: rewrite ``model`` itself; otherwise it is copied and stays bit for bit as it is, also after an exception.
        allow: named approximations that may be used.
        verify: compare with the original and put failing sites back.
        strict: raise instead of returning a result that is not fully verified.
        min_sqnr: least SQNR in dB of the model in the emulated recipe; 20 for FP8 and 11 for NVFP4 when None.  The bound of
            each site moves with it: 18 and 8.
        bisect: where sites that are right alone are wrong together, find a smallest such set (up to 128 more runs), name it in
            the report, and put back one of its sites.
        policy: "benefit" keeps sites in high precision at which the recipe is predicted to be slower (docs/estimate.md); "none"
            only says so, where a GPU is named or present.
        gpu: what to predict for, such as "h100"; this machine's when None.
        tokens: of a training step on it; those of the example inputs when None.
        tp_mesh: a one-dimensional ``DeviceMesh``: each of its ranks calls convert with the same model and inputs and keeps its part
            of the Linears and heads that provably form tensor-parallel regions; the others stay whole (``tp.replicated``).
            ``verify`` also compares the divided model, on its ranks, with the whole one.
        progress: called with (stage, done, total).

    Returns:
        A :class:`Result`; ``result.converted`` is False when the model came back unchanged.

    Raises:
        InputError: not a module, weights on meta, an unknown option, or example inputs on which the model itself fails; a mesh that
            cannot be used, or ranks with different weights or inputs.
        EnvironmentLacksError: ``backend="te"`` where TE cannot run.
        ConversionError: ``strict`` and something was reverted, not verified, or not observed.

    Example:
        >>> import torch, te_convert
        >>> net = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 64))
        >>> model, report = te_convert.convert(net, (torch.randn(4, 32),))
        >>> report.parity.passed, [str(site.outcome) for site in report.sites]
        (True, ['FUSED', 'FUSED'])
    """
    config = ConvertConfig(
        recipe=recipe,
        backend=backend,
        fuse=fuse,
        inplace=inplace,
        verify=verify,
        strict=strict,
        min_sqnr=min_sqnr,
        bisect=bisect,
        policy=policy,
        gpu=gpu,
        tokens=tokens,
        progress=progress,
        tp_mesh=tp_mesh,
        **patterns(include, exclude, allow),
    )
    check_model(model)
    require_weights(model)
    origins = optimizers.record_origins(model)
    return Result(*Conversion(model, config, normalize_inputs(example_inputs)).run(), origins=origins)


@plain_modes()
def analyze(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    recipe: str | None = None,
    fuse: bool = True,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    allow: str | Sequence[str] = (),
    progress: Progress | None = None,
) -> Plan:
    """What :func:`convert` would do, without doing it; needs torch alone and works on meta models.

    Raises:
        InputError: not a module, an unknown option, or example inputs on which the model itself fails.
    """
    config = ConvertConfig(recipe=recipe, fuse=fuse, progress=progress, **patterns(include, exclude, allow))
    check_model(model, "analyze")
    _, captured, notes = observe(model, normalize_inputs(example_inputs), config)
    return make_plan(model, captured, config, notes)


@plain_modes()
def verify(original: nn.Module, converted: nn.Module, inputs: Any, *, steps: int = 0, bisect: bool = False) -> Parity:
    """Compare a converted model with its original: whole model in several shapes, gradients, each converted site alone.

    Both models are left as they are.  Nothing is reverted.

    Args:
        original: the model before conversion.
        converted: the converted model.
        inputs: as ``example_inputs`` of :func:`convert`.
        steps: also take so many optimizer steps on copies of both models and compare the losses.
        bisect: when the model as a whole fails, name a smallest set of sites that fails (``Parity.interactions``).

    Raises:
        InputError: not modules, no inputs, a number of steps that is none, or the original fails on the inputs.
    """
    check_pair(original, converted, steps)
    scenarios = normalize_inputs(inputs)
    refuse_parallel(converted, "verify")
    if not scenarios:
        raise InputError("verify needs inputs", "pass the inputs to compare on")
    fusions = [record.decision for module in converted.modules() if (record := fused_record(module)) is not None]
    padded = any(fusion.skips_padding for fusion in fusions)
    reference = record_reference(original, scenarios, hide_padding=padded)
    if not reference.runs:
        raise InputError(f"the original fails on the inputs: {'; '.join(reference.notes)}", "pass inputs that it takes")
    sites = dict(converted_modules(converted))
    backend = next((get_record(site).backend for site in sites.values()), "reference")
    rounds = reference.low is None and multiplies_in_tf32(backend, model_device(converted).type)
    with products_in_tf32() if rounds else nullcontext():
        parity = verify_applied(Applied(converted, backend, sites), reference, revert=False, bisect=bisect)
    if steps and parity.scenarios:
        curve = compare_steps(original, converted, scenarios[0], steps)
        status = parity.status if curve.passed else "failed"
        parity = replace(parity, status=status, scenarios=(*parity.scenarios, curve))
    return parity


@plain_modes()
def remap_optimizer(optimizer: Optimizer, result: Result, *, inplace: bool = False) -> Optimizer:
    """An optimizer of the converted parameters that goes on where ``optimizer``, one of the original's, is now.

    Moments and momenta of joined weights are joined as the weights are; param groups and their settings stay.

    Args:
        optimizer: has parameters of the model that was given to :func:`convert`.
        result: what :func:`convert` returned.
        inplace: change ``optimizer`` itself, which keeps its learning-rate schedulers; otherwise it stays as it is.

    Raises:
        InputError: not an optimizer, none of its parameters are the model's, or parameters that became one are in param groups
            with different settings or have state that cannot be joined; nothing was changed.
    """
    given: tuple[Any, Any] = (optimizer, result)
    if not isinstance(given[0], Optimizer) or not isinstance(given[1], Result):
        kinds = " and ".join(type(each).__name__ for each in given)
        raise InputError(f"remap_optimizer takes a torch optimizer and the result of convert(), got {kinds}")
    refuse_parallel(result.model, "remap")
    return optimizers.follow_conversion(optimizer, result.origins, result.model, inplace)


@plain_modes()
def load(path: str | Path, device: Any = None, backend: str = "auto") -> nn.Module:
    """Load a directory written by :func:`save` or the command line.

    Args:
        path: the directory.
        device: where to put the model; None keeps it on the CPU.
        backend: "auto" takes TE when it can run on ``device``, and twins where it cannot, for the model or for one site, with one
            warning that names the cause; "te" demands TE, and "reference" takes the twins.

    Raises:
        InputError: not a path.
        LoadError: damaged, tampered with, an unknown schema, or a source that changed.
        EnvironmentLacksError: ``backend="te"`` where TE cannot run.
    """
    return load_directory(as_path(path, "load"), device, backend)


def save(result: Result, out: str | Path, *, source: ModelSource | None = None, force: bool = False) -> Path:
    """Write a result as a directory: manifest, plan, weights, report and the model's source.

    Args:
        result: what :func:`convert` returned.
        out: the directory; its parents are made.
        source: where the model comes from (``open_model(...).source``); found by itself for Transformers models.
        force: replace an existing directory.

    Raises:
        InputError: not a result, ``out`` exists or cannot be written, or the source is not known.
    """
    require(result, Result, "save takes the result of convert()", "keep what convert() returns as a whole")
    directory = as_path(out, "save")
    refuse_parallel(result.model, "save")
    found = source or result.source or source_of(result.model)
    if found is None:
        raise InputError(
            "the model's source is not known, so the directory could not be loaded again",
            "pass source=te_convert.open_model('model.py').source",
        )
    return write_directory(result.model, result.plan, result.report, found, directory, force=force)


def open_model(spec: str | Path, weights: str | Path | None = None) -> OpenedModel:
    """A model from ``file.py``, ``file.py:name``, ``pkg.mod:name`` or a Transformers directory.

    Raises:
        InputError: nothing usable there; the message says what was found.
    """
    opened = open_source(str(as_path(spec, "open_model")) if not isinstance(spec, str) else spec)
    if weights is not None:
        load_weights(opened.model, as_path(weights, "open_model"))
    return opened


def autocast(model: nn.Module) -> AbstractContextManager[Any]:
    """Transformer Engine's autocast with the recipe of the model's plan; does nothing on twins or in high precision.

    Inside, the model's activation checkpointing runs through ``te.checkpoint``, which recomputes in the recipe.

    Raises:
        InputError: not a module.
        EnvironmentLacksError: the recipe cannot run on this GPU or with this Transformer Engine.
    """
    require_module(model, "autocast", "pass the converted model")
    plan: Plan | None = model.__dict__.get(PLAN_ATTRIBUTE)
    return in_recipe(model, None if plan is None else plan.recipe)
