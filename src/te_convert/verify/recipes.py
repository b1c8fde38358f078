"""A recipe's accuracy without its hardware: emulate it in the twins, and say which sites should stay in high precision.

One pass compares each site with itself, in the recipe and not, on the inputs that the model in high precision gives it.  One more
run compares the whole model in the recipe with the original.  Sites below their bound stay in high precision.  Where the model is
still below its own, further sites follow, the one that adds the most noise to the output for its floating-point operations first
(estimated, see verify/sensitivity.py), until the model reaches its bound: noise of independent sites adds up, so how many it takes
is guessed and bisected, each try measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from te_convert.capture.run import describe_error
from te_convert.plan.model import SITE_ATTRIBUTE, Plan
from te_convert.reasons import ReasonCode, reason
from te_convert.reference.emulation import EMULATED, Emulation, emulate
from te_convert.replacements.specs import DotProductAttentionSpec, LayerNormSpec, RMSNormSpec
from te_convert.rewrite.apply import Applied
from te_convert.rewrite.precision import in_high_precision
from te_convert.verify.compare import Outputs, compare, compare_outputs
from te_convert.verify.isolate import Run, SiteRecorder, observed
from te_convert.verify.recipe_figures import RecipeFigures, RecipeScenario, RecipeSite
from te_convert.verify.reference import Expected, Reference
from te_convert.verify.run import prepared, run
from te_convert.verify.sensitivity import PROBES, noise_at_output
from te_convert.verify.tolerance import recipe_bounds

Progress = Callable[[int, int], None]
_WITHOUT_PRODUCTS = (LayerNormSpec, RMSNormSpec, DotProductAttentionSpec)
_INNER = "past_key_values"
"""Outputs that only the model itself reads."""
_FEW_TRIES = 4
"""Runs of a search where one run takes long (``Reference.frugal``)."""


def measure_recipe(
    applied: Applied,
    reference: Reference,
    plan: Plan,
    min_sqnr: float | None = None,
    progress: Progress | None = None,
) -> RecipeFigures | None:
    """Figures of the plan's recipe in the forward of a converted model, and which sites to keep in high precision.

    Args:
        applied: the rewrite, on twins.
        reference: the original's results; the runs on the example inputs as they are count.
        plan: names the recipe and each site's FLOPs.
        min_sqnr: least SQNR of the model in dB; the recipe's own bound when None.
        progress: called with (done, total) runs.

    Returns:
        None where there is nothing to emulate: no recipe, real TE modules, no site that it computes, or no run.
    """
    runs = _plain_runs(reference)
    sites = _emulated_sites(applied)
    if plan.recipe not in EMULATED or applied.backend != "reference" or not runs or not sites:
        return None
    emulation = Emulation(plan.recipe)
    bounds = recipe_bounds(emulation.recipe, min_sqnr)
    measured = _Measured(applied, reference, runs, emulation, *bounds, progress or (lambda done, total: None))
    found = _alone(measured, sites, _flops(plan))
    figures = RecipeFigures(plan.recipe, emulation.recipe, *bounds, sites=tuple(found))
    if plan.recipe != emulation.recipe:
        measured.notes.append(f"{plan.recipe} is the GPU's choice; {emulation.recipe} was emulated")
    if not reference.reproducible:
        measured.notes.append("the original does not reproduce itself, so each site was judged alone")
    else:
        figures = _whole(measured, figures)
    return replace(figures, notes=tuple(measured.notes))


def propose_precision(plan: Plan, figures: RecipeFigures) -> Plan:
    """The plan with the figures' proposal: those sites in high precision, with the reason."""
    for site in figures.high:
        plan = plan.keep_high(site.fqn, reason(ReasonCode.RECIPE_LOW_SQNR, site.why))
    return plan


_Results = list[tuple[str, str, float]]
"""Scenario, worst output, SQNR."""


@dataclass
class _Measured:
    applied: Applied
    reference: Reference
    runs: list[Expected]
    emulation: Emulation
    min_sqnr: float
    min_site_sqnr: float
    progress: Progress
    notes: list[str] = field(default_factory=list)


def _plain_runs(reference: Reference) -> list[Expected]:
    """The forwards on the inputs as given: parameters as they are, eval mode."""
    found: dict[str, Expected] = {}
    for expected in reference.runs:
        if expected.kind == "forward" and not expected.setting.perturb and not expected.scenario.training:
            found.setdefault(expected.scenario.name, expected)
    return list(found.values())


def _emulated_sites(applied: Applied) -> dict[str, nn.Module]:
    """Converted sites with matrix products that the plan leaves to the recipe."""
    decisions = {fqn: site.__dict__[SITE_ATTRIBUTE].decision for fqn, site in applied.sites.items()}
    return {
        fqn: applied.sites[fqn]
        for fqn, decision in decisions.items()
        if decision.precision != "high" and not isinstance(decision.spec, _WITHOUT_PRODUCTS)
    }


def _flops(plan: Plan) -> dict[str, int]:
    flops: dict[str, int] = {}
    for decision in plan.converting:
        place = decision.fqn if decision.fused_into is None else decision.fused_into
        flops[place] = flops.get(place, 0) + decision.flops
    return flops


# ---- each site alone --------------------------------------------------------------------------------------------------------
class _RecipeRecorder(SiteRecorder):
    """Compares each site's output in high precision with its output in the recipe."""

    def __init__(self, emulation: Emulation) -> None:
        super().__init__()
        self.emulation = emulation

    def _compare(self, fqn: str, site: nn.Module, y: torch.Tensor, original: Run, converted: Run) -> None:
        with emulate(self.emulation):
            self._keep(fqn, compare(y, converted()))


def _alone(measured: _Measured, sites: dict[str, nn.Module], flops: Mapping[str, int]) -> list[RecipeSite]:
    """One pass over the model, worst site first; delayed scaling gets its scales from it."""
    recorder = _RecipeRecorder(measured.emulation)
    measured.emulation.calibrating = True
    total = 2 * len(measured.runs)
    try:
        for index, expected in enumerate(measured.runs):
            model = measured.applied.model
            with prepared(model, expected.scenario, expected.setting) as ready, observed(sites, recorder):
                try:
                    ready.call(model)
                except Exception as error:
                    measured.notes.append(f"{expected.scenario.name}: the converted model raised {describe_error(error)}")
            measured.progress(index + 1, total)
    finally:
        measured.emulation.calibrating = False
    idle = [fqn or "the root" for fqn in sites if fqn not in recorder.figures]
    if idle:
        measured.notes.append(f"{len(idle)} sites never ran, so nothing is known of them: {', '.join(idle[:5])}")
    bound = measured.min_site_sqnr
    found = []
    for fqn, figures in recorder.figures.items():
        sqnr = figures.sqnr_db
        high = not sqnr >= bound
        why = f"alone: SQNR {sqnr:.1f} dB, below {bound:g} dB" if high else ""
        if fqn in recorder.errors:
            why = f"alone: {recorder.errors[fqn]}"
        found.append(RecipeSite(fqn, sqnr, recorder.calls[fqn], flops.get(fqn, 0), high=high, why=why))
    return sorted(found, key=lambda site: site.sqnr_db)


# ---- the whole model --------------------------------------------------------------------------------------------------------
def _whole(measured: _Measured, figures: RecipeFigures) -> RecipeFigures:
    """Judge the model with every site in the recipe, and with those that stay in high precision."""
    everything = _run_all(measured, ())
    high = [site.fqn for site in figures.high]
    now = _run_all(measured, high) if high else everything
    if _worst(now) >= measured.min_sqnr:
        return replace(figures, scenarios=_scenarios(everything, now))
    figures = replace(figures, sites=_with_shares(measured, figures.sites, now))
    order = sorted((site for site in figures.sites if not site.high), key=_noise_per_flop, reverse=True)
    count, best = _search(measured, order, high, now)
    why = f"the model: SQNR {_worst(now):.1f} dB, below {measured.min_sqnr:g} dB; this site alone: "
    more = {site.fqn: f"{why}{site.sqnr_db:.1f} dB{_share_words(site)}" for site in order[:count]}
    sites = [replace(site, high=True, why=more[site.fqn]) if site.fqn in more else site for site in figures.sites]
    return replace(figures, sites=tuple(sites), scenarios=_scenarios(everything, best))


def _with_shares(measured: _Measured, sites: tuple[RecipeSite, ...], now: _Results) -> tuple[RecipeSite, ...]:
    """The sites that keep the recipe so far with their shares of the noise; as they are where the model has no gradients."""
    worst = min(range(len(now)), key=lambda index: now[index][2])
    asked = {site.fqn: measured.applied.sites[site.fqn] for site in sites if not site.high}
    probes = _FEW_TRIES if measured.reference.frugal else PROBES
    try:
        with in_high_precision(measured.applied, [site.fqn for site in sites if site.high]):
            noise = noise_at_output(measured.applied, measured.runs[worst], measured.emulation, asked, _INNER, probes)
    except Exception as error:
        measured.notes.append(f"no estimate of what each site adds to the model's noise: {describe_error(error)}")
        return sites
    total = sum(noise.values())
    if not 0 < total < math.inf:
        return sites
    return tuple(replace(site, share=noise.get(site.fqn, 0.0) / total) if site.fqn in asked else site for site in sites)


def _share_words(site: RecipeSite) -> str:
    return "" if site.share is None else f", about {100 * site.share:.1f} % of the model's noise"


def _search(measured: _Measured, order: Sequence[RecipeSite], high: list[str], now: _Results) -> tuple[int, _Results]:
    """How many sites of ``order`` have to stay in high precision for the model to reach its bound, and its figures then.

    The fewest; where one run takes long, the first number that is enough, after at most :data:`_FEW_TRIES` runs.
    """
    few, missed = 0, now  # with `few` of them the model misses its bound
    enough, reached = len(order), None  # with all of them it is in high precision
    tries = _FEW_TRIES if measured.reference.frugal else len(order)
    while enough - few > 1 and tries > 0:
        guess = _guess(order[few:], _worst(missed), measured.min_sqnr) if reached is None else (enough - few) // 2
        middle = few + min(max(guess, 1), enough - few - 1)
        tried, tries = _run_all(measured, [*high, *(site.fqn for site in order[:middle])]), tries - 1
        if _worst(tried) < measured.min_sqnr:
            few, missed = middle, tried
            continue
        enough, reached = middle, tried
        if measured.reference.frugal:
            break
    if reached is not None:
        return enough, reached
    if enough - few > 1:
        measured.notes.append(f"one run takes long, so the search for sites in high precision ended after {_FEW_TRIES} tries")
        return few, missed
    return enough, _run_all(measured, [*high, *(site.fqn for site in order)])


def _guess(order: Sequence[RecipeSite], level: float, bound: float) -> int:
    """How many sites to take out for the noise to fall from one level to another, if each adds to it in proportion to its own."""
    noise = [_noise(site) for site in order]
    left, wanted = sum(noise), sum(noise) * 10 ** (min(level - bound, 0.0) / 10)
    for count, power in enumerate(noise):
        if left <= wanted:
            return count
        left -= power
    return len(order)


def _noise(site: RecipeSite) -> float:
    """What a site adds to the model's noise; without an estimate, noise over signal of its own output."""
    return float(10 ** (-max(site.sqnr_db, -300.0) / 10)) if site.share is None else site.share


def _noise_per_flop(site: RecipeSite) -> float:
    """Its noise for each operation that high precision would make dearer."""
    return _noise(site) / max(site.flops, 1)


def _run_all(measured: _Measured, high: Sequence[str]) -> _Results:
    """Every scenario in the recipe, with some sites in high precision."""
    results: _Results = []
    for index, expected in enumerate(measured.runs):
        with in_high_precision(measured.applied, high) if high else nullcontext():
            results.append((expected.scenario.name, *_run_one(measured, expected)))
        measured.progress(len(measured.runs) + index + 1, 2 * len(measured.runs))
    return results


def _run_one(measured: _Measured, expected: Expected) -> tuple[str, float]:
    try:
        with torch.no_grad(), emulate(measured.emulation):  # without gradients the scales stay as they are
            outputs = run(measured.applied.model, expected.scenario, expected.setting)
    except Exception as error:
        measured.notes.append(f"{expected.scenario.name}: the model in the recipe raised {describe_error(error)}")
        return "", -math.inf
    path, figures = compare_outputs(_floating(expected.outputs), _floating(outputs))
    return path, figures.sqnr_db


def _floating(outputs: Outputs) -> Outputs:
    """What the caller sees of a run, as numbers."""
    return [(path, tensor) for path, tensor in outputs if tensor.is_floating_point() and _INNER not in path]


def _worst(results: _Results) -> float:
    return min((sqnr for _, _, sqnr in results), default=math.inf)


def _scenarios(everything: _Results, proposed: _Results) -> tuple[RecipeScenario, ...]:
    pairs = zip(everything, proposed, strict=True)
    return tuple(RecipeScenario(name, output, sqnr, better) for (name, output, sqnr), (_, _, better) in pairs)
