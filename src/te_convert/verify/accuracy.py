"""Low precision: is the converted model as accurate as the original, over enough draws to tell?

One run is one draw of rounding noise.  On a 30-layer model whose mapping is bit-exact in float32, single runs had error ratios from
0.6 to 8 although both sides are equally accurate: a few first tokens decide a short sequence, one flipped expert decides a mixture.
So the bound is put to the median over batch rows of all runs (a lucky draw is as likely on either side).  When the first runs miss
it, the verdict is left to fresh ones on other inputs, for which the original modules are put back for the time being.  An error
that is not noise raises the ratio of every draw, and each site is judged alone besides.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import nn

from te_convert.capture.scenario import Scenario
from te_convert.rewrite.apply import Applied
from te_convert.verify.compare import row_ratios
from te_convert.verify.isolate import as_original
from te_convert.verify.reference import Expected, Reference
from te_convert.verify.run import Setting, run
from te_convert.verify.tolerance import Verdict, judge_ratio
from te_convert.verify.variants import other_values, wider_batch

MIN_DRAWS = 48
_BATCH_TIMES = 8


@dataclass(frozen=True)
class Accuracy:
    """The median error ratio, over how many draws, and the verdict."""

    ratio: float
    draws: int
    verdict: Verdict


def judge_accuracy(
    applied: Applied, reference: Reference, ratios: list[float], numel: int, root: nn.Module | None = None
) -> Accuracy | None:
    """Judge the draws made so far; where they miss the bound, judge fresh ones instead.

    Args:
        applied: the rewrite under test.
        reference: the original's results; its runs are varied for fresh draws.
        ratios: error ratio of each batch row of the runs made so far.
        numel: elements compared in them.
        root: the model to draw with, in which some sites may be as they were; by default the rewritten one.

    Returns:
        None when no run had a ratio.
    """
    if not ratios:
        return None
    first = _judged(ratios, numel)
    if first.verdict.passed or not _restorable(applied, reference, numel):
        return first
    fresh: list[float] = []
    for seed in range(MIN_DRAWS):  # ends early: every draw that works gives at least one row
        fresh += _draw(applied, reference, seed, root if root is not None else applied.model)
        if len(fresh) >= MIN_DRAWS or (seed >= 2 and not fresh):
            break
    return _judged(fresh, numel) if len(fresh) >= MIN_DRAWS else first


def _judged(ratios: list[float], numel: int) -> Accuracy:
    middle = statistics.median(ratios)
    return Accuracy(middle, len(ratios), judge_ratio(middle, numel))


def _restorable(applied: Applied, reference: Reference, numel: int) -> bool:
    """Whether the original modules put back are as accurate as the original was; else they say nothing about it."""
    base = next((r for r in reference.runs if r.exact is not None), None)
    if base is None or base.exact is None or reference.low is None:
        return False
    try:
        with as_original(applied, list(applied.sites)) as original:
            again = run(original, base.scenario, base.setting)
        ratios = row_ratios(base.exact, base.outputs, again, reference.low)
    except Exception:  # then no fresh draw would run either
        return False
    return bool(ratios) and _judged(ratios, numel).verdict.passed


def _draw(applied: Applied, reference: Reference, seed: int, root: nn.Module) -> list[float]:
    """One more run of both sides on other values in a wider batch; empty when the original does not take them."""
    runs = [r for r in reference.runs if r.exact is not None and not r.scenario.training]
    if not runs or reference.low is None:
        return []
    base = max(runs, key=_size)
    perturb = seed % 2 == 1
    for scenario in (other_values(wider_batch(base.scenario, _BATCH_TIMES), seed), other_values(base.scenario, seed)):
        ratios = _compared(applied, root, scenario, perturb, reference.low)
        if ratios:
            return ratios
    return []


def _size(expected: Expected) -> int:
    return sum(tensor.numel() for _, tensor in expected.outputs)


def _compared(applied: Applied, root: nn.Module, scenario: Scenario, perturb: bool, low: torch.dtype) -> list[float]:
    try:
        with as_original(applied, list(applied.sites)) as original:
            exact = run(original, scenario, Setting(perturb, torch.float32))
            own = run(original, scenario, Setting(perturb))
        return row_ratios(exact, own, run(root, scenario, Setting(perturb)), low)
    except Exception:  # values that the model does not take give no draw
        return []
