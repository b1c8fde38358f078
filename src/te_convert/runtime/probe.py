"""What this machine has: torch, CUDA, GPUs, Transformer Engine.  Nothing here raises, and nothing imports TE in this process."""

from __future__ import annotations

import functools
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from te_convert.runtime.causes import classify
from te_convert.runtime.packages import Packages, find_packages
from te_convert.runtime.te_child import MARK

_TIMEOUT_S = 180.0  # a cold import of torch and TE takes 13 s; leave room for a slow disk
_NOT_ITS_FAULT = ("out of memory", "busy or unavailable", "OutOfMemory")
"""The GPU is full or taken by somebody: that says nothing about Transformer Engine."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it; memory in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class TorchFacts:
    """What torch says of itself in the subprocess; None where it does not say.

    Attributes:
        error: why it does not import, "" when it does.
        gpu_error: why its GPUs cannot be asked, "" when they can.
    """

    version: str | None = None
    cuda: str | None = None
    cxx11_abi: bool | None = None
    cudnn: int | None = None
    nccl: tuple[int, ...] | None = None
    available: bool = False
    gpus: tuple[Gpu, ...] = ()
    error: str = ""
    gpu_error: str = ""


@dataclass(frozen=True)
class TransformerEngineProbe:
    """Whether TE runs, found out in a subprocess because a broken install can take the process down.

    Attributes:
        code: "" when TE imports and, where there is a GPU, computes; else why not (``causes.py``).
        error: what it said when it does not, in one line.
        found: parts of the error that the cause's fix names.
        packages: installed versions.
        torch: what torch says.
        computed: a TE module ran on the GPU.
        recipes: names of TE's recipe classes.
    """

    code: str
    error: str = ""
    found: dict[str, str] = field(default_factory=dict)
    packages: Packages = field(default_factory=Packages)
    torch: TorchFacts = field(default_factory=TorchFacts)
    computed: bool = False
    recipes: tuple[str, ...] = ()

    @property
    def importable(self) -> bool:
        """TE can be used."""
        return not self.code

    @property
    def installed(self) -> bool:
        """There is a package of that name, in whatever state."""
        return self.code != "te.absent"

    @property
    def version(self) -> str | None:
        """Version of the ``transformer-engine`` distribution."""
        return self.packages.te


def distribution_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except Exception:  # not there, or its metadata is damaged
        return None


@functools.lru_cache(maxsize=1)
def probe_transformer_engine() -> TransformerEngineProbe:
    """Import TE in a subprocess, after torch, run it where there is a GPU, and say what happened; cached for the process."""
    return run_probe(sys.executable, sys.path)


def probed() -> TransformerEngineProbe | None:
    """What :func:`probe_transformer_engine` found earlier in this process, without starting anything; else None."""
    return probe_transformer_engine() if probe_transformer_engine.cache_info().currsize else None


def run_probe(python: str, path: Sequence[str]) -> TransformerEngineProbe:
    """:func:`probe_transformer_engine` with an interpreter and its ``sys.path``."""
    packages = find_packages(path)
    steps, ending = _run_child(python, path)
    torch = _torch_facts(steps, ending)
    if torch.error:
        absent = torch.error.startswith("ModuleNotFoundError: No module named 'torch'")
        return TransformerEngineProbe("torch.absent" if absent else "torch.broken", torch.error, {}, packages, torch)
    code, error, found = _verdict(steps, ending, packages, torch)
    recipes = tuple(steps["te"]["value"]["recipes"]) if "value" in steps.get("te", {}) else ()
    computed = not code and steps.get("kernel", {}).get("value") is True
    return TransformerEngineProbe(code, error, found, packages, torch, computed, recipes)


def _run_child(python: str, path: Sequence[str]) -> tuple[dict[str, dict[str, Any]], str]:
    """The steps that the subprocess finished, and how it ended otherwise than well: "timeout", "exit status 9", ..."""
    child = Path(__file__).with_name("te_child.py").read_text(encoding="utf-8")
    ending, out = "", b""
    try:
        done = subprocess.run(
            [python, "-c", child, json.dumps(list(path))],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        out, ending = done.stdout, f"exit status {done.returncode}" if done.returncode else ""
        said = done.stderr.decode(errors="replace").strip().splitlines()
        ending += f": {said[-1].strip()}" if ending and said else ""
    except subprocess.TimeoutExpired as error:
        out, ending = error.stdout or b"", f"timeout: no answer within {_TIMEOUT_S:g} s"
    except (OSError, ValueError) as error:
        ending = f"{type(error).__name__}: {error}"
    steps: dict[str, dict[str, Any]] = {}
    for text in out.decode(errors="replace").splitlines():
        if text.startswith(MARK):
            with suppress(ValueError):
                line = json.loads(text.removeprefix(MARK))
                steps[str(line["step"])] = line
    return steps, ending


def _error_of(line: dict[str, Any]) -> str:
    """``Type: message`` in one line, or "" for a step that worked."""
    return " ".join(f"{line['error']}: {line['message']}".split()) if "error" in line else ""


def _torch_facts(steps: dict[str, dict[str, Any]], ending: str) -> TorchFacts:
    if "torch" not in steps:
        return TorchFacts(error=f"import torch did not end well: {ending or 'no answer'}")
    line = steps["torch"]
    if "error" in line:
        return TorchFacts(error=_error_of(line))
    said, seen = line["value"], steps.get("gpus", {})
    return TorchFacts(
        version=said["version"],
        cuda=said["cuda"],
        cxx11_abi=said["cxx11_abi"],
        cudnn=said["cudnn"] if isinstance(said["cudnn"], int) else None,
        nccl=tuple(said["nccl"]) if isinstance(said["nccl"], list) else None,
        available=said["available"],
        gpus=tuple(Gpu(gpu["name"], tuple(gpu["capability"]), gpu["memory"]) for gpu in seen.get("value", ())),
        gpu_error=_error_of(seen) or (f"torch's look at the GPUs: {ending}" if said["available"] and not seen else ""),
    )


def _verdict(
    steps: dict[str, dict[str, Any]], ending: str, packages: Packages, torch: TorchFacts
) -> tuple[str, str, dict[str, str]]:
    """Code, error and what the fix needs to know."""
    if torch.gpu_error and "te" not in steps:
        return "driver.broken", torch.gpu_error, {}
    if "te" not in steps:
        return _stopped("te.import-hangs", "te.import-crashes", ending)
    error = _error_of(steps["te"])
    if error:
        code, found = classify(error, packages, torch.cuda)
        return code, error, found
    if not steps["te"]["value"]["linear"]:
        return "te.incomplete", "it imports, but transformer_engine.pytorch has no Linear", {}
    if not torch.gpus:
        return "", "", {}
    if "kernel" not in steps:
        return _stopped("te.kernel-fails", "te.kernel-fails", ending)
    error = _error_of(steps["kernel"])
    if error and any(text in error for text in _NOT_ITS_FAULT):
        return "", "", {}
    if error or not steps["kernel"]["value"]:
        return "te.kernel-fails", error or "te.Linear computes NaN or infinity", {}
    return "", "", {}


def _stopped(hangs: str, crashes: str, ending: str) -> tuple[str, str, dict[str, str]]:
    return hangs if ending.startswith("timeout") else crashes, ending or "it ended without an answer", {}


def find_te() -> bool:
    """Whether there is a package ``transformer_engine``, without importing it."""
    try:
        return importlib.util.find_spec("transformer_engine") is not None
    except Exception:  # a namespace or an import hook that is broken
        return False


@functools.lru_cache(maxsize=1)
def describe_environment() -> dict[str, object]:
    """Versions and devices for reports, as plain JSON values."""
    import torch

    gpus = []
    available = False
    with suppress(Exception):  # a driver that fails half-way; doctor's GPU check says how
        available = torch.cuda.is_available()
        for index in range(torch.cuda.device_count() if available else 0):
            major, minor = torch.cuda.get_device_capability(index)
            gpus.append({"name": torch.cuda.get_device_name(index), "compute_capability": f"{major}.{minor}"})
    facts: dict[str, object] = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cuda_available": available,
        "gpus": gpus,
        "transformer_engine": distribution_version("transformer-engine"),
        "transformers": distribution_version("transformers"),
        "te_convert": distribution_version("te-convert") or "source",
    }
    json.dumps(facts)
    return facts
