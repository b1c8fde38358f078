"""The twelve activations of te.LayerNormMLP, by TE's names.

Formulas and constants are those of TE's kernels (``common/util/math.h``, ``common/util/vectorized_pointwise.h``): ``gelu`` and
``geglu`` are the tanh approximation, never erf; a gated activation applies to the *first* half and multiplies by the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from te_convert.reference.module import compute_dtype
from te_convert.reference.unsupported import require


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "qgelu": _qgelu,
    "relu": F.relu,
    "srelu": _srelu,
    "silu": F.silu,
}

_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "geglu": _gelu,
    "qgeglu": _qgelu,
    "reglu": F.relu,
    "sreglu": _srelu,
    "swiglu": F.silu,
    "glu": torch.sigmoid,
}

CLAMPED_SWIGLU_DEFAULTS: dict[str, float] = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}
"""``activation_params`` of ``clamped_swiglu``, the only activation that takes any."""

ACTIVATION_NAMES: tuple[str, ...] = (*_PLAIN, *_GATES, "clamped_swiglu")


def is_gated(name: str) -> bool:
    """Whether an activation halves its input: ``[..., 2 * n]`` → ``[..., n]``.

    Raises:
        NotSupportedError: not an activation of te.LayerNormMLP.
    """
    require(name in ACTIVATION_NAMES, f"activation {name!r} is none of {', '.join(ACTIVATION_NAMES)}")
    return name not in _PLAIN


def check_activation(name: str, params: Mapping[str, float] | None = None) -> None:
    """Refuse unknown names and parameters.

    Raises:
        NotSupportedError: no such activation, or parameters that it does not take.
    """
    is_gated(name)
    allowed = CLAMPED_SWIGLU_DEFAULTS if name == "clamped_swiglu" else {}
    unknown = sorted(set(params or {}) - set(allowed))
    require(not unknown, f"activation {name!r} takes no activation_params {', '.join(unknown)}")


def activate(name: str, x: Tensor, params: Mapping[str, float] | None = None) -> Tensor:
    """An activation by TE's name, computed in float32 and rounded once to the input's dtype.

    Args:
        name: one of :data:`ACTIVATION_NAMES`.
        x: [..., n], or [..., 2 * n] for a gated one: first half activated, second half the multiplier.
        params: ``limit``, ``alpha`` and ``glu_linear_offset`` of ``clamped_swiglu``.

    Returns:
        [..., n] in the dtype of ``x``.

    Raises:
        NotSupportedError: see :func:`check_activation`.
    """
    check_activation(name, params)
    wide = x.to(compute_dtype(x.dtype))
    if name in _PLAIN:
        return _PLAIN[name](wide).to(x.dtype)
    gate, linear = wide.chunk(2, dim=-1)
    if name == "clamped_swiglu":
        return _clamped_swiglu(gate, linear, {**CLAMPED_SWIGLU_DEFAULTS, **(params or {})}).to(x.dtype)
    return (_GATES[name](gate) * linear).to(x.dtype)


def _clamped_swiglu(gate: Tensor, linear: Tensor, params: Mapping[str, float]) -> Tensor:
    """``g · sigmoid(alpha · g) · (l + offset)`` with ``g`` clamped from above and ``l`` on both sides."""
    limit = params["limit"]
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(params["alpha"] * gate) * (linear.clamp(-limit, limit) + params["glu_linear_offset"])
