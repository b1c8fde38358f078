"""Why Transformer Engine does not run: stable codes, how each shows itself, and the command that helps.

The errors are those of Transformer Engine 2.20 (``common/__init__.py``, ``pytorch/__init__.py``) and of the dynamic loader, each
reproduced with a broken installation.  ``docs/doctor.md`` lists the table; a test compares the two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from te_convert.runtime.packages import Packages

_PACKAGES = "transformer-engine transformer-engine-cu12 transformer-engine-cu13 transformer-engine-torch"
_INSTALL = "pip install --no-build-isolation 'transformer-engine[pytorch,core_cu{cuda}]=={version}'"
_REINSTALL = f"pip uninstall -y {_PACKAGES} && {_INSTALL}"
_EXTENSION = "pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall transformer-engine-torch=={version}"
_TORCH = "pip install --force-reinstall torch (PyPI's builds for Linux have CUDA)"


@dataclass(frozen=True)
class Cause:
    """One way in which Transformer Engine does not run.

    Attributes:
        code: stable; keeps its meaning from release to release.
        meaning: what is wrong.
        fix: the command or the step that helps; may have the placeholders of :func:`fill`.
        error: regular expression over ``Type: message`` of the failed import, "" for a cause that is not found by it.
    """

    code: str
    meaning: str
    fix: str
    error: str = ""

    @property
    def is_command(self) -> bool:
        """The fix can be typed as it is."""
        return self.fix.startswith("pip ") and " (" not in self.fix and ", or " not in self.fix


CAUSES: tuple[Cause, ...] = (
    Cause("te.absent", "Transformer Engine is not installed", _INSTALL, r"^ModuleNotFoundError: .*'transformer_engine'"),
    Cause(
        "te.core-missing",
        "only the empty package transformer-engine is there, without its core (transformer-engine-cu12 or -cu13)",
        _INSTALL,
        r"^RuntimeError: Found empty `transformer-engine` meta package|^AssertionError: Could not find TE core package",
    ),
    Cause(
        "te.core-library-missing",
        "the core package is there, its library libtransformer_engine.so is not",
        "pip install --no-deps --force-reinstall transformer-engine-cu{cuda}=={version}",
        r"^FileNotFoundError: .*Transformer Engine core lib",
    ),
    Cause(
        "te.torch-extension-missing",
        "the extension for PyTorch is not there; it is compiled at installation, which needs nvcc",
        _EXTENSION,
        r"^FileNotFoundError: .*Transformer Engine torch lib",
    ),
    Cause(
        "te.mixed-cuda",
        "packages for CUDA 12 and CUDA 13 are installed side by side, and the one for CUDA 12 is looked up first",
        _REINSTALL,
    ),
    Cause(
        "te.version-mismatch",
        "transformer-engine, its core and its PyTorch extension have different versions",
        _REINSTALL,
        r"^AssertionError: Transformer Engine package version mismatch",
    ),
    Cause(
        "te.not-from-wheel",
        "core or extension come from wheels and transformer-engine itself does not, or its files were removed",
        _REINSTALL,
        r"^AssertionError: Could not find `transformer.engine`",
    ),
    Cause(
        "te.torch-too-old",
        "this torch is older than Transformer Engine takes",
        "pip install --upgrade torch",
        r"^AssertionError: Minimum torch version",
    ),
    Cause(
        "torch.absent",
        "PyTorch is not installed, or not for this interpreter",
        "pip install torch",
        r"^ModuleNotFoundError: No module named 'torch'$",
    ),
    Cause("torch.broken", "PyTorch itself does not import", _TORCH),
    Cause("torch.cpu-only", "this PyTorch was built without CUDA", _TORCH),
    Cause(
        "te.dependency-missing",
        "a Python package that Transformer Engine imports is not installed",
        "pip install {name}",
        r"^ModuleNotFoundError: No module named '(?P<name>[^'.]+)",
    ),
    Cause(
        "te.nccl-missing",
        "NCCL is not where the loader looks; a CUDA build of torch brings it and has to be imported first",
        "pip install --force-reinstall nvidia-nccl-cu{cuda}",
        r"^OSError: libnccl\.so",
    ),
    Cause(
        "te.cuda-major-mismatch",
        "Transformer Engine was built for another major version of CUDA than torch",
        _REINSTALL,
        r"^\w+: (?P<name>lib(?:cu|nv)\w+)\.so\.(?P<major>\d+): cannot open shared object file",
    ),
    Cause(
        "te.cudnn-missing",
        "cuDNN is neither among Python's packages nor in the system",
        "pip install --force-reinstall nvidia-cudnn-cu{cuda}",
        r"^RuntimeError: cudnn shared object not found|^\w+: libcudnn\w*\.so[.\d]*: cannot open shared object file",
    ),
    Cause(
        "te.cudnn-too-old",
        "cuDNN is older than 9.12.0, which Transformer Engine 2.20 asks for",
        "pip install --upgrade nvidia-cudnn-cu{cuda}",
        r"^RuntimeError: Transformer Engine requires cuDNN",
    ),
    Cause(
        "te.cuda-library-missing",
        "a library of CUDA is neither among Python's packages nor in the system",
        "pip install 'cuda-toolkit[all]=={cuda}.*', or set CUDA_HOME to an installed CUDA toolkit {cuda}",
        r"^RuntimeError: \w+ shared object not found|^\w+: lib[\w+-]+\.so[.\d]*: cannot open shared object file",
    ),
    Cause(
        "te.abi-mismatch",
        "the PyTorch extension was compiled for another torch or another core: it looks for a symbol that is not there",
        _EXTENSION,
        r"undefined symbol",
    ),
    Cause(
        "te.library-corrupt",
        "a library is truncated or damaged",
        _REINSTALL,
        r"file too short|invalid ELF header|ELF load command|wrong ELF class",
    ),
    Cause(
        "te.library-twice",
        "two libraries of the same name are found, such as the rest of an older build",
        "remove the older of the two files that the error names, or " + _REINSTALL,
        r"^RuntimeError: Multiple files found",
    ),
    Cause("te.incomplete", "it imports without an error and has no modules for PyTorch", _REINSTALL),
    Cause("te.import-crashes", "its import ends the interpreter", _REINSTALL),
    Cause("te.import-hangs", "its import does not end", "find out where: python -X faulthandler -X importtime -c '{imports}'"),
    Cause("te.import-fails", "its import fails in a way that this table does not have", _REINSTALL),
    Cause("te.kernel-fails", "it imports, and te.Linear fails on this GPU", "see the error: python -c '{kernel}'"),
    Cause("os.unsupported", "Transformer Engine runs on Linux", "on Windows use WSL 2"),
    Cause("os.glibc-too-old", "Transformer Engine's wheels need glibc 2.28", "use a newer distribution or NVIDIA's container"),
    Cause(
        "driver.absent", "there is no NVIDIA driver", "install a driver: https://www.nvidia.com/drivers, version {driver} or newer"
    ),
    Cause(
        "driver.too-old",
        "the driver is older than torch's CUDA needs",
        "update it to {driver} or newer, or install a torch for an older CUDA",
    ),
    Cause("driver.broken", "the driver does not answer", "run nvidia-smi; after an update of the driver restart the machine"),
    Cause("gpu.none", "torch sees no GPU", "check CUDA_VISIBLE_DEVICES, and in a container --gpus all"),
    Cause("gpu.too-old", "Transformer Engine needs compute capability 8.0 (Ampere)", "use a newer GPU; twins run on this one"),
    Cause("recipe.unavailable", "the GPU or torch's CUDA does not have this recipe", "take a recipe that the line 'recipes' names"),
    Cause("doctor.internal", "a check itself failed, which says nothing about this machine", "please report it"),
)
_LOADING = {"te.nccl-missing", "te.cuda-major-mismatch", "te.cudnn-missing", "te.cuda-library-missing", "te.abi-mismatch"}
BY_CODE = {cause.code: cause for cause in CAUSES}
IMPORTS = "import torch, transformer_engine.pytorch"
KERNEL = (
    "import torch, transformer_engine.pytorch as te; "
    'te.Linear(32, 32, params_dtype=torch.bfloat16, device="cuda")(torch.ones(32, 32, dtype=torch.bfloat16, device="cuda"))'
)

MINIMUM_DRIVER: dict[int, int] = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA → first major version of the Linux driver: NVIDIA's table for minor version compatibility
(docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)."""
NEWEST_KNOWN = "2.20.2"
"""What a fix installs where no version is installed that it has to fit."""


def classify(error: str, packages: Packages, torch_cuda: str | None) -> tuple[str, dict[str, str]]:
    """The code for an import's ``Type: message``, and what the pattern found for the placeholders of its fix.

    Args:
        error: one line.
        packages: installed versions, which tell stale packages from others.
        torch_cuda: CUDA version of torch, as ``torch.version.cuda``; None for a build without CUDA.
    """
    code, found = "te.import-fails", {}
    for cause in CAUSES:
        match = re.search(cause.error, error) if cause.error else None
        if match is not None:
            code, found = cause.code, {key: value for key, value in match.groupdict().items() if value}
            break
    if code == "te.cuda-major-mismatch":
        code = _missing_library(found, torch_cuda)
    if code in ("te.version-mismatch", "te.abi-mismatch", "te.cuda-major-mismatch") and len(packages.cores) > 1:
        code = "te.mixed-cuda"
    if code in _LOADING and torch_cuda is None:
        code = "torch.cpu-only"  # what is missing is what a CUDA build of torch would have loaded
    return code, found


def _missing_library(found: dict[str, str], torch_cuda: str | None) -> str:
    """cuDNN and libraries of torch's own CUDA are missing; only one of another major version shows a wrong build."""
    if found["name"].startswith("libcudnn"):
        return "te.cudnn-missing"
    same = torch_cuda is not None and torch_cuda.split(".")[0] == found["major"]
    return "te.cuda-library-missing" if same else "te.cuda-major-mismatch"


def fill(text: str, packages: Packages, torch_cuda: str | None, found: dict[str, str] | None = None) -> str:
    """A fix with its placeholders filled: ``cuda`` (major version), ``version``, ``driver``, ``name``."""
    major = (torch_cuda or "13").split(".")[0]
    wanted = packages.te or next(iter(packages.cores.values()), None) or NEWEST_KNOWN
    values = {"cuda": major, "version": wanted, "imports": IMPORTS, "kernel": KERNEL}
    values["driver"] = str(MINIMUM_DRIVER.get(int(major) if major.isdigit() else 0, 580))
    values |= {"name": "transformer-engine", **(found or {})}
    return re.sub(r"\{(\w+)\}", lambda match: values[match.group(1)], text)
