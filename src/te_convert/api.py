"""The public functions: the only place that strings the stages together."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from te_convert.capture.fake import is_meta
from te_convert.capture.graph import Capture
from te_convert.capture.inputs import derive_scenario
from te_convert.capture.run import capture, describe_error, other_mode
from te_convert.capture.scenario import Scenario, normalize_inputs
from te_convert.capture.tensors import model_device
from te_convert.config import ConvertConfig, Progress, patterns
from te_convert.emit.input_spec import parse_inputs
from te_convert.emit.load import load_directory
from te_convert.emit.sources import ModelSource, OpenedModel, open_source, source_of
from te_convert.emit.weights_file import load_weights
from te_convert.emit.write import check_out, write_directory
from te_convert.errors import ConversionError, EnvironmentLacksError, InputError
from te_convert.match.leaves import LeafPolicy
from te_convert.plan.choose import make_plan
from te_convert.plan.model import Plan
from te_convert.reasons import ReasonCode, reason
from te_convert.report.model import Report, build_sites, measure_coverage
from te_convert.rewrite.apply import Applied, apply_plan
from te_convert.rewrite.site import get_record, is_converted
from te_convert.rewrite.state import (
    converted_modules,
    load_original_state_dict,
    original_state_dict,
    revert,
    te_state_dict,
)
from te_convert.runtime.backend import Backend, choose_backend
from te_convert.runtime.doctor import Check, run_checks
from te_convert.runtime.probe import describe_environment
from te_convert.verify.gate import verify_applied
from te_convert.verify.model import Parity
from te_convert.verify.reference import Reference, record_reference

__all__ = [
    "Check",
    "OpenedModel",
    "Parity",
    "Plan",
    "Report",
    "Result",
    "analyze",
    "autocast",
    "check_out",
    "convert",
    "doctor",
    "load",
    "load_original_state_dict",
    "open_model",
    "original_state_dict",
    "parse_inputs",
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
    """

    model: nn.Module
    report: Report
    plan: Plan
    source: ModelSource | None = field(default=None, compare=False)

    @property
    def converted(self) -> bool:
        """True when at least one site of ``model`` runs on a replacement."""
        return self.report.converted

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.report))

    def save(self, out: str | Path, *, source: ModelSource | None = None, force: bool = False) -> Path:
        """Write the result as a directory that :func:`load` reads; see :func:`save`."""
        return save(self, out, source=source, force=force)


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
    progress: Progress | None = None,
) -> Result:
    """Replace what Transformer Engine has an equivalent for, prove that the numbers are the same, and report every site.

    Args:
        model: any ``nn.Module`` with real weights, also a root ``nn.Linear``.
        example_inputs: a tensor, tuple of args, dict of kwargs, ``(args, kwargs)``, a list of those (several scenarios), or None
            to use the model's own or derived ones.
        recipe: None or "bf16" for high precision; an FP8 or FP4 recipe is recorded in the plan for :func:`autocast`.
        backend: "te" for Transformer Engine's modules, "reference" for the pure-PyTorch twins, "auto" for TE where it can run.
        fuse: allow fused replacements (none of the present rules fuses).
        include: FQN globs; only matching sites are converted when given.
        exclude: FQN globs that are left alone.
        inplace: rewrite ``model`` itself; otherwise it is copied and stays bit for bit as it is, also after an exception.
        allow: named approximations that may be used.
        verify: compare with the original and put failing sites back.
        strict: raise instead of returning a result that is not fully verified.
        progress: called with (stage, done, total).

    Returns:
        A :class:`Result`; ``result.converted`` is False when the model came back unchanged.

    Raises:
        InputError: not a module, weights on meta, an unknown option, or example inputs on which the model itself fails.
        EnvironmentLacksError: ``backend="te"`` where TE cannot run.
        ConversionError: ``strict`` and something was reverted, not verified, or not observed.

    Example:
        >>> import torch, te_convert
        >>> net = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 64))
        >>> model, report = te_convert.convert(net, (torch.randn(4, 32),))
        >>> report.parity.passed, [str(site.outcome) for site in report.sites]
        (True, ['CONVERTED', 'CONVERTED'])
    """
    config = ConvertConfig(
        recipe=recipe,
        backend=backend,
        fuse=fuse,
        include=patterns(include, "include"),
        exclude=patterns(exclude, "exclude"),
        inplace=inplace,
        allow=patterns(allow, "allow"),
        verify=verify,
        strict=strict,
        progress=progress,
    )
    _check_model(model)
    if is_meta(model):
        raise InputError(
            "the model's weights are on the meta device", "load the weights first, or use te_convert.analyze for a plan"
        )
    return _Conversion(model, config, normalize_inputs(example_inputs)).run()


class _Conversion:
    """One call of convert(): capture, plan, reference, rewrite, verify, report."""

    def __init__(self, model: nn.Module, config: ConvertConfig, given: tuple[Scenario, ...]) -> None:
        self.original, self.config, self.given = model, config, given
        self.backend: Backend = choose_backend(config.backend, model_device(model).type)
        self.timings: dict[str, float] = {}

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timings[stage] = self.timings.get(stage, 0.0) + time.perf_counter() - start

    def run(self) -> Result:
        """Never leaves the caller's model changed unless ``inplace`` and the result is returned."""
        with self._timed("copy"):
            target, problem = self._copy()
        if target is None:
            return self._unchanged(problem)
        with self._timed("capture"):
            scenarios, captured, notes = observe(target, self.given, self.config)
        with self._timed("plan"):
            plan = make_plan(target, captured, self.config, notes)
        reference = Reference()
        with self._timed("reference"):
            if self.config.verify and plan.converting:
                reference = record_reference(target, scenarios)
        with self._timed("rewrite"):
            applied, plan = self._apply(target, plan)
        try:
            result = self._finish(applied, plan, reference)
        except BaseException:  # also an interrupt, a failing progress callback or strict: nothing half-made is left behind
            applied.undo_all()
            raise
        _remember(result.model, result.plan)
        return result

    def _finish(self, applied: Applied, plan: Plan, reference: Reference) -> Result:
        """Verify the rewrite, put failing sites back, and report."""
        parity = Parity("not-verified", self.backend.name, notes=() if plan.converting else ("nothing was converted",))
        with self._timed("verify"):
            if self.config.verify and plan.converting:
                parity = verify_applied(applied, reference, progress=lambda a, b: self.config.report_progress("verify", a, b))
        for site in parity.reverted:
            plan = plan.refuse(site.fqn, reason(ReasonCode.PARITY_FAILED, site.why))
        model = applied.model
        if not plan.converting and not self.config.inplace:
            model = self.original
        result = Result(model, self._report(plan, parity), plan)
        if self.config.strict:
            _demand_everything(result)
        return result

    def _copy(self) -> tuple[nn.Module | None, str]:
        if self.config.inplace:
            return self.original, ""
        try:
            return copy.deepcopy(self.original), ""
        except Exception as error:
            return None, describe_error(error)

    def _unchanged(self, problem: str) -> Result:
        """The model could not be copied: say what would have been converted, and why it was not."""
        _, captured, notes = observe(self.original, self.given, self.config)
        plan = make_plan(self.original, captured, self.config, notes)
        why = reason(ReasonCode.MODEL_NOT_COPYABLE, problem)
        for decision in plan.converting:
            plan = plan.refuse(decision.fqn, why)
        parity = Parity("not-verified", self.backend.name, notes=("nothing was converted",))
        report = replace(self._report(plan, parity), warnings=(f"{why.code}: {why.detail}; {why.hint}",))
        result = Result(self.original, report, plan)
        if self.config.strict:
            _demand_everything(result)
        return result

    def _apply(self, target: nn.Module, plan: Plan) -> tuple[Applied, Plan]:
        """The rewrite; a failure (undone by the transaction) refuses everything instead of raising."""
        try:
            progress = self.config.report_progress
            return apply_plan(target, plan, self.backend.name, lambda a, b: progress("rewrite", a, b)), plan
        except EnvironmentLacksError:
            raise
        except Exception as error:
            why = reason(ReasonCode.INTERNAL_ERROR, f"rewrite: {describe_error(error)}")
            for decision in plan.converting:
                plan = plan.refuse(decision.fqn, why)
            return Applied(target, self.backend.name), plan

    def _report(self, plan: Plan, parity: Parity) -> Report:
        return Report(
            model_class=plan.model_class,
            converted=bool(plan.converting),
            sites=build_sites(plan, parity),
            parity=parity,
            coverage=measure_coverage(plan),
            recipe=plan.recipe,
            backend=self.backend.name,
            backend_reason=self.backend.reason,
            scenarios=plan.scenarios,
            environment=describe_environment(),
            not_verified=_not_verified(plan, parity, self.config),
            notes=(*plan.notes, *parity.notes),
            warnings=_warnings(plan, parity),
            timings_s={stage: round(seconds, 4) for stage, seconds in self.timings.items()},
        )


def observe(
    model: nn.Module, given: tuple[Scenario, ...], config: ConvertConfig
) -> tuple[tuple[Scenario, ...], Capture, tuple[str, ...]]:
    """Scenarios (given or derived), their capture, and what could not be observed.

    Raises:
        InputError: the caller's inputs make the model fail in every scenario.
    """
    notes: list[str] = []
    scenarios = given
    if not given:
        derived = derive_scenario(model)
        scenarios = () if derived is None else (derived,)
        notes.append(
            f"no example inputs were given; used {derived.derived}"
            if derived is not None
            else "no example inputs were given and none could be derived: modules were judged by what they are, not by their use"
        )
    runs = [*scenarios, *(other_mode(s, training=not model.training) for s in scenarios[:1])]
    captured = capture(model, runs, LeafPolicy(), lambda a, b: config.report_progress("capture", a, b))
    if given and not captured.has_graph:
        raise InputError(
            f"the model fails on the example inputs: {captured.failures[0][1]}", "pass inputs that the model's forward takes"
        )
    return scenarios, captured, tuple(notes)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"convert takes an nn.Module, got {type(model).__name__}", "pass the model itself")
    if type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod"):
        raise InputError("the model is wrapped by torch.compile", "convert model._orig_mod, then compile the result")


def _not_verified(plan: Plan, parity: Parity, config: ConvertConfig) -> tuple[str, ...]:
    lines = []
    if not plan.converting:
        return ()
    if not config.verify:
        lines.append("parity: verify=False was asked for")
    if parity.status == "sites-only":
        lines.append("the whole model: each site was compared alone")
    if parity.backend == "reference":
        lines.append("Transformer Engine's kernels: the pure-PyTorch twins ran, which proves the mapping and the weights")
    if plan.recipe not in (None, "bf16"):
        lines.append(f"the recipe {plan.recipe}: everything ran in the model's own precision")
    lines.append("gradients, training steps, generate()")
    return tuple(lines)


def _warnings(plan: Plan, parity: Parity) -> tuple[str, ...]:
    lines = [f"{site.fqn or 'the root'} was put back: {site.why}" for site in parity.reverted]
    if parity.status == "failed":
        lines.append("parity failed")
    idle = [fqn or "the root" for fqn, count in parity.executed.items() if count == 0]
    if idle and parity.status == "passed":
        lines.append(f"{len(idle)} converted sites never ran in verification: {', '.join(idle[:5])}")
    if not plan.converting:
        lines.append("nothing was converted: 0 sites would run on Transformer Engine")
    return tuple(lines)


def _demand_everything(result: Result) -> None:
    parity, see = result.report.parity, "the report (error.report) says why"
    if parity.reverted:
        fqns = ", ".join(site.fqn or "the root" for site in parity.reverted[:5])
        raise ConversionError(f"{len(parity.reverted)} sites failed parity: {fqns}", see, result.report)
    if not result.plan.converting:
        raise ConversionError("nothing was converted", see, result.report)
    if not parity.passed:
        what = f"the conversion is not verified (parity: {parity.status})"
        raise ConversionError(what, "pass example_inputs, or drop strict", result.report)


_PLAN_ATTRIBUTE = "_te_convert_plan"


def _remember(model: nn.Module, plan: Plan) -> None:
    """Keep the plan on a converted root, for autocast() and save()."""
    if plan.converting:
        model.__dict__[_PLAN_ATTRIBUTE] = plan


def analyze(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    recipe: str | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    allow: str | Sequence[str] = (),
    progress: Progress | None = None,
) -> Plan:
    """What :func:`convert` would do, without doing it; needs torch alone and works on meta models.

    Raises:
        InputError: not a module, an unknown option, or example inputs on which the model itself fails.
    """
    config = ConvertConfig(
        recipe=recipe,
        include=patterns(include, "include"),
        exclude=patterns(exclude, "exclude"),
        allow=patterns(allow, "allow"),
        progress=progress,
    )
    _check_model(model)
    _, captured, notes = observe(model, normalize_inputs(example_inputs), config)
    return make_plan(model, captured, config, notes)


def verify(original: nn.Module, converted: nn.Module, inputs: Any) -> Parity:
    """Compare a converted model with its original: whole model in several shapes, and each converted site alone.

    Both models are left as they are.  Nothing is reverted.

    Raises:
        InputError: no inputs, or the original fails on them.
    """
    scenarios = normalize_inputs(inputs)
    if not scenarios:
        raise InputError("verify needs inputs", "pass the inputs to compare on")
    reference = record_reference(original, scenarios)
    if not reference.runs:
        raise InputError(f"the original fails on the inputs: {'; '.join(reference.notes)}", "pass inputs that it takes")
    sites = dict(converted_modules(converted))
    backend = next((get_record(site).backend for site in sites.values()), "reference")
    return verify_applied(Applied(converted, backend, sites), reference, revert=False)


def load(path: str | Path, device: Any = None, backend: str = "auto") -> nn.Module:
    """Load a directory written by :func:`save` or the command line.

    Args:
        path: the directory.
        device: where to put the model; None keeps it on the CPU.
        backend: "auto" takes TE when it can run on ``device``, "te" demands it, "reference" takes the twins.

    Raises:
        LoadError: damaged, tampered with, an unknown schema, or a source that changed.
        EnvironmentLacksError: ``backend="te"`` where TE cannot run.
    """
    return load_directory(Path(path), device, backend)


def save(result: Result, out: str | Path, *, source: ModelSource | None = None, force: bool = False) -> Path:
    """Write a result as a directory: manifest, plan, weights, report and the model's source.

    Args:
        result: what :func:`convert` returned.
        out: the directory; its parents are made.
        source: where the model comes from (``open_model(...).source``); found by itself for Transformers models.
        force: replace an existing directory.

    Raises:
        InputError: ``out`` exists, cannot be written, or the source is not known.
    """
    found = source or result.source or source_of(result.model)
    if found is None:
        raise InputError(
            "the model's source is not known, so the directory could not be loaded again",
            "pass source=te_convert.open_model('model.py').source",
        )
    return write_directory(result.model, result.plan, result.report, found, Path(out), force=force)


def open_model(spec: str, weights: str | Path | None = None) -> OpenedModel:
    """A model from ``file.py``, ``file.py:name``, ``pkg.mod:name`` or a Transformers directory.

    Raises:
        InputError: nothing usable there; the message says what was found.
    """
    opened = open_source(spec)
    if weights is not None:
        load_weights(opened.model, Path(weights))
    return opened


def doctor() -> list[Check]:
    """Facts about this machine with verdict, consequence and fix; never raises."""
    return run_checks()


def autocast(model: nn.Module) -> AbstractContextManager[Any]:
    """Transformer Engine's autocast with the recipe of the model's plan; does nothing on twins or in high precision.

    Raises:
        EnvironmentLacksError: the recipe cannot run on this GPU.
    """
    plan: Plan | None = model.__dict__.get(_PLAN_ATTRIBUTE)
    on_te = any(is_converted(m) and get_record(m).backend == "te" for m in model.modules())
    if plan is None or not on_te or plan.recipe in (None, "bf16"):
        return nullcontext()
    from te_convert.replacements.recipes import recipe_autocast

    return recipe_autocast(plan.recipe)
