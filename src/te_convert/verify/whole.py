"""The whole converted model against the original's recorded runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from te_convert.capture.run import describe_error
from te_convert.verify.accuracy import judge_accuracy
from te_convert.verify.compare import MISMATCH, Outputs, compare_outputs, error_ratio, row_ratios, worst_of
from te_convert.verify.generation import compare_generated, generate_outputs
from te_convert.verify.gradients import compare_gradients, gradient_outputs
from te_convert.verify.isolate import approximation_of, as_original
from te_convert.verify.model import Figures, ScenarioParity
from te_convert.verify.moved import moved_outputs, own_of
from te_convert.verify.perturb import own_parameters
from te_convert.verify.reference import Expected
from te_convert.verify.run import Setting, run
from te_convert.verify.state import State
from te_convert.verify.tolerance import is_rounding, judge_approximate, judge_float32, judge_float64, judge_gradient

ALL_RUNS = "all runs together"
"""The name of the verdict on the accuracy of a low-precision model."""
POOLED = "judged over all runs together"
"""The bound of a low-precision run: one draw of rounding noise, which is judged with all the others."""
_SAME = "same structure, shapes, dtypes and non-finite places"
Progress = Callable[[int, int], None]


def compare_all(state: State, progress: Progress | None) -> list[ScenarioParity]:
    """Every recorded run again; nothing where the original does not reproduce itself."""
    if not state.reference.reproducible:
        return []
    results = []
    state.row_ratios.clear()
    for index, expected in enumerate(state.reference.runs):
        results += compare_one(state, expected)
        if progress is not None:
            progress(index + 1, len(state.reference.runs))
    return [*results, *_judge_accuracy(state, results)]


def compare_accuracy(state: State, root: nn.Module) -> list[ScenarioParity]:
    """Low precision: the error ratio over all runs together of a model in which some sites may be as they were."""
    kept, state.row_ratios = state.row_ratios, []
    results: list[ScenarioParity] = []
    try:
        for expected in state.reference.runs:
            if expected.exact is not None and state.reference.low is not None:
                outputs = run(root, expected.scenario, expected.setting)
                results.append(_judge_low(state, expected, outputs, state.reference.low))
        return [*results, *_judge_accuracy(state, results, root)]
    except Exception as error:
        state.notes.append(f"{ALL_RUNS}: the model with some sites put back raised {describe_error(error)}")
        return [ScenarioParity(ALL_RUNS, "", True, MISMATCH, None, "must run", passed=False)]
    finally:
        state.row_ratios = kept


def _judge_accuracy(state: State, results: list[ScenarioParity], root: nn.Module | None = None) -> list[ScenarioParity]:
    """Low precision: the error ratio over all runs together."""
    low = [result for result in results if result.error_ratio is not None]
    if not low:
        return []
    _, figures = worst_of((r.name, r.figures) for r in low)
    accuracy = judge_accuracy(state.applied, state.reference, state.row_ratios, figures.numel, root)
    if accuracy is None:
        return []
    bound = f"median over {accuracy.draws} draws: {accuracy.verdict.bound}"
    return [ScenarioParity(ALL_RUNS, low[0].dtype, True, figures, accuracy.ratio, bound, accuracy.verdict.passed)]


def compare_one(state: State, expected: Expected, root: nn.Module | None = None, off: Sequence[str] = ()) -> list[ScenarioParity]:
    """float32: one comparison.  Low precision: the mapping in float32 (twins only), and the error ratio.

    ``root`` is the model to run while the sites ``off`` are as they were; by default the rewritten one.
    """
    model, low = root if root is not None else state.applied.model, state.reference.low
    try:
        if expected.kind != "forward" and expected.setting.widen is not None and state.applied.backend != "reference":
            state.notes.append(f"{expected.scenario.name}: not compared, TE's modules cannot run in float32 with {low} weights")
            return []
        if expected.kind == "gradients":
            return [_judge_gradients(state, model, expected, off)]
        if expected.kind == "generate":
            return [_judge_generated(state, model, expected)]
        outputs = _run(state, model, expected, expected.setting)
        if low is None or expected.kind == "moved":
            return [_judge_exact(state, model, expected, outputs, "float32")]
        results = []
        if expected.exact is not None:
            results.append(_judge_low(state, expected, outputs, low))
            if state.applied.backend == "reference":
                wide = run(model, expected.scenario, replace(expected.setting, widen=torch.float32))
                exact = Expected(expected.scenario, replace(expected.setting, widen=torch.float32), expected.exact)
                results.append(_judge_exact(state, model, exact, wide, "float32"))
        return results or [_judge_exact(state, model, expected, outputs, str(low).removeprefix("torch."))]
    except Exception as error:
        state.notes.append(f"{expected.scenario.name}: the converted model raised {describe_error(error)}")
        return [ScenarioParity(expected.scenario.name, "", expected.setting.perturb, MISMATCH, None, "must run", passed=False)]


def _run(state: State, model: nn.Module, expected: Expected, setting: Setting) -> Outputs:
    """A run again, of the converted model or of one in which original modules are put back."""
    if expected.second is None:
        return run(model, expected.scenario, setting)
    return moved_outputs(model, expected.scenario, expected.second, setting, own_of(state.applied))


def _judge_gradients(state: State, model: nn.Module, expected: Expected, off: Sequence[str]) -> ScenarioParity:
    """Gradients; a missed bound is rounding when both sides agree in float64."""
    extra = own_parameters(state.applied, off)
    path, figures = compare_gradients(expected.outputs, gradient_outputs(model, expected.scenario, expected.setting, extra))
    low = state.reference.low is not None
    approximation = next(filter(None, map(approximation_of, state.applied.sites.values())), "")
    verdict = judge_approximate(figures, approximation) if approximation else judge_gradient(figures, low)
    if not (verdict.passed or approximation or off) and state.applied.backend == "reference":
        wide = _gradients_in_float64(state, model, expected)
        if wide is not None and judge_gradient(wide, low=False).passed and wide.max_rel < figures.max_rel / 100:
            state.notes.append(f"{expected.scenario.name}: {figures.max_rel:.1e} is rounding; float64 gives {wide.max_rel:.1e}")
            verdict, figures = judge_gradient(wide, low=False), wide
    return ScenarioParity(expected.scenario.name, "float32", True, figures, None, verdict.bound, verdict.passed, path)


def _gradients_in_float64(state: State, model: nn.Module, expected: Expected) -> Figures | None:
    """Both sides in float64; None when the original modules put back do not give the recorded gradients (see above)."""
    setting, names = replace(expected.setting, widen=torch.float64), list(state.applied.sites)
    own = own_parameters(state.applied, names)
    with as_original(state.applied, names) as restored:
        again = gradient_outputs(restored, expected.scenario, expected.setting, own)
        if not judge_gradient(compare_gradients(expected.outputs, again)[1], state.reference.low is not None).passed:
            return None
        exact = gradient_outputs(restored, expected.scenario, setting, own)
    return compare_gradients(exact, gradient_outputs(model, expected.scenario, setting))[1]


def _judge_generated(state: State, model: nn.Module, expected: Expected) -> ScenarioParity:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = generate_outputs(model, expected.scenario, expected.setting)
    path, figures = compare_generated(expected.outputs, outputs)
    approximation = next(filter(None, map(approximation_of, state.applied.sites.values())), "")
    verdict = judge_approximate(figures, approximation) if approximation else judge_float32(figures)
    return ScenarioParity(expected.scenario.name, "float32", True, figures, None, verdict.bound, verdict.passed, path)


def _judge_exact(state: State, model: nn.Module, expected: Expected, outputs: Outputs, dtype: str) -> ScenarioParity:
    path, figures = compare_outputs(expected.outputs, outputs)
    approximation = next(filter(None, map(approximation_of, state.applied.sites.values())), "")
    verdict = judge_approximate(figures, approximation) if approximation else judge_float32(figures)
    found = ScenarioParity(
        expected.scenario.name, dtype, expected.setting.perturb, figures, None, verdict.bound, verdict.passed, path
    )
    if verdict.passed or approximation or state.applied.backend != "reference" or figures is MISMATCH:
        return found
    return _recheck_in_float64(state, model, expected, outputs, found)


def _recheck_in_float64(
    state: State, model: nn.Module, expected: Expected, outputs: Outputs, missed: ScenarioParity
) -> ScenarioParity:
    """A missed float32 bound is rounding exactly when the difference vanishes in float64; otherwise it stands.

    The original modules put back must first give the recorded result: with other weights than the original's (a converted model
    that someone changed) float64 would compare the converted model with itself.
    """
    setting = replace(expected.setting, widen=torch.float64)
    try:
        with as_original(state.applied, list(state.applied.sites)) as restored:
            again = _run(state, restored, expected, expected.setting)
            if not judge_float32(compare_outputs(expected.outputs, again)[1]).passed:
                return missed
            original = _run(state, restored, expected, setting)
        path, figures = compare_outputs(original, _run(state, model, expected, setting))
        ratio, _ = error_ratio(original, expected.outputs, outputs, torch.float32)
    except Exception as error:
        state.notes.append(f"{missed.name}: no float64 run to tell rounding from error: {describe_error(error)}")
        return missed
    verdict = judge_float64(figures)
    if not is_rounding(figures, ratio):
        return missed
    state.notes.append(
        f"{missed.name}: float32 SQNR {missed.figures.sqnr_db:.1f} dB (max rel {missed.figures.max_rel:.1e}) is rounding; "
        f"in float64 the two agree to {figures.sqnr_db:.0f} dB"
    )
    return ScenarioParity(missed.name, "float64", missed.perturbed, figures, None, verdict.bound, passed=True, output=path)


def _judge_low(state: State, expected: Expected, outputs: Outputs, low: torch.dtype) -> ScenarioParity:
    assert expected.exact is not None
    dtype = str(low).removeprefix("torch.")
    path, figures = compare_outputs(expected.outputs, outputs)
    if figures.sqnr_db == -math.inf:
        return ScenarioParity(
            expected.scenario.name, dtype, expected.setting.perturb, figures, None, _SAME, passed=False, output=path
        )
    ratio, _ = error_ratio(expected.exact, expected.outputs, outputs, low)
    state.row_ratios += row_ratios(expected.exact, expected.outputs, outputs, low)
    return ScenarioParity(expected.scenario.name, dtype, expected.setting.perturb, figures, ratio, POOLED, passed=True, output=path)


def measured(failed: ScenarioParity) -> str:
    """The figure that the bound was put to."""
    if failed.error_ratio is not None:
        return f"error ratio {failed.error_ratio:.3g}"
    return f"SQNR {failed.figures.sqnr_db:.1f} dB, max rel {failed.figures.max_rel:.1e}"
