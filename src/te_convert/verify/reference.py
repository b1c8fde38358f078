"""What the original model computes, recorded before the rewrite so that the original need not be kept."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from te_convert.capture.run import describe_error, other_mode
from te_convert.capture.scenario import Scenario
from te_convert.capture.tensors import iter_tensors
from te_convert.verify.compare import Outputs, compare_outputs
from te_convert.verify.generation import can_generate, generate_outputs
from te_convert.verify.gradients import gradient_outputs
from te_convert.verify.model import Figures
from te_convert.verify.moved import moved_outputs
from te_convert.verify.padding import padding_mask
from te_convert.verify.run import Setting, in_eval, run
from te_convert.verify.variants import other_values, padded_variants, shape_variants

SLOW_S = 5.0
"""Seconds of one run from which on a verification makes do with the inputs as given: three runs of each model.  In low precision,
where a run that is compared is made in float32 as well, that is with moved parameters alone."""
_LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Expected:
    """One run of the original and how it was made.

    Attributes:
        kind: "forward"; "gradients" (``outputs`` are sketches by parameter name); "generate" (tokens and logits); "moved" (a
            second call with ``second`` and other weights, and sketches of those).
    """

    scenario: Scenario
    setting: Setting
    outputs: Outputs
    exact: Outputs | None = None
    kind: str = "forward"
    second: Scenario | None = None


@dataclass
class Reference:
    """The original's results.

    Attributes:
        runs: what the converted model must reproduce.
        reproduces: figures of the original against itself; bit-equal for nearly all models.
        low: the low-precision dtype of the model, or None.
        hide_padding: padded positions of the outputs are left out of every comparison.
        frugal: one run takes so long that only the inputs as given are compared.
        notes: what could not be run or proves little.
    """

    runs: list[Expected] = field(default_factory=list)
    reproduces: Figures | None = None
    low: torch.dtype | None = None
    hide_padding: bool = False
    frugal: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def reproducible(self) -> bool:
        """True when two runs of the original agree bit for bit."""
        return self.reproduces is not None and self.reproduces.bit_equal


def low_precision_dtype(model: nn.Module) -> torch.dtype | None:
    """bf16 or fp16 when any parameter has it, else None."""
    return next((parameter.dtype for parameter in model.parameters() if parameter.dtype in _LOW), None)


def record_reference(
    model: nn.Module, scenarios: Sequence[Scenario], hide_padding: bool = False, as_given: bool = False
) -> Reference:
    """Run the original in every scenario, perturbed and not, at other shapes, and twice to see whether it reproduces itself.

    Never raises for a scenario that does not run; the notes then say so.

    Args:
        model: the original.
        scenarios: how to call it.
        hide_padding: padded positions of the outputs are not compared.
        as_given: a run with the parameters as they are is needed, also of a slow model in low precision.
    """
    reference = Reference(low=low_precision_dtype(model), hide_padding=hide_padding)
    for scenario in map(in_eval, scenarios):
        first = not reference.runs
        checked = _record_inputs(model, scenario, reference, as_given)
        if checked is None:
            continue
        if first:
            _check_original(model, checked, reference)
        if reference.frugal:
            continue
        for variant in (*shape_variants(scenario), *(padded_variants(model, scenario) if first else ())):
            _add(model, variant, reference)
        if first and reference.reproducible:
            _add_train(model, other_mode(scenario, training=True), reference)
            _add_gradients(model, scenario, reference)
            _add_moved(model, scenario, reference)
            _add_generation(model, scenario, reference)
    if reference.frugal:
        reference.notes.append(
            f"one run takes more than {SLOW_S:g} s: other values and shapes, padding, train mode, gradients, other weights "
            "and generate() were left out"
        )
    return reference


def _record_inputs(model: nn.Module, scenario: Scenario, reference: Reference, as_given: bool) -> Expected | None:
    """The inputs as given, with the parameters as they are and moved; the first of these runs, None when there is none.

    In low precision the moved parameters come first.  Each run is made in float32 as well there, and for a slow model these two are
    enough: whatever the parameters as they are show, moved ones show too.
    """
    plain, low = Setting(hide_padding=reference.hide_padding), reference.low is not None
    start = time.perf_counter()
    moved = _try(model, scenario, replace(plain, perturb=True), reference, quiet=True) if low else None
    if moved is not None and not _finite(moved.outputs):
        moved = None
    given = _try_finite(model, scenario, plain, reference) if moved is None else None
    if moved is None and given is None:
        return None
    reference.frugal = reference.frugal or time.perf_counter() - start > SLOW_S
    if moved is not None and (as_given or not reference.frugal):
        given = _try_finite(model, scenario, plain, reference)
    first = given or moved
    assert first is not None  # one of the two was made
    reference.runs += [found for found in (given, moved) if found is not None]
    if reference.hide_padding and padding_mask(model, scenario) is not None:
        reference.notes.append(f"{scenario.name}: padded positions of the outputs were not compared")
    if moved is None:
        _add(model, scenario, reference, plain=first)
    return first


def _try_finite(model: nn.Module, scenario: Scenario, setting: Setting, reference: Reference) -> Expected | None:
    """A run that can prove something."""
    found = _try(model, scenario, setting, reference)
    if found is None or _finite(found.outputs):
        return found
    reference.notes.append(f"{scenario.name}: the original's output has no finite value, so parity there proves nothing")
    return None


def _add_gradients(model: nn.Module, scenario: Scenario, reference: Reference) -> None:
    """Gradients of a seeded loss, computed in float32 also for a model in lower precision."""
    wide = torch.float32 if reference.low is not None else None
    setting = Setting(True, wide, reference.hide_padding)
    named = replace(scenario, name=f"{scenario.name}[gradients]")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        reference.notes.append("no parameter requires a gradient: gradients were not compared")
        return
    try:
        outputs = gradient_outputs(model, named, setting)
    except Exception as error:
        reference.notes.append(f"gradients were not compared: {describe_error(error)}")
        return
    if not outputs:  # an operation without a backward: quantised products have none, and no error says so
        reference.notes.append("gradients were not compared: none reaches a parameter or an input of the original")
        return
    if all(bool(torch.isfinite(sums).all()) for _, sums in outputs):
        reference.runs.append(Expected(named, setting, outputs, kind="gradients"))
    else:
        reference.notes.append("gradients were not compared: the original's are not finite")


def _add_moved(model: nn.Module, scenario: Scenario, reference: Reference) -> None:
    """A second call with other weights, on other values where the model takes them."""
    setting = Setting(True, torch.float32 if reference.low is not None else None, reference.hide_padding)
    named = replace(scenario, name=f"{scenario.name}[other weights]")
    problem = "not finite"
    for second in (other_values(scenario, 1), scenario):
        try:
            outputs = moved_outputs(model, named, second, setting)
        except Exception as error:
            problem = describe_error(error)
            continue
        if all(bool(torch.isfinite(t).all()) for _, t in outputs if t.is_floating_point()):
            reference.runs.append(Expected(named, setting, outputs, kind="moved", second=second))
            return
    reference.notes.append(f"other weights were not compared: {problem}")


def _add_generation(model: nn.Module, scenario: Scenario, reference: Reference) -> None:
    """A few greedy tokens of a Transformers model that can decode."""
    if not can_generate(model, scenario):
        return
    setting = Setting(True, torch.float32 if reference.low is not None else None)
    named = replace(scenario, name=f"{scenario.name}[generate]")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = generate_outputs(model, named, setting)
    except Exception as error:
        reference.notes.append(f"generate() was not compared: {describe_error(error)}")
        return
    reference.runs.append(Expected(named, setting, outputs, kind="generate"))


def _add(model: nn.Module, scenario: Scenario, reference: Reference, plain: Expected | None = None) -> None:
    """One perturbed run; without the perturbation (``plain``, if it was made already) when that makes the original non-finite."""
    found = _try(model, scenario, Setting(True, hide_padding=reference.hide_padding), reference, quiet=plain is None)
    if found is not None and not _finite(found.outputs):
        reference.notes.append(f"{scenario.name}: not finite with perturbed parameters, compared without perturbation")
        found = (
            None
            if plain is not None
            else _try(model, scenario, Setting(hide_padding=reference.hide_padding), reference, quiet=True)
        )
    if found is not None and _finite(found.outputs):
        reference.runs.append(found)


def _add_train(model: nn.Module, scenario: Scenario, reference: Reference) -> None:
    """Train mode under the same seed, where the original reproduces itself there (dropout draws the same numbers)."""
    found = _try(model, scenario, Setting(True, hide_padding=reference.hide_padding), reference, quiet=True)
    again = (
        _try(model, scenario, Setting(True, hide_padding=reference.hide_padding), reference, quiet=True)
        if found is not None
        else None
    )
    if (
        found is not None
        and again is not None
        and compare_outputs(found.outputs, again.outputs)[1].bit_equal
        and _finite(found.outputs)
    ):
        reference.runs.append(found)


def _try(model: nn.Module, scenario: Scenario, setting: Setting, reference: Reference, quiet: bool = False) -> Expected | None:
    try:
        outputs = run(model, scenario, setting)
    except Exception as error:
        if not quiet:
            reference.notes.append(f"{scenario.name}: the original did not run: {describe_error(error)}")
        return None
    if not outputs:
        reference.notes.append(f"{scenario.name}: the model returned no tensor")
        return None
    exact = None
    if reference.low is not None:
        try:
            exact = run(model, scenario, replace(setting, widen=torch.float32))
        except Exception as error:
            reference.notes.append(f"{scenario.name}: no float32 result of the original: {describe_error(error)}")
    return Expected(scenario, setting, outputs, exact)


def _finite(outputs: Outputs) -> bool:
    """Whether there is a number to compare: a result that is empty, or NaN everywhere, is that of many models."""
    return any(bool(torch.isfinite(t).any()) for _, t in outputs if t.is_floating_point()) or not any(
        t.is_floating_point() for _, t in outputs
    )


def _check_original(model: nn.Module, first: Expected, reference: Reference) -> None:
    """Does the original reproduce itself, and does its output depend on its input (not asked of a slow model)?"""
    try:
        again = run(model, first.scenario, first.setting)
    except Exception as error:
        reference.notes.append(f"the original ran once and then raised {describe_error(error)}: each site was compared alone")
        return
    reference.reproduces = compare_outputs(first.outputs, again)[1]
    if not reference.reproduces.bit_equal:
        reference.notes.append(
            f"the original does not reproduce itself under a fixed seed (two runs: SQNR {reference.reproduces.sqnr_db:.0f} dB): "
            "whole-model parity cannot be judged, each site was compared alone"
        )
    changed = other_values(first.scenario)
    if reference.frugal or _same_values(first.scenario, changed):
        return
    try:
        other = run(model, changed, first.setting)
    except Exception:  # values that the model does not take say nothing
        return
    if compare_outputs(first.outputs, other)[1].bit_equal:
        reference.notes.append("the output does not depend on the input values, so whole-model parity proves little")


def _same_values(a: Scenario, b: Scenario) -> bool:
    pairs = zip(iter_tensors((a.args, a.kwargs)), iter_tensors((b.args, b.kwargs)), strict=True)
    return all(torch.equal(x, y) for (_, x), (_, y) in pairs)
