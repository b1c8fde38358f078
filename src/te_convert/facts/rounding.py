"""How a norm behaves in bfloat16 and float16: where it rounds, and which eps it then uses."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from te_convert.facts.norm_formula import NormFacts, Rounding, affine, normalise
from te_convert.facts.stand_in import relative_error

_SAME_BITS = 0.98
"""Share of bit-equal low-precision outputs that proves an order of rounding; the two orders agree on about 74 %."""


def closest_eps(facts: NormFacts, choices: tuple[float, ...], x: Tensor, y: Tensor) -> float:
    """The eps that best reproduces the module's output ``y`` for ``x`` when gamma is one and beta zero."""

    def error(eps: float) -> float:
        return relative_error(y, normalise(x.double(), replace(facts, eps=eps)))

    return min(choices, key=error)


def find_rounding(facts: NormFacts, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor) -> Rounding:
    """Where a module that maps low-precision ``x`` to ``y`` rounds: once at the end, before gamma multiplies, or elsewhere."""
    core = normalise(x.float(), facts)
    once = affine(core, facts, weight.float(), bias.float()).to(x.dtype)
    early = affine(core.to(x.dtype), facts, weight, bias)
    same = [float((y.to(x.dtype) == expected).double().mean()) >= _SAME_BITS for expected in (once, early)]
    return "float32" if same[0] else "before-weight" if same[1] else "unknown"
