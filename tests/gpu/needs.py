"""What the tests of this folder need; without it they are skipped, and counted."""

from __future__ import annotations

import importlib.util

import pytest
import torch

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
needs_gpu_and_te = pytest.mark.skipif(
    not (torch.cuda.is_available() and HAS_TE), reason="needs a CUDA GPU and Transformer Engine: benchmarks/gpu.sh runs these there"
)
