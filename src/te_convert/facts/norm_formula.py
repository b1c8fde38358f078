"""The formula of a norm over the last dimension, and the facts that fix it.

With ``c = x - mean(x)`` (LayerNorm) or ``c = x`` (RMSNorm)::

    y = c / sqrt(mean(c ** 2) + eps) * gamma + beta        gamma = weight, or 1 + weight when zero_centered_gamma
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["LayerNorm", "RMSNorm"]
Rounding = Literal["float32", "before-weight", "unknown"]


@dataclass(frozen=True)
class NormFacts:
    """A norm over the last dimension of inputs ``[..., width]`` of any rank, the same in eval and in training mode.

    Attributes:
        kind: "LayerNorm" (subtracts the mean) or "RMSNorm" (does not).
        width: size of the last dimension.
        eps: added to the mean square, for the dtype in which the module runs.
        zero_centered_gamma: gamma is ``1 + weight``.
        weight: name of the parameter ``[width]`` that multiplies, or None.
        bias: name of the parameter ``[width]`` that is added, or None.
        rounding: in bfloat16 or float16, "float32" (computed in float32 and rounded once, as TE does), "before-weight" (rounded
            before gamma multiplies, as Llama does) or "unknown".
        keeps_dtype: a bfloat16 or float16 module returns its input's dtype.
    """

    kind: Kind
    width: int
    eps: float
    zero_centered_gamma: bool
    weight: str | None
    bias: str | None
    rounding: Rounding
    keeps_dtype: bool


def named(facts: NormFacts, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """Values under the names of the parameters that the norm has."""
    return {name: value for name, value in ((facts.weight, weight), (facts.bias, bias)) if name is not None}


def centre(x: Tensor, kind: Kind) -> Tensor:
    """``c`` of the formula: the input itself, less its mean for a LayerNorm."""
    return x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x


def normalise(x: Tensor, facts: NormFacts) -> Tensor:
    """The formula without gamma and beta, in the dtype of ``x``."""
    centred = centre(x, facts.kind)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + facts.eps)


def affine(core: Tensor, facts: NormFacts, weight: Tensor, bias: Tensor) -> Tensor:
    """The rest of the formula, in the dtype of ``core``."""
    scaled = core * (weight + float(facts.zero_centered_gamma)) if facts.weight is not None else core
    return scaled + bias if facts.bias is not None else scaled
