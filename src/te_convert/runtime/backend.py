"""Which backend carries out a conversion: real TE modules or the twins."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

import torch

from te_convert.errors import EnvironmentLacksError, FallbackWarning
from te_convert.runtime.probe import probe_transformer_engine


@dataclass(frozen=True)
class Backend:
    """The chosen backend, "te" or "reference", and why.

    Attributes:
        missed: why "auto" did not take TE although the model is on a CUDA device, else "".
    """

    name: str
    reason: str
    missed: str = ""


def choose_backend(choice: str, device_type: str) -> Backend:
    """Resolve "auto", "te" or "reference" for a model on a device.

    "auto" takes TE when it imports, CUDA is available and the model is on a CUDA device; TE's modules run nowhere else.

    Raises:
        EnvironmentLacksError: "te" was asked for and cannot run here.
    """
    if choice == "reference":
        return Backend("reference", "asked for")
    lacking = _why_not_te(device_type)
    if not lacking:
        return Backend("te", "asked for" if choice == "te" else "Transformer Engine imports and the model is on a CUDA device")
    if choice == "te":
        raise EnvironmentLacksError(f"backend 'te' cannot run here: {lacking}", "run te-convert doctor, or use backend='auto'")
    return Backend("reference", lacking, lacking if device_type == "cuda" else "")


def multiplies_in_tf32(backend: str, device_type: str) -> bool:
    """Whether a backend's float32 products are TF32: TE asks cuBLAS for it (2.20, ``common/gemm/cublaslt_gemm.cu``).

    ``NVIDIA_TF32_OVERRIDE=0`` in the environment forbids it.
    """
    return backend == "te" and device_type == "cuda" and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"


def _why_not_te(device_type: str) -> str:
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    if device_type != "cuda":
        return f"the model is on {device_type}; Transformer Engine runs on CUDA devices only"
    probe = probe_transformer_engine()
    return "" if probe.importable else f"Transformer Engine does not run ({probe.code}): {probe.error}"


def warn_missed(backend: Backend) -> None:
    """One warning when "auto" leaves a model on a CUDA device to the twins."""
    if backend.missed:
        warnings.warn(f"the twins are used on a CUDA device: {backend.missed}", FallbackWarning, stacklevel=3)
