"""What the operating system says: glibc, NVIDIA's driver, CUDA's compiler, the C++ compiler.  Nothing here raises."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 20.0  # nvidia-smi waits for a driver that is starting
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_USUAL_TOOLKIT = Path("/usr/local/cuda")


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver: its version as ``(580, 65, 6)`` or None, and what ``nvidia-smi`` said instead of an answer."""

    version: tuple[int, ...] | None
    error: str = ""


def find_glibc() -> tuple[int, ...] | None:
    """Version of glibc, None on systems without it (musl, macOS, Windows)."""
    try:
        name, version = platform.libc_ver()
    except Exception:  # an interpreter that cannot be read
        return None
    return parse_version(version) if name == "glibc" else None


def find_driver() -> Driver:
    """From ``nvidia-smi``, else from the kernel module, which also tells a container without the program."""
    said, error = run_tool(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    version = parse_version(said)
    if version is None or error:
        try:
            version = parse_version(_DRIVER_FILE.read_text(encoding="utf-8", errors="replace"), r"Module\D*?([\d.]+)")
        except (OSError, ValueError):
            version = None
    return Driver(version, error)


def find_nvcc() -> str:
    """Version and place of CUDA's compiler, or ""."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [Path(home) / "bin" / "nvcc"] if home else []
    on_path = shutil.which("nvcc")
    places += [Path(on_path)] if on_path else []
    for place in (*places, _USUAL_TOOLKIT / "bin" / "nvcc"):
        said, error = run_tool([str(place), "--version"])
        found = re.search(r"release ([\d.]+)", said)
        if found and not error:
            return f"{found.group(1)} ({place})"
    return ""


def find_compiler() -> str:
    """First line that the C++ compiler says of itself, or ""."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++")):
        said, error = run_tool([name, "--version"])
        if said and not error:
            return said.splitlines()[0]
    return ""


def parse_version(text: str, pattern: str = r"(\d+(?:\.\d+)+)") -> tuple[int, ...] | None:
    """The first version number in a text."""
    found = re.search(pattern, text)
    parts = [part for part in found.group(1).split(".") if part] if found else []
    return tuple(map(int, parts)) or None


def run_tool(command: Sequence[str]) -> tuple[str, str]:
    """What a program printed, and why it did not do well ("" when it did, or when there is no such program)."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError:
        return "", ""
    except subprocess.TimeoutExpired:
        return "", f"{command[0]} does not answer within {_TIMEOUT_S:g} s"
    except (OSError, ValueError) as error:
        return "", f"{command[0]}: {type(error).__name__}: {error}"
    said = done.stdout.decode(errors="replace").strip()
    if done.returncode == 0:
        return said, ""
    words = (said or done.stderr.decode(errors="replace")).split()
    return said, f"{command[0]} failed with exit status {done.returncode}: {' '.join(words)[:200]}"
