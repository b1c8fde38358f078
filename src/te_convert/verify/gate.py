"""The gate: compare, put failing sites back, compare again.  A bound is never loosened to pass."""

from __future__ import annotations

from dataclasses import replace

from te_convert.capture.run import describe_error
from te_convert.capture.tensors import model_device
from te_convert.rewrite.apply import Applied
from te_convert.rewrite.fused import fused_record
from te_convert.verify.compare import MISMATCH
from te_convert.verify.culprit import explain, revert_culprit, revert_everything
from te_convert.verify.isolate import SiteRecorder, observed, random_site_parity, takes_one_tensor
from te_convert.verify.model import Parity, ScenarioParity, SiteParity
from te_convert.verify.norm_statistics import statistics_spread
from te_convert.verify.perturb import parameter_problems
from te_convert.verify.reference import Reference
from te_convert.verify.run import prepared
from te_convert.verify.state import State, put_back
from te_convert.verify.tolerance import judge_statistics
from te_convert.verify.whole import POOLED, Progress, compare_all

__all__ = ["POOLED", "verify_applied"]

_MAX_SEARCHES = 16


def verify_applied(
    applied: Applied, reference: Reference, revert: bool = True, progress: Progress | None = None, bisect: bool = False
) -> Parity:
    """Compare a rewritten model with the original's recorded results.

    Args:
        applied: the rewrite; with ``revert`` its failing sites are undone.
        reference: what the original computed.
        revert: put failing sites back and try again; False only reports.
        progress: called with (done, total) runs.
        bisect: where the model as a whole fails, find the smallest set of sites that fail together (``Parity.interactions``);
            with ``revert`` one of them is put back, else the first site in module order after which the model fails.

    Returns:
        The verdict on what is left in ``applied.model``.
    """
    state = State(applied, reference, SiteRecorder(applied.taken), notes=list(reference.notes))
    _isolate(state)
    _check_statistics(state)
    _check_parameters(state)
    if revert:
        _revert_failing_sites(state)
    scenarios = compare_all(state, progress)
    for _ in range(_MAX_SEARCHES):
        if not revert or not applied.sites or all(s.passed for s in scenarios):
            break
        revert_culprit(state, scenarios, bisect)
        scenarios = compare_all(state, None)
    if revert and not all(s.passed for s in scenarios) and applied.sites:
        revert_everything(state, scenarios)
        scenarios = compare_all(state, None)
    if bisect and not revert:
        explain(state, scenarios)
    return _parity(state, scenarios)


def _parity(state: State, scenarios: list[ScenarioParity]) -> Parity:
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
        interactions=tuple(state.interactions),
    )


# ---- each site alone -------------------------------------------------------------------------------------------------
def _isolate(state: State) -> None:
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
        elif fqn in recorder.void:
            state.notes.append(f"{fqn}: its outputs had no finite value, so it was not compared alone")
        else:
            state.notes.append(f"{fqn}: the TE module never ran and takes more than one tensor, so it was not compared alone")


def _check_statistics(state: State) -> None:
    """A norm of a low-precision site whose statistics are not in float32 fails the site, however little accuracy it costs there."""
    for fqn, site in state.sites.items():
        try:
            spread = statistics_spread(state.applied.sites[fqn])
        except Exception as error:
            state.notes.append(f"{fqn}: the precision of its norm's statistics was not judged: {describe_error(error)}")
            continue
        if spread is not None and site.passed and not (judged := judge_statistics(spread)).passed:
            state.sites[fqn] = replace(site, bound=f"norm statistics in float32 ({judged.bound})", passed=False)


def _check_parameters(state: State) -> None:
    """A site whose parameters are not the original's own fails, whatever it computes now: an optimizer step would part them."""
    for fqn, problem in parameter_problems(state.applied).items():
        site = state.sites.get(fqn) or SiteParity(fqn, "unknown", MISMATCH, 0, "", passed=False)
        state.sites[fqn] = replace(site, bound="the original's parameters, each once", passed=False)
        state.recorder.errors.setdefault(fqn, problem)


def _revert_failing_sites(state: State) -> None:
    for fqn, site in list(state.sites.items()):
        if not site.passed and fqn in state.applied.sites:
            detail = state.recorder.errors.get(fqn) or f"{site.bound} missed"
            put_back(state, fqn, f"alone: {detail}")
