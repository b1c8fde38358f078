"""Record what Transformer Engine's pure-Python reference quantizers make of a few matrices, for tests/reference/test_quantize.py.

Run it in an environment with the real package (no GPU needed), for instance the one of `make test-te`:

    .venv-te/bin/python scripts/record_quantizers.py tests/reference/quantizers.safetensors
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
TILES = {"1d": (1, 16), "2d": (16, 16)}


def matrices() -> Iterator[tuple[str, Tensor]]:
    """Names and matrices: ordinary ones in every dtype, and the edges."""
    random = torch.Generator().manual_seed(0)
    normal = torch.randn(32, 48, generator=random)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield f"normal-{dtype}".replace("torch.", ""), normal.to(dtype)
    spread = torch.randn(16, 32, generator=random) * torch.logspace(-6, 3, 32)
    yield "spread", spread
    yield "outlier", torch.where(torch.arange(512).view(16, 32) == 77, 3e4, spread)
    yield "zeros", torch.zeros(16, 32)
    yield "zero-rows", normal[:, :32] * (torch.arange(32) % 3 > 0).float()[:, None]
    yield "tiny", normal[:16, :32] * 1e-41
    yield "tiny-bfloat16", (normal[:16, :32] * 1e-39).bfloat16()
    yield "huge", normal[:16, :32] * 1e38 / 4
    yield "grid", torch.arange(-256, 256).view(16, 32) / 8.0
    infinite = normal[:16, :32].clone()
    infinite[3, 5], infinite[7, 9] = torch.inf, -torch.inf
    yield "inf", infinite


def current(x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingQuantizerRef

    found: Any = CurrentScalingQuantizerRef(dtype).quantize(x)
    return {"data": found.data.view(torch.uint8), "scale_inv": found.scale}


def nvfp4(x: Tensor, tile: tuple[int, int], rht: bool) -> dict[str, Tensor]:
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    found: Any = NVFP4QuantizerRef(Fp4Formats.E2M1, quant_tile_shape=tile, with_rht=rht).quantize(x)
    column = {
        "data_t": found.data_t,
        "scale_t": found.scale_t.view(torch.uint8),
        "amax_t": found.global_amax_col,
    }
    row = {"data": found.data, "scale": found.scale.view(torch.uint8), "amax": found.global_amax_row}
    return column if rht else {**row, **column}


def record() -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, x in matrices():
        tensors[f"{name}/input"] = x
        results = {f"current-{fmt}": current(x, dtype) for fmt, dtype in FORMATS.items()}
        if name != "inf":  # the reference gives NaN scales there
            results |= {f"nvfp4-{kind}": nvfp4(x, tile, rht=False) for kind, tile in TILES.items()}
        if name in ("normal-float32", "outlier"):
            results["nvfp4-rht"] = nvfp4(x, (1, 16), rht=True)
        for quantizer, parts in results.items():
            tensors |= {f"{name}/{quantizer}/{part}": value.contiguous() for part, value in parts.items()}
    return tensors


def main() -> None:
    out = Path(sys.argv[1])
    save_file(record(), out, metadata={name: version(name) for name in ("transformer-engine", "torch")})
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
