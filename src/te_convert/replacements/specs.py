"""Constructor facts of each replacement, without tensors: what a rule decides and a plan stores."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from te_convert.errors import LoadError


@dataclass(frozen=True)
class LinearSpec:
    """``te.Linear``: ``y = x @ weight.T + bias`` with ``weight`` of shape [out_features, in_features]."""

    name: ClassVar[str] = "te.Linear"
    in_features: int
    out_features: int
    bias: bool
    dtype: str


@dataclass(frozen=True)
class LayerNormSpec:
    """``te.LayerNorm`` over the last dimension; computed in float32 and rounded once."""

    name: ClassVar[str] = "te.LayerNorm"
    normalized_shape: int
    eps: float
    zero_centered_gamma: bool
    dtype: str


@dataclass(frozen=True)
class RMSNormSpec:
    """``te.RMSNorm`` over the last dimension; ``weight`` or ``1 + weight`` with ``zero_centered_gamma``."""

    name: ClassVar[str] = "te.RMSNorm"
    normalized_shape: int
    eps: float
    zero_centered_gamma: bool
    dtype: str


Spec = LinearSpec | LayerNormSpec | RMSNormSpec
SPECS: dict[str, type[Spec]] = {spec.name: spec for spec in (LinearSpec, LayerNormSpec, RMSNormSpec)}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` → ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` → ``torch.bfloat16``.

    Raises:
        LoadError: not the name of a torch dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(f"unknown dtype {name!r}", "the plan was written by another version or edited")
    return dtype


def spec_to_dict(spec: Spec) -> dict[str, Any]:
    """The spec as plain JSON values, with its TE name under ``"module"``."""
    return {"module": spec.name, **asdict(spec)}


def spec_from_dict(data: dict[str, Any]) -> Spec:
    """The inverse of :func:`spec_to_dict`.

    Raises:
        LoadError: an unknown module name or fields that do not fit.
    """
    fields = dict(data)
    name = fields.pop("module", None)
    if name not in SPECS:
        raise LoadError(f"the plan names an unknown replacement {name!r}", "use the te_convert version that wrote it")
    try:
        return SPECS[name](**fields)
    except TypeError as error:
        raise LoadError(f"the plan's {name} has wrong fields: {error}", "use the te_convert version that wrote it") from None
