"""doctor: facts about this machine with a verdict, the consequence and the fix for each."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from te_convert.runtime.probe import describe_environment, probe_transformer_engine

_MIN_CAPABILITY_FP8 = (8, 9)  # TE 2.20 quantization.py: FP8 needs Ada or Hopper


@dataclass(frozen=True)
class Check:
    """One fact. ``ok`` is True, False, or None for a fact that decides nothing."""

    name: str
    ok: bool | None
    fact: str
    consequence: str = ""
    fix: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def run_checks() -> list[Check]:
    """Every check, in reading order; never raises."""
    environment = describe_environment()
    return [
        Check("python", None, f"{environment['python']} ({sys.executable})"),
        Check("torch", None, f"{torch.__version__}"),
        _check_cuda_build(),
        _check_gpu(),
        _check_te(),
    ]


def te_would_run(checks: list[Check]) -> bool:
    """True when no check failed that TE needs."""
    return all(check.ok is not False for check in checks if check.name in ("torch CUDA build", "GPU", "Transformer Engine"))


def _check_cuda_build() -> Check:
    if torch.version.cuda is None:
        return Check(
            "torch CUDA build",
            False,
            "this torch was built without CUDA",
            "Transformer Engine cannot run; conversion and verification work on the twins",
            "install a CUDA build of torch",
        )
    return Check("torch CUDA build", True, f"CUDA {torch.version.cuda}")


def _check_gpu() -> Check:
    if not torch.cuda.is_available():
        return Check(
            "GPU",
            False,
            "no CUDA device is available",
            "Transformer Engine's kernels cannot run; conversion and verification work on the twins",
            "run on a machine with an NVIDIA GPU and driver; the emitted directory is the same",
        )
    try:
        capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    except Exception as error:  # RuntimeError, AssertionError, ...: whatever the driver makes torch say
        return Check(
            "GPU",
            False,
            f"CUDA is available but the device cannot be queried: {type(error).__name__}: {error}",
            "Transformer Engine's kernels cannot run; conversion and verification work on the twins",
            "check the driver with nvidia-smi",
        )
    fact = f"{name} (compute capability {capability[0]}.{capability[1]})"
    if capability < _MIN_CAPABILITY_FP8:
        return Check("GPU", True, fact, "FP8 recipes need compute capability 8.9; bf16 works", "use recipe=None or 'bf16'")
    return Check("GPU", True, fact)


def _check_te() -> Check:
    probe = probe_transformer_engine()
    if probe.importable:
        return Check("Transformer Engine", True, f"version {probe.version or 'unknown'} imports")
    consequence = "the twins are used instead, with the same checkpoints"
    if not probe.installed:
        return Check("Transformer Engine", False, probe.error, consequence, "pip install 'te-convert[te]'")
    return Check(
        "Transformer Engine",
        False,
        f"version {probe.version or 'unknown'} is installed but does not import: {probe.error}",
        consequence,
        "reinstall it against this torch: pip install --no-build-isolation --force-reinstall transformer-engine[pytorch]",
    )
