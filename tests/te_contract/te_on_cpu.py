"""Transformer Engine's real modules on a machine without a GPU.

TE's Python is what runs, forward and backward, with its own autograd functions, state dicts and checks.  Exchanged are its CUDA
kernels (``te_kernels.py``), the choice of an attention backend (TE's unfused one, which is torch code), and what TE sees of
``torch.cuda``: its modules get a view of torch with a GPU of compute capability 9.0 whose memory is the CPU's.  Nobody else does.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.te_contract.te_kernels import KERNELS

PACKAGE = "transformer_engine"
IMPORTED_LATE = ("attention.dot_product_attention.dot_product_attention", "attention.multi_head_attention", "transformer")
SETTINGS = {"NVTE_TORCH_COMPILE": "0", "NVTE_MASKED_SOFTMAX_FUSION": "0"}
"""TE compiles nothing, and takes its softmax of torch code; read at its import and by constructors."""

SKIPPED = "Transformer Engine is not installed: `make test-te` runs this on its real modules, on any machine"
needs_te = pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=SKIPPED)


@contextmanager
def te_on_cpu() -> Iterator[Any]:
    """``transformer_engine.pytorch`` ready for the CPU, and ``backend="te"`` accepted by te_convert; everything is put back."""
    os.environ.update(SETTINGS)  # also of no harm afterwards
    te = importlib.import_module(f"{PACKAGE}.pytorch")
    modules = [importlib.import_module(f"{PACKAGE}.pytorch.{name}") for name in IMPORTED_LATE]
    with pytest.MonkeyPatch.context() as patch:
        _exchange_kernels(patch)
        _show_a_gpu(patch)
        patch.setattr(modules[0].dpa_utils, "get_attention_backend", _unfused_attention)
        patch.setattr(importlib.import_module("te_convert.runtime.backend"), "_why_not_te", lambda device_type: "")
        yield te
    _forget_caches()


def _te_modules() -> Iterator[Any]:
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{PACKAGE}."):
            yield module


def _exchange_kernels(patch: pytest.MonkeyPatch) -> None:
    """In the extension, and wherever TE imported one of its functions by name."""
    extension = importlib.import_module("transformer_engine_torch")
    stand_ins = {id(getattr(extension, name)): stand_in for name, stand_in in KERNELS.items()}
    for module in (extension, *_te_modules()):
        for name, value in list(vars(module).items()):
            if id(value) in stand_ins:
                patch.setattr(module, name, stand_ins[id(value)])


def _unfused_attention(*_: Any, **__: Any) -> tuple[Any, ...]:
    """Which of flash, fused and unfused attention to use, and which of them could be."""
    return (False, None, False, None, True, [False, False, True])


def _show_a_gpu(patch: pytest.MonkeyPatch) -> None:
    view = _Torch()
    for module in _te_modules():
        if vars(module).get("torch") is torch:
            patch.setattr(module, "torch", view)
    patch.setattr(torch.Tensor, "is_cuda", property(_is_cuda))
    patch.setattr(torch.Tensor, "cuda", _cuda)


def _asked_by_te() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(f"{PACKAGE}.")


def _is_cuda(tensor: Tensor) -> bool:
    return True if _asked_by_te() else tensor.device.type == "cuda"


_REAL_CUDA = Tensor.cuda


def _cuda(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor if _asked_by_te() else _REAL_CUDA(tensor, *args, **kwargs)


class _Cuda:
    """``torch.cuda`` with one idle GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_capability(*_: Any) -> tuple[int, int]:
        return (9, 0)

    @staticmethod
    def get_device_properties(*_: Any) -> Any:
        return SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="none")

    @staticmethod
    def is_current_stream_capturing() -> bool:
        return False

    @staticmethod
    def synchronize(*_: Any) -> None:
        """Nothing is under way."""


class _Torch:
    """``torch`` that makes on the CPU what is asked for on a GPU, and takes the CPU's autocast for the GPU's."""

    cuda = _Cuda()

    def __init__(self) -> None:
        for name in ("empty", "zeros", "ones", "full", "arange", "tensor", "empty_like", "zeros_like", "ones_like"):
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def is_autocast_enabled(*_: Any) -> bool:
        return torch.is_autocast_enabled("cpu")

    @staticmethod
    def get_autocast_dtype(*_: Any) -> torch.dtype:
        return torch.get_autocast_dtype("cpu")

    @staticmethod
    def get_autocast_gpu_dtype() -> torch.dtype:
        return torch.get_autocast_dtype("cpu")


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if isinstance(device, int) or (device is not None and torch.device(device).type == "cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def _forget_caches() -> None:
    """What TE remembers of the machine: capability, workspaces."""
    for module in _te_modules():
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear") and hasattr(value, "cache_info"):
                value.cache_clear()
