"""What this machine has: torch, CUDA, GPUs, Transformer Engine.  Nothing here raises, and nothing imports TE in this process."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata

import torch

_PROBE = "import torch, json, transformer_engine.pytorch as te; print(json.dumps({'linear': hasattr(te, 'Linear')}))"
_TIMEOUT_S = 180.0  # a cold import of torch and TE takes 13 s; leave room for a slow disk


@dataclass(frozen=True)
class TransformerEngineProbe:
    """Whether TE imports, found out in a subprocess because a broken install can take the process down.

    Attributes:
        installed: the package can be found.
        importable: ``import torch; import transformer_engine.pytorch`` worked.
        error: last line of what it said when it did not.
        version: version of the ``transformer-engine`` distribution, or None.
    """

    installed: bool
    importable: bool
    error: str
    version: str | None


def distribution_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@functools.lru_cache(maxsize=1)
def probe_transformer_engine() -> TransformerEngineProbe:
    """Import TE in a subprocess, after torch, and report what happened; cached for the process."""
    version = distribution_version("transformer-engine") or distribution_version("transformer_engine")
    try:
        found = importlib.util.find_spec("transformer_engine") is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        return TransformerEngineProbe(False, False, "the package transformer_engine is not installed", version)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=dict(os.environ),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return TransformerEngineProbe(True, False, f"{type(error).__name__}: {error}", version)
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    if done.returncode != 0:
        return TransformerEngineProbe(True, False, lines[-1] if lines else f"exit status {done.returncode}", version)
    if '"linear": true' not in done.stdout:
        return TransformerEngineProbe(True, False, "it imports, but transformer_engine.pytorch has no Linear", version)
    return TransformerEngineProbe(True, True, "", version)


@functools.lru_cache(maxsize=1)
def describe_environment() -> dict[str, object]:
    """Versions and devices for reports, as plain JSON values."""
    gpus = []
    with suppress(Exception):  # a driver that fails half-way; doctor's GPU check says how
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            major, minor = torch.cuda.get_device_capability(index)
            gpus.append({"name": torch.cuda.get_device_name(index), "compute_capability": f"{major}.{minor}"})
    facts: dict[str, object] = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cuda_available": torch.cuda.is_available(),
        "gpus": gpus,
        "transformer_engine": distribution_version("transformer-engine"),
        "transformers": distribution_version("transformers"),
        "te_convert": distribution_version("te-convert") or "source",
    }
    json.dumps(facts)
    return facts
