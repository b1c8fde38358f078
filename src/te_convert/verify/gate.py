"""The gate: compare, put failing sites back, compare again.  A bound is never loosened to pass."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from te_convert.capture.run import describe_error
from te_convert.capture.tensors import model_device
from te_convert.rewrite.apply import Applied
from te_convert.rewrite.fused import fused_record
from te_convert.verify.accuracy import judge_accuracy
from te_convert.verify.compare import MISMATCH, Outputs, compare_outputs, error_ratio, row_ratios, worst_of
from te_convert.verify.generation import compare_generated, generate_outputs
from te_convert.verify.gradients import compare_gradients, gradient_outputs
from te_convert.verify.isolate import SiteRecorder, approximation_of, as_original, observed, random_site_parity, takes_one_tensor
from te_convert.verify.model import Figures, Parity, RevertedSite, ScenarioParity, SiteParity
from te_convert.verify.moved import moved_outputs, own_of
from te_convert.verify.perturb import own_parameters, parameter_problems
from te_convert.verify.reference import Expected, Reference
from te_convert.verify.run import Setting, prepared, run
from te_convert.verify.tolerance import is_rounding, judge_approximate, judge_float32, judge_float64, judge_gradient

_MAX_SEARCHES = 16
_ALL_RUNS = "all runs together"
POOLED = "judged over all runs together"
"""The bound of a low-precision run: one draw of rounding noise, which is judged with all the others."""
_SAME = "same structure, shapes, dtypes and non-finite places"
Progress = Callable[[int, int], None]
OriginalRun = Callable[[Expected, torch.dtype], "Expected | None"]


@dataclass
class _State:
    applied: Applied
    reference: Reference
    recorder: SiteRecorder
    sites: dict[str, SiteParity] = field(default_factory=dict)
    reverted: list[RevertedSite] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    row_ratios: list[float] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)


def verify_applied(applied: Applied, reference: Reference, revert: bool = True, progress: Progress | None = None) -> Parity:
    """Compare a rewritten model with the original's recorded results.

    Args:
        applied: the rewrite; with ``revert`` its failing sites are undone.
        reference: what the original computed.
        revert: put failing sites back and try again; False only reports.
        progress: called with (done, total) runs.

    Returns:
        The verdict on what is left in ``applied.model``.
    """
    state = _State(applied, reference, SiteRecorder(applied.taken), notes=list(reference.notes))
    _isolate(state)
    _check_parameters(state)
    if revert:
        _revert_failing_sites(state)
    scenarios = _compare_all(state, progress)
    for _ in range(_MAX_SEARCHES):
        if not revert or not applied.sites or all(s.passed for s in scenarios):
            break
        _revert_culprit(state, scenarios)
        scenarios = _compare_all(state, None)
    if revert and not all(s.passed for s in scenarios) and applied.sites:
        _revert_everything(state, scenarios)
        scenarios = _compare_all(state, None)
    return _parity(state, scenarios)


def _parity(state: _State, scenarios: list[ScenarioParity]) -> Parity:
    sites = tuple(site for fqn, site in state.sites.items() if fqn in state.applied.sites)
    ok = all(s.passed for s in scenarios) and all(site.passed for site in sites) and (sites or not state.reverted)
    status = "failed" if not ok else "passed" if scenarios else "sites-only" if sites else "not-verified"
    return Parity(
        status=status,
        backend=state.applied.backend,
        device=model_device(state.applied.model).type,
        scenarios=tuple(scenarios),
        sites=sites,
        reverted=tuple(state.reverted),
        executed={fqn: state.recorder.calls.get(fqn, 0) for fqn in state.applied.sites},
        fallbacks={fqn: count for fqn, count in state.fallbacks.items() if fqn in state.applied.sites},
        notes=tuple(dict.fromkeys(state.notes)),
    )


# ---- each site alone -------------------------------------------------------------------------------------------------
def _isolate(state: _State) -> None:
    """Compare every site on the inputs of the perturbed runs; sites that no run reached get random input."""
    sites, recorder = state.applied.sites, state.recorder
    if not sites:
        return
    fusions = {fqn: fused for fqn, site in sites.items() if (fused := fused_record(site)) is not None}
    before = {fqn: fused.fallbacks for fqn, fused in fusions.items()}
    forward = [r for r in state.reference.runs if r.kind == "forward"]
    runs = [r for r in forward if r.setting.perturb] or forward
    for expected in runs[:2]:
        with prepared(state.applied.model, expected.scenario, expected.setting) as ready, observed(sites, recorder):
            try:
                ready.call(state.applied.model)
            except Exception as error:
                state.notes.append(f"{expected.scenario.name}: the converted model raised {describe_error(error)}")
    state.fallbacks = {fqn: fused.fallbacks - before[fqn] for fqn, fused in fusions.items()}
    for fqn, site in sites.items():
        if fqn in recorder.figures:
            state.sites[fqn] = recorder.verdict(fqn, site)
        elif takes_one_tensor(site):
            state.sites[fqn] = random_site_parity(fqn, site, state.applied.taken.get(fqn))
        else:
            state.notes.append(f"{fqn}: the TE module never ran and takes more than one tensor, so it was not compared alone")


def _check_parameters(state: _State) -> None:
    """A site whose parameters are not the original's own fails, whatever it computes now: an optimizer step would part them."""
    for fqn, problem in parameter_problems(state.applied).items():
        site = state.sites.get(fqn) or SiteParity(fqn, "unknown", MISMATCH, 0, "", passed=False)
        state.sites[fqn] = replace(site, bound="the original's parameters, each once", passed=False)
        state.recorder.errors.setdefault(fqn, problem)


def _revert_failing_sites(state: _State) -> None:
    for fqn, site in list(state.sites.items()):
        if not site.passed and fqn in state.applied.sites:
            detail = state.recorder.errors.get(fqn) or f"{site.bound} missed"
            _put_back(state, fqn, f"alone: {detail}")


def _put_back(state: _State, fqn: str, why: str) -> None:
    state.applied.undo(fqn)
    parity = state.sites.get(fqn)
    state.reverted.append(RevertedSite(fqn, why, parity.figures if parity is not None else None))


# ---- the whole model -------------------------------------------------------------------------------------------------
def _compare_all(state: _State, progress: Progress | None) -> list[ScenarioParity]:
    if not state.reference.reproducible:
        return []
    results = []
    state.row_ratios.clear()
    for index, expected in enumerate(state.reference.runs):
        results += _compare_one(state, expected)
        if progress is not None:
            progress(index + 1, len(state.reference.runs))
    return [*results, *_judge_accuracy(state, results)]


def _judge_accuracy(state: _State, results: list[ScenarioParity]) -> list[ScenarioParity]:
    """Low precision: the error ratio over all runs together."""
    low = [result for result in results if result.error_ratio is not None]
    if not low:
        return []
    _, figures = worst_of((r.name, r.figures) for r in low)
    accuracy = judge_accuracy(state.applied, state.reference, state.row_ratios, figures.numel)
    if accuracy is None:
        return []
    bound = f"median over {accuracy.draws} draws: {accuracy.verdict.bound}"
    return [ScenarioParity(_ALL_RUNS, low[0].dtype, True, figures, accuracy.ratio, bound, accuracy.verdict.passed)]


def _compare_one(state: _State, expected: Expected, root: nn.Module | None = None, off: Sequence[str] = ()) -> list[ScenarioParity]:
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


def _run(state: _State, model: nn.Module, expected: Expected, setting: Setting) -> Outputs:
    """A run again, of the converted model or of one in which original modules are put back."""
    if expected.second is None:
        return run(model, expected.scenario, setting)
    return moved_outputs(model, expected.scenario, expected.second, setting, own_of(state.applied))


def _judge_gradients(state: _State, model: nn.Module, expected: Expected, off: Sequence[str]) -> ScenarioParity:
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


def _gradients_in_float64(state: _State, model: nn.Module, expected: Expected) -> Figures | None:
    """Both sides in float64; None when the original modules put back do not give the recorded gradients (see above)."""
    setting, names = replace(expected.setting, widen=torch.float64), list(state.applied.sites)
    own = own_parameters(state.applied, names)
    with as_original(state.applied, names) as restored:
        again = gradient_outputs(restored, expected.scenario, expected.setting, own)
        if not judge_gradient(compare_gradients(expected.outputs, again)[1], state.reference.low is not None).passed:
            return None
        exact = gradient_outputs(restored, expected.scenario, setting, own)
    return compare_gradients(exact, gradient_outputs(model, expected.scenario, setting))[1]


def _judge_generated(state: _State, model: nn.Module, expected: Expected) -> ScenarioParity:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = generate_outputs(model, expected.scenario, expected.setting)
    path, figures = compare_generated(expected.outputs, outputs)
    approximation = next(filter(None, map(approximation_of, state.applied.sites.values())), "")
    verdict = judge_approximate(figures, approximation) if approximation else judge_float32(figures)
    return ScenarioParity(expected.scenario.name, "float32", True, figures, None, verdict.bound, verdict.passed, path)


def _judge_exact(state: _State, model: nn.Module, expected: Expected, outputs: Outputs, dtype: str) -> ScenarioParity:
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
    state: _State, model: nn.Module, expected: Expected, outputs: Outputs, missed: ScenarioParity
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


def _judge_low(state: _State, expected: Expected, outputs: Outputs, low: torch.dtype) -> ScenarioParity:
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


# ---- which site is it? -----------------------------------------------------------------------------------------------
def _failing(state: _State, scenarios: list[ScenarioParity]) -> Expected | None:
    """The first run that failed; None when only the accuracy over all runs did."""
    names = {(s.name, s.perturbed) for s in scenarios if not s.passed}
    return next((r for r in state.reference.runs if (r.scenario.name, r.setting.perturb) in names), None)


def _revert_culprit(state: _State, scenarios: list[ScenarioParity]) -> None:
    """Find the first site (in module order) that makes the model fail, by bisection over prefixes, and put it back."""
    expected, names = _failing(state, scenarios), list(state.applied.sites)
    if expected is None:
        _revert_everything(state, scenarios)
        return

    def passes(prefix: int) -> bool:
        with as_original(state.applied, names[prefix:]) as root:
            return all(s.passed for s in _compare_one(state, expected, root, names[prefix:]))

    if not passes(0):  # not one site's numbers: something about the replacement itself
        _revert_everything(state, scenarios)
        return
    low, high = 0, len(names)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    failed = next(s for s in scenarios if not s.passed)
    _put_back(state, names[high - 1], f"first diverging site of {failed.name}: {_measured(failed)}, {failed.bound}")


def _measured(failed: ScenarioParity) -> str:
    """The figure that the bound was put to."""
    if failed.error_ratio is not None:
        return f"error ratio {failed.error_ratio:.3g}"
    return f"SQNR {failed.figures.sqnr_db:.1f} dB, max rel {failed.figures.max_rel:.1e}"


def _revert_everything(state: _State, scenarios: list[ScenarioParity]) -> None:
    failed = next((s for s in scenarios if not s.passed), None)
    figures = "" if failed is None else f": {failed.name} has {_measured(failed)}, {failed.bound}"
    for fqn in list(state.applied.sites):
        _put_back(state, fqn, f"the model as a whole failed and no single site explains it{figures}")
