"""What planning costs as a model gets deeper, and what importing te_convert costs: ratios of one run.

    python benchmarks/planning.py

The model is Llama-3-8B-shaped and on meta.  Recording runs the model (with fake tensors), so it grows with the depth; what follows
(probes, rules, plan) looks at each distinct kind of module once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import te_convert
from te_convert import pipeline

DEPTHS = (2, 8, 32)
_IMPORTS = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import te_convert
te_convert.convert
print((time.perf_counter() - start) / (middle - start))
"""


def model(layers: int) -> Any:
    """A Llama on meta, in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def times(layers: int) -> tuple[float, float]:
    """(seconds to record, seconds for everything after it)."""
    recording = 0.0
    original: Any = pipeline.capture

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal recording
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            recording += time.perf_counter() - start

    pipeline.capture = timed
    try:
        llama, ids = model(layers), torch.zeros(1, 8, dtype=torch.long, device="meta")
        start = time.perf_counter()
        te_convert.analyze(llama, {"input_ids": ids})
        return recording, time.perf_counter() - start - recording
    finally:
        pipeline.capture = original


def main() -> None:
    times(DEPTHS[0])  # imports and caches
    found = {layers: times(layers) for layers in DEPTHS}
    first = found[DEPTHS[0]]
    for layers, (recording, rest) in found.items():
        print(
            f"{layers:3} layers: recording {recording:.2f} s ({recording / first[0]:.1f} x that of {DEPTHS[0]}), "
            f"probing and planning {rest:.2f} s ({rest / first[1]:.1f} x), {rest / recording:.0%} of the recording"
        )
    ratios = sorted(
        float(subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True).stdout) for _ in range(5)
    )
    print(f"import torch and te_convert: {ratios[2]:.2f} x import torch (median of five, {ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
