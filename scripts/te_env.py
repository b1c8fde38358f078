"""Find or build real Transformer Engine in an environment of its own, then run tests/te_contract there.

`python scripts/te_env.py` needs no GPU, but a CUDA 13 toolkit (nvcc): TE's torch extension is compiled, once, which takes 10 to 15
minutes on two cores.  pip keeps the compiled wheel, so that another checkout on the same machine takes a minute or two.  An
environment that is up to date is used as it is.  Arguments after `--` go to pytest.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
TE = "2.20.2"
CORE = "transformer-engine-cu13"
EXTENSION = f"transformer-engine-torch=={TE}"
CUDA_MAJOR = "13"

RUNS_ON = ("numpy", "pydantic", "packaging", "einops", "onnx", "onnxscript")
BUILDS_WITH = ("wheel", "setuptools", "pybind11", "ninja", "cmake")
TESTS_WITH = ("transformers", "pytest", "pytest-timeout", "pytest-randomly")
PROBE = "import torch, transformer_engine, transformer_engine.pytorch as te; te.Linear; print(transformer_engine.__version__)"
HEARTBEAT_S = 60


class FailedError(Exception):
    """A step that did not work; the message says what to do."""


def say(text: str) -> None:
    print(f"te-env: {text}", flush=True)


def run(command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> bool:
    """A command whose output goes to the log, with a sign of life every minute; whether it succeeded."""
    started = time.monotonic()
    with log.open("a", encoding="utf-8") as out:
        print("$", *command, file=out, flush=True)
        process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=subprocess.STDOUT, env=env)
        while True:
            try:
                return process.wait(HEARTBEAT_S) == 0
            except subprocess.TimeoutExpired:
                say(f"     still at it after {(time.monotonic() - started) / 60:.0f} min")


class Environment:
    """A virtual environment, and the steps that put TE into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.log = folder / "te-env.log"
        self.stamp = folder / ".te-env"

    def wanted(self) -> str:
        """What an up-to-date environment was made from."""
        sources = (CONSTRAINTS, ROOT / "pyproject.toml", Path(__file__))
        return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()

    def is_ready(self) -> bool:
        return self.stamp.is_file() and self.stamp.read_text(encoding="utf-8") == self.wanted() and self.imports_te() is None

    def imports_te(self) -> str | None:
        """None when TE imports, else what Python said last."""
        done = subprocess.run([self.python, "-c", PROBE], capture_output=True, text=True, check=False)
        lines = (done.stderr or done.stdout).strip().splitlines()
        return None if done.returncode == 0 else lines[-1] if lines else f"exit status {done.returncode}"

    def pip(self, what: str, *arguments: str | Path, env: Mapping[str, str] | None = None) -> None:
        command = [self.python, "-m", "pip", "install", "--disable-pip-version-check", "-c", CONSTRAINTS, *arguments]
        if not run(command, self.log, env):
            tail = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()][-5:]
            raise FailedError("\n".join([f"{what} could not be installed; the end of {self.log}:", *tail]))

    def build(self) -> None:
        """Every step; those that pip finds done take seconds."""
        toolkit = find_toolkit()
        say(f"1/6 environment {self.folder}")
        if not self.python.exists() and subprocess.run([sys.executable, "-m", "venv", self.folder], check=False).returncode:
            raise FailedError(f"{sys.executable} cannot create environments; on Debian and Ubuntu install python3-venv")
        say("2/6 torch (large; the first time takes minutes)")
        self.pip("torch", "torch")
        say(f"3/6 Transformer Engine {TE}: Python and core library")
        self.pip("Transformer Engine", "--no-deps", f"transformer-engine=={TE}", f"{CORE}=={TE}")
        self.pip("what it needs", *RUNS_ON, *BUILDS_WITH)
        say("4/6 Transformer Engine: torch extension (10 to 15 minutes on two cores; seconds when pip has it from before)")
        env = self.compiler_environment(toolkit)
        self.pip("the torch extension", "--no-build-isolation", "--no-deps", EXTENSION, env=env)
        say("5/6 te-convert and the tests' tools")
        self.pip("te-convert", "-e", ROOT, *TESTS_WITH)
        say("6/6 import")
        problem = self.imports_te()
        if problem is not None and "undefined symbol" in problem:
            say("     pip's extension was compiled for another torch: compiling it again")
            self.pip(
                "the torch extension",
                "--no-build-isolation",
                "--no-deps",
                "--no-cache-dir",
                "--force-reinstall",
                EXTENSION,
                env=env,
            )
            problem = self.imports_te()
        if problem is not None:
            raise FailedError(f"Transformer Engine was installed and does not import: {problem}")
        self.stamp.write_text(self.wanted(), encoding="utf-8")

    def compiler_environment(self, toolkit: Path) -> dict[str, str]:
        """Variables that let the extension find CUDA's headers and libraries among torch's own packages."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = Path(subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
        nvidia = packages / "nvidia"
        cuda = nvidia / f"cu{CUDA_MAJOR}"
        if not cuda.is_dir():
            raise FailedError(f"torch came without CUDA {CUDA_MAJOR} (no {cuda}); Transformer Engine cannot be built against it")
        return {
            **os.environ,
            "PATH": os.pathsep.join((str(self.folder / "bin"), str(toolkit / "bin"), os.environ.get("PATH", ""))),
            "CUDA_HOME": str(toolkit),
            "CPATH": os.pathsep.join(str(path / "include") for path in (cuda, nvidia / "nccl", nvidia / "cudnn")),
            "LIBRARY_PATH": str(cuda / "lib"),
            "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
            "NVTE_FRAMEWORK": "pytorch",
            "MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count() or 1)),
        }


def find_toolkit() -> Path:
    """The CUDA toolkit: $CUDA_HOME, the folder of nvcc on the path, or the usual place."""
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), str(Path(nvcc).resolve().parent.parent) if nvcc else None, "/usr/local/cuda"]
    for place in filter(None, places):
        # A wrapper of nvcc on the path may stand beside no headers at all.
        if all((Path(place) / part).is_file() for part in ("bin/nvcc", "include/crt/host_config.h")):
            return Path(place)
    raise FailedError(
        f"no CUDA toolkit was found: Transformer Engine's extension is compiled with nvcc. Install CUDA {CUDA_MAJOR} "
        "and set CUDA_HOME to its folder (no GPU is needed)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--venv", type=Path, default=ROOT / ".venv-te", help="the environment (default: .venv-te in the repository)"
    )
    parser.add_argument("--no-tests", action="store_true", help="only make the environment")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest")
    options = parser.parse_args()
    environment = Environment(options.venv.absolute())
    try:
        if environment.is_ready():
            say(f"{environment.folder} has Transformer Engine {TE}")
        else:
            environment.build()
    except FailedError as error:
        print(f"te-env: {error}", file=sys.stderr)
        return 1
    if options.no_tests:
        return 0
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [environment.python, "-m", "pytest", "tests/te_contract", *options.pytest]
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
