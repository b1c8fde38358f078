"""One conversion from capture to report: the stages of convert() and analyze() in their order."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from te_convert.capture.arguments import require_module
from te_convert.capture.fake import is_meta
from te_convert.capture.graph import Capture
from te_convert.capture.inputs import derive_scenario
from te_convert.capture.preserve import untouched
from te_convert.capture.run import capture, describe_error, other_mode, runs
from te_convert.capture.scenario import Scenario
from te_convert.capture.tensors import model_device
from te_convert.config import ConvertConfig
from te_convert.errors import ConversionError, EnvironmentLacksError, InputError
from te_convert.estimate.gate import Weighed, benefit_gpu, weigh
from te_convert.facts.sharing import find_shared
from te_convert.facts.wrappers import find_wrapper
from te_convert.match.leaves import LeafPolicy
from te_convert.match.parallel_regions import Originals
from te_convert.parallelize import parallelize, ranks_for
from te_convert.plan.choose import make_plan
from te_convert.plan.model import PLAN_ATTRIBUTE, SITE_ATTRIBUTE, Plan
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.reference.emulation import EMULATED
from te_convert.replacements.build import why_not_built
from te_convert.replacements.specs import MultiheadAttentionSpec, Spec, TransformerLayerSpec
from te_convert.report.build import report_of
from te_convert.report.model import Report
from te_convert.rewrite.apply import Applied, apply_plan
from te_convert.rewrite.materialize import switch_backend
from te_convert.rewrite.precision import tell_precision
from te_convert.rewrite.site import is_converted
from te_convert.runtime.backend import Backend, choose_backend, multiplies_in_tf32
from te_convert.runtime.mesh import Ranks
from te_convert.verify.gate import verify_applied
from te_convert.verify.model import Parity
from te_convert.verify.recipe_figures import RecipeFigures
from te_convert.verify.recipes import measure_recipe, propose_precision
from te_convert.verify.reference import Reference, record_reference
from te_convert.verify.tolerance import products_in_tf32
from te_convert.verify.variants import padded_variants

Converted = tuple[nn.Module, Report, Plan]
"""The converted model (or the model unchanged), the report, and the decisions that the model carries."""

Observed = tuple[Originals, Capture, tuple[Scenario, ...]]
"""The original, its recorded runs, and the scenarios."""

_TF32 = (
    "the twins held float32's bounds in {} runs; Transformer Engine's kernels multiply float32 in TF32 and have bounds of their own"
)


class Conversion:
    """One call of convert(): capture, plan, reference, rewrite, verify, report."""

    def __init__(self, model: nn.Module, config: ConvertConfig, given: tuple[Scenario, ...]) -> None:
        self.original, self.config, self.given = model, config, given
        self.ranks: Ranks | None = None
        self.backend: Backend = choose_backend(config.backend, model_device(model).type)
        self.timings: dict[str, float] = {}
        self.gpu = benefit_gpu(config)
        self.weighed: Weighed | None = None

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timings[stage] = self.timings.get(stage, 0.0) + time.perf_counter() - start

    def run(self) -> Converted:
        """Never leaves the caller's model changed unless ``inplace`` and the result is returned.

        A copy may still run code that is bound to the original (an instance's own ``forward``), which is guarded as well.
        """
        with nullcontext() if self.config.inplace else untouched(self.original):
            return self._run()

    def _run(self) -> Converted:
        self.ranks = ranks_for(self.original, self.config.tp_mesh, self.given)
        with self._timed("copy"):
            target, problem = self._copy()
        if target is None:
            return self._unchanged(problem)
        with self._timed("capture"):
            try:
                scenarios, captured, notes = observe(target, self.given, self.config)
            except InputError as error:
                if self.config.inplace or not any(runs(self.original, scenario) is None for scenario in self.given):
                    raise
                return self._unchanged(f"a copy fails where the model itself runs: {error}")
            if not self.config.inplace and self._runs_elsewhere(target, captured):
                return self._unchanged("a copy runs the modules of the original: a forward is bound to them")
        with self._timed("plan"):
            plan = self._fit(make_plan(target, captured, self.config, notes, lacks=self._lacks))
            self.weighed = weigh(plan, target, captured, self.gpu, self.config)
            plan = self.weighed.plan
        original = Originals.of(target)
        reference = Reference()
        with self._timed("reference"):
            if self.config.verify and plan.converting:
                padded = any(fusion.skips_padding for fusion in plan.fusions)
                as_given = self.config.recipe is not None  # its figures are those of the parameters as they are
                reference = record_reference(target, scenarios, padded, as_given)
        with self._timed("rewrite"):
            applied, plan = self._apply(target, plan, self._build_on(target, reference))
        try:
            model, report, plan = self._finish(applied, plan, reference, (original, captured, scenarios))
        except BaseException:  # also an interrupt, a failing progress callback or strict: nothing half-made is left behind
            applied.undo_all()
            raise
        if plan.converting:
            model.__dict__[PLAN_ATTRIBUTE] = plan
        return model, report, plan

    def _lacks(self, spec: Spec) -> Reason | None:
        """Why several modules do not become this one here: the installed TE cannot build it, or it cannot be divided."""
        if self.ranks is not None and isinstance(spec, MultiheadAttentionSpec | TransformerLayerSpec):
            return reason(ReasonCode.TP_PARTS, f"{spec.name} is not divided as a whole")
        why = why_not_built(spec, self.backend.name)
        return reason(ReasonCode.FUSION_TE_TOO_OLD, why) if why else None

    def _fit(self, plan: Plan) -> Plan:
        """Without what the installed Transformer Engine cannot build."""
        wanted = [(site.fqn, site.spec) for site in plan.swaps if site.spec is not None]
        wanted += [(fusion.fqn, fusion.spec) for fusion in plan.fusions]
        for fqn, spec in wanted:
            why = why_not_built(spec, self.backend.name)
            plan = plan.refuse(fqn, reason(ReasonCode.RUNTIME_TE_TOO_OLD, why)) if why else plan
        return plan

    def _finish(self, applied: Applied, plan: Plan, reference: Reference, observed: Observed) -> Converted:
        """Verify the rewrite, put failing sites back, and report."""
        parity = Parity("not-verified", self.backend.name, notes=() if plan.converting else ("nothing was converted",))
        with self._timed("verify"):
            if self.config.verify and plan.converting:
                parity = self._verify(applied, reference)
        for site in parity.reverted:
            plan = plan.refuse(site.fqn, reason(ReasonCode.PARITY_FAILED, site.why))
        plan, figures = self._emulate(applied, plan, parity, reference)
        model = applied.model
        if self.ranks is not None and plan.converting:
            plan, parity = self._parallelize(model, plan, parity, observed)
        if not plan.converting and not self.config.inplace:
            model = self.original
        report = self._report(plan, parity, figures)
        if self.config.strict:
            _demand_everything(report)
        return model, report, plan

    def _parallelize(self, model: nn.Module, plan: Plan, parity: Parity, observed: Observed) -> tuple[Plan, Parity]:
        """The last stage: each rank keeps its part."""
        assert self.ranks is not None
        original, captured, scenarios = observed
        config = self.config
        rounds = multiplies_in_tf32(self.backend.name, model_device(model).type)
        with self._timed("parallelize"), products_in_tf32() if rounds else nullcontext():
            return parallelize(model, original, captured, plan, parity, self.ranks, scenarios, config.verify, config.strict)

    def _verify(self, applied: Applied, reference: Reference) -> Parity:
        """The gate; where TE's products are TF32, first for the twins with float32's own bounds, then for TE's kernels."""

        def progress(done: int, total: int) -> None:
            self.config.report_progress("verify", done, total)

        with products_in_tf32() if self._rounds(applied.model, reference) and applied.backend == "te" else nullcontext():
            parity = verify_applied(applied, reference, progress=progress, bisect=self.config.bisect)
        if applied.backend == self.backend.name or parity.status == "failed" or not applied.sites:
            return parity
        switch_backend(applied.model, self.backend.name)
        applied.backend = self.backend.name
        with products_in_tf32():
            kernels = verify_applied(applied, reference, progress=progress, bisect=self.config.bisect)
        notes = (*parity.notes, _TF32.format(sum(s.passed for s in parity.scenarios)), *kernels.notes)
        return replace(kernels, reverted=(*parity.reverted, *kernels.reverted), notes=notes)

    def _rounds(self, model: nn.Module, reference: Reference) -> bool:
        """Whether this is a float32 model whose products TE computes in TF32."""
        return multiplies_in_tf32(self.backend.name, model_device(model).type) and bool(reference.runs) and reference.low is None

    def _build_on(self, target: nn.Module, reference: Reference) -> str:
        """The backend to begin with: twins if their bounds are to be held first, unless the model has TE modules already."""
        begun = any(is_converted(module) and module.__dict__[SITE_ATTRIBUTE].backend == "te" for module in target.modules())
        return "reference" if self._rounds(target, reference) and not begun else self.backend.name

    def _emulate(self, applied: Applied, plan: Plan, parity: Parity, reference: Reference) -> tuple[Plan, RecipeFigures | None]:
        """The recipe in the twins; sites that it would cost too much stay in high precision."""
        if plan.recipe not in EMULATED or not parity.sites or parity.status == "failed":
            return plan, None
        with self._timed("recipe"):
            progress = self.config.report_progress
            try:
                found = measure_recipe(applied, reference, plan, self.config.min_sqnr, lambda a, b: progress("recipe", a, b))
            except Exception as error:
                note = f"the recipe {plan.recipe} could not be emulated: {describe_error(error)}"
                return replace(plan, notes=(*plan.notes, note)), None
        if found is not None and found.high:
            plan = propose_precision(plan, found)
            tell_precision(applied, plan)
        return plan, found

    def _copy(self) -> tuple[nn.Module | None, str]:
        if self.config.inplace:
            return self.original, ""
        try:
            copied: nn.Module = copy.deepcopy(self.original)
        except Exception as error:
            return None, describe_error(error)
        shared = find_shared(self.original, copied)
        return (copied, "") if shared is None else (None, f"its copy is not one of its own: it shares {shared}")

    def _runs_elsewhere(self, copied: nn.Module, captured: Capture) -> bool:
        """Whether no module inside the copy is ever called, while the original's are."""
        if not captured.has_graph or any(captured.call_counts()) or not any(True for _ in copied.children()):
            return False
        _, own, _ = observe(self.original, self.given, self.config)
        return any(own.call_counts())

    def _unchanged(self, problem: str) -> Converted:
        """The model could not be copied: say what would have been converted, and why it was not."""
        _, captured, notes = observe(self.original, self.given, self.config)
        plan = make_plan(self.original, captured, self.config, notes)
        why = reason(ReasonCode.MODEL_NOT_COPYABLE, problem)
        plan = plan.refuse_all(why)
        parity = Parity("not-verified", self.backend.name, notes=("nothing was converted",))
        report = replace(self._report(plan, parity), warnings=(f"{why.code}: {why.detail}; {why.hint}",))
        if self.config.strict:
            _demand_everything(report)
        return self.original, report, plan

    def _apply(self, target: nn.Module, plan: Plan, backend: str) -> tuple[Applied, Plan]:
        """The rewrite; a failure (undone by the transaction) refuses everything instead of raising."""
        try:
            progress = self.config.report_progress
            return apply_plan(target, plan, backend, lambda a, b: progress("rewrite", a, b)), plan
        except EnvironmentLacksError:
            raise
        except Exception as error:
            why = reason(ReasonCode.INTERNAL_ERROR, f"rewrite: {describe_error(error)}")
            plan = plan.refuse_all(why)
            return Applied(target, backend), plan

    def _report(self, plan: Plan, parity: Parity, figures: RecipeFigures | None = None) -> Report:
        report = report_of(plan, parity, self.config, self.backend, self.timings, figures)
        if self.weighed is None or not plan.converting:
            return report
        warnings = (*report.warnings, *filter(None, [self.weighed.warning]))
        return replace(report, warnings=warnings, estimate=self.weighed.figures)


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
    runs += [padded for s in scenarios[:1] for padded in padded_variants(model, s)[:1]]
    captured = capture(model, runs, LeafPolicy(), lambda a, b: config.report_progress("capture", a, b))
    if given and not captured.has_graph and not is_meta(model):
        raise InputError(
            f"the model fails on the example inputs: {captured.failures[0][1]}", "pass inputs that the model's forward takes"
        )
    return scenarios, captured, tuple(notes)


def check_model(model: Any, function: str = "convert") -> None:
    """Only plain modules are converted.

    Raises:
        InputError: not a module, wrapped for training or by torch.compile, or sharded.
    """
    require_module(model, function)
    wrapped = find_wrapper(model)
    if wrapped is not None:
        raise InputError(*wrapped)


def _demand_everything(report: Report) -> None:
    parity, see = report.parity, "the report (error.report) says why"
    if parity.reverted:
        fqns = ", ".join(site.fqn or "the root" for site in parity.reverted[:5])
        raise ConversionError(f"{len(parity.reverted)} sites failed parity: {fqns}", see, report)
    if not report.converted:
        raise ConversionError("nothing was converted", see, report)
    if not parity.passed:
        what = f"the conversion is not verified (parity: {parity.status})"
        raise ConversionError(what, "pass example_inputs, or drop strict", report)
