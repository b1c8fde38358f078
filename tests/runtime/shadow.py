"""Broken installations: a folder with a light torch, a ``transformer_engine`` that fails as the real one does, and metadata."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_convert.runtime.probe import TransformerEngineProbe, run_probe

VERSIONS = {"transformer-engine": "2.20.2", "transformer-engine-cu13": "2.20.2", "transformer-engine-torch": "2.20.2"}
TORCH = """
__version__ = {version!r}
class version: cuda = {cuda!r}
def compiled_with_cxx11_abi(): return True
class _Answer:
    def __init__(self, **values): self.__dict__.update(values)
    def __call__(self, *_): return self
class backends:
    class cudnn:
        @staticmethod
        def version(): return 91200
class cuda:
    class nccl:
        @staticmethod
        def version(): return (2, 30, 4)
    @staticmethod
    def is_available(): return {gpus!r} > 0
    @staticmethod
    def device_count(): return {gpus!r}
    @staticmethod
    def get_device_properties(index):
        return _Answer(name="a GPU", major={capability[0]}, minor={capability[1]}, total_memory=80 * 2**30)
class no_grad:
    def __enter__(self): pass
    def __exit__(self, *_): pass
bfloat16 = "bfloat16"
def ones(*_, **__): return 1.0
def isfinite(_): return _Answer(all=lambda: True)
"""
WORKS = """
class Linear:
    def __init__(self, *_, **__): pass
    def __call__(self, x): return x
"""
HALF = "Linear = None"


@dataclass(frozen=True)
class Shadow:
    """What is wrong with an installation.

    Attributes:
        outer: body of ``transformer_engine/__init__.py``, None for no package.
        inner: body of ``transformer_engine/pytorch.py``, None for no module.
        torch: body of ``torch.py``, None for none, or the facts that differ from a CUDA build without a GPU.
        versions: distributions.
    """

    outer: str | None = ""
    inner: str | None = WORKS
    torch: str | dict[str, Any] | None = None
    versions: dict[str, str] | None = None
    without_torch: bool = False

    def build(self, folder: Path) -> Path:
        """Write the folder."""
        if not self.without_torch:
            facts = {"version": "2.14.1", "cuda": "13.0", "gpus": 0, "capability": (9, 0)}
            body = self.torch if isinstance(self.torch, str) else TORCH.format(**{**facts, **(self.torch or {})})
            (folder / "torch.py").write_text(body)
        if self.outer is not None:
            (folder / "transformer_engine").mkdir()
            (folder / "transformer_engine" / "__init__.py").write_text(self.outer + "\n")
            if self.inner is not None:
                (folder / "transformer_engine" / "pytorch.py").write_text(self.inner + "\n")
        for name, version in (VERSIONS if self.versions is None else self.versions).items():
            info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        return folder

    def probe(self, folder: Path) -> TransformerEngineProbe:
        """Build it, and ask it with nothing but Python's own library behind it."""
        return run_probe(sys.executable, [str(self.build(folder)), *bare_path()])


def bare_path() -> list[str]:
    """``sys.path`` of this process without installed packages and without this repository."""
    own = [entry for entry in sys.path if "site-packages" not in entry and "dist-packages" not in entry]
    standard = str(Path(sys.base_prefix))
    return [entry for entry in own if entry.startswith(standard)]


def both(error: str, **more: Any) -> Shadow:
    """``import transformer_engine`` fails, and with it everything in it."""
    return Shadow(outer=f"raise {error}", **more)


def silent(error: str, **more: Any) -> Shadow:
    """``import transformer_engine`` swallows the ImportError of its pytorch, which raises when it is imported itself."""
    return Shadow(outer="try:\n    from . import pytorch\nexcept ImportError:\n    pass", inner=f"raise {error}", **more)


_MISMATCH = "AssertionError('Transformer Engine package version mismatch. Found transformer-engine v2.20.2 and {} v2.19.0.')"
_CPU: dict[str, Any] = {"version": "2.13.0+cpu", "cuda": None}
_SYMBOL = "ImportError('/x/wheel_lib/transformer_engine_torch.cpython-311-x86_64-linux-gnu.so: undefined symbol: {}')"
_NO_LIBRARY = "OSError('{}: cannot open shared object file: No such file or directory')"
STALE = {**VERSIONS, "transformer-engine-cu12": "2.19.0"}

ROWS: dict[str, tuple[Shadow, str]] = {
    "absent": (Shadow(outer=None, versions={}), "te.absent"),
    "meta package only": (
        both("RuntimeError('Found empty `transformer-engine` meta package installed.')", versions={"transformer-engine": "2.20.2"}),
        "te.core-missing",
    ),
    "no core library": (
        both("FileNotFoundError('Could not find shared object file for Transformer Engine core lib.')"),
        "te.core-library-missing",
    ),
    "no torch extension": (
        Shadow(
            outer="import warnings\ntry:\n    from . import pytorch\nexcept FileNotFoundError:\n"
            "    warnings.warn('Detected a PyTorch installation but could not find the shared object file', RuntimeWarning)",
            inner="raise FileNotFoundError('Could not find shared object file for Transformer Engine torch lib.')",
        ),
        "te.torch-extension-missing",
    ),
    "versions differ": (both(_MISMATCH.format("transformer-engine-cu13")), "te.version-mismatch"),
    "stale cu12 next to cu13": (both(_MISMATCH.format("transformer-engine-cu12"), versions=STALE), "te.mixed-cuda"),
    "meta package not from a wheel": (
        both("AssertionError('Could not find `transformer-engine` PyPI package.')"),
        "te.not-from-wheel",
    ),
    "torch absent": (Shadow(without_torch=True), "torch.absent"),
    "dependency absent": (
        silent("ModuleNotFoundError(\"No module named 'onnxscript'\", name='onnxscript')"),
        "te.dependency-missing",
    ),
    "no NCCL": (both(_NO_LIBRARY.format("libnccl.so.2")), "te.nccl-missing"),
    "core for another CUDA": (both(_NO_LIBRARY.format("libcublas.so.12")), "te.cuda-major-mismatch"),
    "library of torch's own CUDA": (both(_NO_LIBRARY.format("libcublas.so.13")), "te.cuda-library-missing"),
    "extension for another torch": (silent(_SYMBOL.format("_ZN3c10")), "te.abi-mismatch"),
    "extension for another core": (silent(_SYMBOL.format("nvte_")), "te.abi-mismatch"),
    "torch for the CPU, no NCCL": (both(_NO_LIBRARY.format("libnccl.so.2"), torch=_CPU), "torch.cpu-only"),
    "torch for the CPU": (silent(_SYMBOL.format("_ZTIN4c10d16symmetric_memory"), torch=_CPU), "torch.cpu-only"),
    "no cuDNN": (both("RuntimeError('cudnn shared object not found.')"), "te.cudnn-missing"),
    "part of cuDNN": (silent("ImportError('libcudnn_adv.so.9: cannot open shared object file')"), "te.cudnn-missing"),
    "no nvrtc": (both("RuntimeError('nvrtc shared object not found.')"), "te.cuda-library-missing"),
    "no curand": (both("RuntimeError('curand shared object not found.')"), "te.cuda-library-missing"),
    "old cuDNN": (
        silent("RuntimeError('Transformer Engine requires cuDNN 9.12.0 or later, but the cuDNN runtime is 9.1.0.')", torch=None),
        "te.cudnn-too-old",
    ),
    "corrupt core": (both("OSError('/x/libtransformer_engine.so: file too short')"), "te.library-corrupt"),
    "corrupt extension": (silent("ImportError('/x/transformer_engine_torch.so: file too short')"), "te.library-corrupt"),
    "two extensions": (both("RuntimeError(\"Multiple files found: [PosixPath('a.so'), PosixPath('b.so')]\")"), "te.library-twice"),
    "no driver": (Shadow(), ""),
    "old torch": (both("AssertionError('Minimum torch version 2.1 required. Found (2, 0).')"), "te.torch-too-old"),
    # not in the table of messages, and yet they happen
    "silent": (Shadow(inner=""), "te.incomplete"),
    "stop iteration": (both("StopIteration"), "te.import-fails"),
    "exits": (both("SystemExit(0)"), "te.import-fails"),
    "interrupt": (both("KeyboardInterrupt"), "te.import-fails"),
    "own kind of exception": (both("type('Odd', (BaseException,), {})('two\\nlines')"), "te.import-fails"),
    "quits": (Shadow(outer="import os; os._exit(9)"), "te.import-crashes"),
    "segmentation fault": (Shadow(outer="import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"), "te.import-crashes"),
    "torch crashes": (Shadow(torch="import os; os._exit(3)"), "torch.broken"),
    "torch lacks a library": (Shadow(torch="raise OSError('libcudart.so.13: cannot open shared object file')"), "torch.broken"),
    "torch without torch.cuda": (Shadow(torch="__version__ = '2.0'"), ""),
    "kernel fails": (
        Shadow(
            inner="class Linear:\n    def __init__(self, *_, **__): raise RuntimeError('TransformerEngine needs CUDA.')",
            torch={"gpus": 1},
        ),
        "te.kernel-fails",
    ),
    "kernel kills": (
        Shadow(inner="import os\nclass Linear:\n    def __init__(self, *_, **__): os._exit(6)", torch={"gpus": 1}),
        "te.kernel-fails",
    ),
    "GPU is full": (
        Shadow(inner="class Linear:\n    def __init__(self, *_, **__): raise MemoryError('CUDA out of memory')", torch={"gpus": 1}),
        "",
    ),
    "works": (Shadow(torch={"gpus": 1}), ""),
}
