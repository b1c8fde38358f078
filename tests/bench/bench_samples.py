"""Small models to measure, and a measurement with round figures."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from te_convert.bench.model import BenchResult, Row


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def inputs() -> Any:
    return (torch.randn(4, 16, generator=torch.Generator().manual_seed(0)),)


def result(**changes: Any) -> BenchResult:
    rows = (
        Row("original", None, (10.0, 11.0, 12.0, 13.0), 1000.0, 3 << 20, float("inf"), 0.0, None, 1.0),
        Row("original, torch.compile", reason="InvalidCxxCompiler: no compiler"),
        Row("converted", None, (5.0, 5.5, 6.0, 6.5), 2000.0, 2 << 20, 131.26, 1.5e-7, None, 2.0),
        Row("converted, mxfp8", "mxfp8", reason="needs a GPU"),
        Row("converted, nvfp4", "nvfp4", reason="needs a GPU"),
    )
    environment = {"platform": "Linux x86_64", "gpus": [], "cpu": "a CPU", "cpus": 2, "threads": 1, "torch": "2.14.1"}
    fields: dict[str, Any] = {
        "target": "net.py",
        "model_class": "Net",
        "work": "training step",
        "inputs": {"input_ids": "int64[2, 128]"},
        "items": ("tokens", 256),
        "dtype": "float32",
        "device": "cpu",
        "backend": "reference",
        "backend_reason": "no CUDA device is available",
        "converted_sites": 3,
        "rounds": 4,
        "warmup": 2,
        "environment": environment,
        "rows": rows,
        "notes": ("a note",),
    }
    return BenchResult(**{**fields, **changes})
