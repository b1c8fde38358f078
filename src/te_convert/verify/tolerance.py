"""Every bound of a parity check, with its source.  Nothing else in the package decides what is close enough."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from te_convert.verify.model import Figures

SQNR_DB_FLOAT32 = 90.0
"""Model and site outputs in float32.  Rounding alone gives 100 to 150 dB; a lost bias or a wrong eps far less."""

MAX_REL_FLOAT32 = 2e-5
"""max|a − b| / max|a| in float32.  The worst of 286 architectures under the same kind of rewrite was 2.3e-6."""

SQNR_DB_FLOAT64 = 200.0
"""When float32 misses its bound, both sides run in float64: a rounding difference shrinks to about 300 dB, a wrong value stays."""

GRADIENT_REL = 1e-4
"""Relative error of a parameter's gradient in float32, and in float64 to tell rounding from error.  The worst of 286 architectures
under the same kind of rewrite was 4.4e-5, and that was rounding."""

LOSS_REL = 1e-4
"""Losses of a few optimizer steps in float32: each step adds a relative error of about that of the gradients."""

LOSS_REL_LOW = 2e-2
"""The same in bf16 and fp16, where two correct runs part by the rounding of every step."""

GRADIENT_REL_LOW = 8e-3
"""The same for a bf16 or fp16 model whose computation ran in float32: only the gradients are rounded, by at most 2⁻⁸ each."""

SQNR_DB_TF32, GRADIENT_REL_TF32 = 50.0, 1e-2
"""Outputs and gradients of a float32 model on TE's CUDA kernels, which multiply float32 in TF32 (ten bits of mantissa), after its
twins have held float32's own bounds on the same machine: these two judge the kernels, not the mapping.  With operands rounded
to TF32, the worst site of 14 converted models had 64.8 dB, the worst model 59.8 dB, and the worst gradient an error of 2e-3."""

ROUNDING_RATIO = 4.0
"""Such a float32 difference is rounding only if the converted side is as close to the float64 result as the original is, up to the
scatter of two different roundings.  Rounding to a narrower dtype inside would be thousands of times farther."""

ERROR_RATIO = 1.25
"""Low precision: rms error against the float32 original, converted over original; 1.0 means as accurate as the original.  Put to
each site alone, and to the median over all draws of the whole model (one run is one draw of noise; see verify/accuracy.py)."""

STATISTICS_SPREAD = 0.125
"""How far the results of a bf16 or fp16 norm for scaled rows may be apart, in units of one rounding (verify/norm_statistics.py).
Widths from 8 to 16384, norms and fused modules: at most 0.018 with statistics in float32, at least 0.24 with bf16 or fp16 ones."""

SQNR_DB_APPROXIMATE = 60.0
"""A site, or a model with one, that computes a tanh GELU for an erf GELU because the caller allowed it.  The two differ by at most
4.7e-4 per activation: 84 to 86 dB at a site, 75 to 89 dB after 1 to 32 blocks; a swapped weight or a lost bias is far below."""

SQNR_DB_RECIPE, SQNR_DB_RECIPE_SITE = 20.0, 18.0
"""A model and one Linear in an emulated FP8 recipe, against high precision: what torchao's tests ask of its own E4M3 layers, in
inference and in training (test/prototype/mx_formats/test_mx_linear.py)."""

SQNR_DB_FP4, SQNR_DB_FP4_SITE = 11.0, 8.0
"""The same for 4 bits, from the same file; rounding both operands to E2M1 leaves about 17 dB, so no Linear would hold 18."""

GOLDEN_SLACK_DB = 3.0
"""How much lower than recorded the SQNR of one site may be: twice the noise energy.  In four settings of threads and
instruction sets no site of seven models changed by as much below GOLDEN_ENOUGH_DB; TF32, the widest of the narrower formats, costs
78 dB."""

GOLDEN_MODEL_SLACK_DB = 20.0
"""The same for a run of the whole model, whose layers amplify the rounding of the first ones by chance: one run of MiniLM in those
settings, with nothing else changed, lay between 107.6 and 124.0 dB."""

GOLDEN_ENOUGH_DB = 120.0
"""From here on an SQNR is float32's own rounding (2⁻²⁴ is 144 dB, and noise adds up over layers), so a change means nothing."""

GOLDEN_REL_FACTOR = 4.0
"""How many times the recorded maximum the relative error of a site may be.  One element decides it, so it scatters
more than an SQNR does."""

GOLDEN_MODEL_REL_FACTOR = 20.0
"""The same for a run of the whole model: up to 11.4 times in the settings above, and up to 5.8 times for the worst gradient."""

GOLDEN_ENOUGH_REL = 1e-6
"""Up to here a relative error is float32's own rounding; the same 120 dB as an amplitude."""

_SMALL = 4096


@dataclass(frozen=True)
class Verdict:
    """Whether a bound held, and the bound in words."""

    passed: bool
    bound: str


_tf32: ContextVar[bool] = ContextVar("te_convert_tf32", default=False)


@contextmanager
def products_in_tf32() -> Iterator[None]:
    """float32 on one side multiplies in TF32 here; only after the same mapping was judged without this."""
    token = _tf32.set(True)
    try:
        yield
    finally:
        _tf32.reset(token)


def judge_float32(figures: Figures) -> Verdict:
    """float32 against float32."""
    if _tf32.get():
        return Verdict(figures.bit_equal or figures.sqnr_db >= SQNR_DB_TF32, f"SQNR >= {SQNR_DB_TF32:g} dB (TF32 products)")
    passed = figures.bit_equal or (figures.sqnr_db >= SQNR_DB_FLOAT32 and figures.max_rel <= MAX_REL_FLOAT32)
    return Verdict(passed, f"SQNR >= {SQNR_DB_FLOAT32:g} dB and max rel <= {MAX_REL_FLOAT32:g}")


def judge_approximate(figures: Figures, approximation: str) -> Verdict:
    """float32 with an approximation that the caller allowed, by its own budget."""
    return Verdict(
        figures.bit_equal or figures.sqnr_db >= SQNR_DB_APPROXIMATE, f"SQNR >= {SQNR_DB_APPROXIMATE:g} dB ({approximation} allowed)"
    )


def judge_float64(figures: Figures) -> Verdict:
    """float64 against float64, to tell rounding from error."""
    return Verdict(figures.bit_equal or figures.sqnr_db >= SQNR_DB_FLOAT64, f"SQNR >= {SQNR_DB_FLOAT64:g} dB in float64")


def judge_gradient(figures: Figures, low: bool) -> Verdict:
    """A model's gradients: the worst relative error over its parameters."""
    bound = GRADIENT_REL_TF32 if _tf32.get() else GRADIENT_REL_LOW if low else GRADIENT_REL
    return Verdict(figures.bit_equal or figures.max_rel <= bound, f"relative error of every gradient <= {bound:g}")


def judge_steps(figures: Figures, low: bool) -> Verdict:
    """The loss curve of a few optimizer steps."""
    bound = LOSS_REL_LOW if low else LOSS_REL
    return Verdict(figures.bit_equal or figures.max_rel <= bound, f"relative difference of every loss <= {bound:g}")


def is_rounding(figures: Figures, ratio: float) -> bool:
    """Whether a missed float32 bound is rounding: float64 agrees, and the float32 results are equally far from it."""
    return judge_float64(figures).passed and ratio <= ROUNDING_RATIO


def judge_ratio(ratio: float, numel: int) -> Verdict:
    """Low precision by error ratio; the bound widens for few elements, where the ratio of two rms values is noisy.

    The relative spread of an rms over n independent errors is 1/sqrt(2n); 8/sqrt(n) leaves more than five of them for both sides.
    """
    slack = 8 / math.sqrt(max(numel, 1)) - 8 / math.sqrt(_SMALL) if numel < _SMALL else 0.0
    bound = ERROR_RATIO * (1 + slack)
    return Verdict(ratio <= bound, f"error ratio <= {bound:.3g}")


def judge_statistics(spread: float) -> Verdict:
    """A norm's statistics, by the spread of its results for scaled rows."""
    return Verdict(spread <= STATISTICS_SPREAD, f"spread over scaled rows {spread:.2g}, <= {STATISTICS_SPREAD:g} of one rounding")


def rounding_floor(dtype: torch.dtype) -> float:
    """rms relative error of rounding an exact result once: unit roundoff / sqrt(3) (uniform error within half an ulp)."""
    return torch.finfo(dtype).eps / 2 / math.sqrt(3)


def recipe_bounds(recipe: str, min_sqnr: float | None) -> tuple[float, float]:
    """Least SQNR in dB of a model and of each of its sites in a recipe; a caller's bound for the model moves both."""
    model, site = (SQNR_DB_FP4, SQNR_DB_FP4_SITE) if recipe == "nvfp4" else (SQNR_DB_RECIPE, SQNR_DB_RECIPE_SITE)
    moved = 0.0 if min_sqnr is None else min_sqnr - model
    return model + moved, site + moved
