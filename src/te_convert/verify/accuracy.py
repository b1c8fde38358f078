"""Low precision: is the converted model as accurate as the original, over enough runs to tell?

One run is one draw of rounding noise.  On a 30-layer model whose mapping is bit-exact in float32, single runs had error ratios from
0.60 to 1.66 although both sides are equally accurate, and one flipped expert of a mixture can decide a whole run.  So the bound
is put to the geometric mean of all runs (a flip is as likely on either side); when that misses it, more inputs are drawn until it
holds or the draws are used up.  An error that is not noise raises the ratio of every run, and each site is judged alone besides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from te_convert.rewrite.apply import Applied
from te_convert.verify.compare import error_ratio
from te_convert.verify.isolate import as_original
from te_convert.verify.reference import Reference
from te_convert.verify.run import Setting, run
from te_convert.verify.tolerance import Verdict, judge_ratio
from te_convert.verify.variants import other_values

MAX_DRAWS = 16


@dataclass(frozen=True)
class Accuracy:
    """The pooled error ratio (geometric mean), how many runs it is over, and the verdict."""

    ratio: float
    draws: int
    verdict: Verdict


def judge_accuracy(applied: Applied, reference: Reference, ratios: list[tuple[float, int]]) -> Accuracy | None:
    """Pool the error ratios of the runs made so far, and draw more where the pool misses the bound.

    Args:
        applied: the rewrite under test.
        reference: the original's results; its first perturbed scenario is varied for more draws.
        ratios: (error ratio, elements) of each low-precision run.

    Returns:
        None when no run had a ratio.
    """
    pool = [(ratio, numel) for ratio, numel in ratios if numel > 0]
    while pool:
        accuracy = _pooled(pool)
        if accuracy.verdict.passed or len(pool) >= MAX_DRAWS:
            return accuracy
        drawn = _draw(applied, reference, seed=len(pool))
        if drawn is None:
            return accuracy
        pool.append(drawn)
    return None


def _pooled(pool: list[tuple[float, int]]) -> Accuracy:
    tiny = torch.finfo(torch.float64).tiny
    mean = math.exp(sum(math.log(max(ratio, tiny)) for ratio, _ in pool) / len(pool))
    return Accuracy(mean, len(pool), judge_ratio(mean, sum(numel for _, numel in pool)))


def _draw(applied: Applied, reference: Reference, seed: int) -> tuple[float, int] | None:
    """One more run of both sides on other input values; None when the original does not take them."""
    runs = [r for r in reference.runs if r.exact is not None]
    if not runs or reference.low is None:
        return None
    base = runs[seed % len(runs)]
    scenario, perturb = other_values(base.scenario, seed), base.setting.perturb
    try:
        with as_original(applied, list(applied.sites)) as original:
            exact = run(original, scenario, Setting(perturb, torch.float32))
            own = run(original, scenario, Setting(perturb))
        return error_ratio(exact, own, run(applied.model, scenario, Setting(perturb)), reference.low)
    except Exception:  # values that the model does not take give no draw
        return None
