"""Time of single kernels on a GPU by roofline, in microseconds.

A kernel takes as long as its arithmetic or its memory traffic, whichever is longer, and :data:`LAUNCH_US` more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from te_convert.estimate.gpus import FRACTIONS, Gpu

LAUNCH_US = 2.0
"""Start-up time of a kernel on the GPU (torchao ``roofline_utils.py``, KERNEL_LAUNCH_OVERHEAD_SEC, measured on an H100)."""

TILE = (128, 256)
"""Rows and columns of the output that one multiprocessor computes at a time, the usual tile of large products (NVIDIA's guide
"Matrix Multiplication Background")."""

_SHORTEST_K = 1024
"""A product with few tiles is split along K, but into parts no shorter than this: cuBLAS' usual split-K."""


class Product(NamedTuple):
    """``y[rows, outs] = x[rows, ins] @ w[outs, ins].T``."""

    rows: int
    ins: int
    outs: int

    @property
    def flops(self) -> int:
        """Operations, two for each multiply-add."""
        return 2 * self.rows * self.ins * self.outs

    @property
    def passes(self) -> tuple[Product, Product, Product]:
        """Forward, gradient of the input, gradient of the weight; each as the product that it is."""
        return self, Product(self.rows, self.outs, self.ins), Product(self.outs, self.rows, self.ins)


@dataclass(frozen=True)
class Format:
    """How a recipe multiplies and what it costs to get there.

    Attributes:
        gemm: key of ``Fractions.gemm``.
        peak: key of ``Gpu.tflops``.
        element_bytes: of an operand in this format, with its share of the scales.
        reads: how often quantising reads the tensor: twice where the scale has to be found first (amax).
        speed: fraction of the bandwidth of a plain kernel that the quantising kernel reaches.
        fuses: the kernels of norms and activations write this format themselves.
        one_scale: one scale per tensor, so that training on Hopper and Ada needs a transposed copy of each operand; formats with
            scales along a dimension always need a second copy with scales along the other.
    """

    gemm: str
    peak: str
    element_bytes: float
    reads: int
    speed: float
    fuses: bool
    one_scale: bool


FORMATS: dict[str, Format] = {
    # element_bytes: FP8 1, MXFP8 a scale byte for 32, NVFP4 half a byte and a scale byte for 16, blocks a float32 for 128.
    # speed: set on the difference between "autocast" and "pre-quantised" of TE's gemm_profiling page; 1 means not fitted.
    "fp8-delayed": Format("fp8", "fp8", 1.0, 1, 1.0, True, True),
    "fp8-current": Format("fp8", "fp8", 1.0, 2, 1.0, False, True),
    "fp8-block": Format("fp8", "fp8", 1.03, 1, 0.38, False, False),
    "mxfp8": Format("mxfp8", "fp8", 1.03, 1, 0.82, True, False),
    "nvfp4": Format("nvfp4", "fp4", 0.56, 2, 0.70, False, False),
}

_FLASH_TORCH = {"ampere": 0.60, "ada": 0.60, "hopper": 0.35, "blackwell": 0.30, "blackwell-desktop": 0.60}
_FLASH_TE = {"ampere": 0.60, "ada": 0.60, "hopper": 0.55, "blackwell": 0.50, "blackwell-desktop": 0.60}
"""Fraction of the bf16 peak of torch's flash attention and of the one TE takes (cuDNN's).  Hopper: FlashAttention-3's paper
(35 % for FlashAttention-2, cuDNN about 55 to 60 %); Ampere: FlashAttention-2's paper; the others by analogy."""


def gemm_us(gpu: Gpu, product: Product, recipe: str | None = None) -> float:
    """Time of one matrix product, in bfloat16 or with both operands already in a recipe's format.

    Formula: max(2·M·N·K / (peak · fraction · filled), bytes / bandwidth) + launch, where ``filled`` is the share of
    multiprocessors that work on average over the waves of tiles.
    """
    form = FORMATS[recipe] if recipe is not None else None
    fractions = FRACTIONS[gpu.generation]
    peak = gpu.tflops[form.peak if form else "bf16"]
    fraction = fractions.gemm.get(form.gemm if form else "bf16", fractions.gemm.get("fp8", 0.7))
    element = form.element_bytes if form else 2.0
    rows, ins, outs = product
    compute = product.flops / (peak * fraction * _filled(gpu, product)) / 1e6
    return max(compute, memory_us(gpu, element * (rows * ins + outs * ins) + 2 * rows * outs, 0)) + LAUNCH_US


def _filled(gpu: Gpu, product: Product) -> float:
    tiles = math.ceil(product.rows / TILE[0]) * math.ceil(product.outs / TILE[1])
    if tiles < gpu.multiprocessors:
        tiles *= max(1, min(gpu.multiprocessors // tiles, product.ins // _SHORTEST_K))
    return tiles / (math.ceil(tiles / gpu.multiprocessors) * gpu.multiprocessors)


def memory_us(gpu: Gpu, moved_bytes: float, kernels: float = 1) -> float:
    """Time of ``kernels`` element-wise kernels that move so many bytes together."""
    return moved_bytes / (gpu.bandwidth_tb_s * FRACTIONS[gpu.generation].memory) / 1e6 + kernels * LAUNCH_US


def quantise_us(gpu: Gpu, elements: float, recipe: str, training: bool, fused: bool = False) -> float:
    """Time to bring a bfloat16 tensor into a recipe's format, with the second copy that training needs.

    Args:
        gpu: where.
        elements: of the tensor.
        recipe: a key of :data:`FORMATS`.
        training: the backward will need it along its other dimension too.
        fused: the kernel before would write it to memory in bfloat16 otherwise; where the format allows, it writes this one
            instead, so the read here and the write there are saved.
    """
    form = FORMATS[recipe]
    copies = 2 if training and (not form.one_scale or FRACTIONS[gpu.generation].transposes) else 1
    saved = 4.0 if fused and form.fuses else 0.0
    moved = elements * (2.0 * form.reads + copies * form.element_bytes) / form.speed - elements * saved
    return memory_us(gpu, moved, 0 if saved else form.reads)


def attention_us(gpu: Gpu, flops: float, te: bool, training: bool) -> float:
    """Time of fused attention with so many operations in its forward; the backward has 2.5 times as many (it recomputes)."""
    fraction = (_FLASH_TE if te else _FLASH_TORCH)[gpu.generation]
    return flops * (3.5 if training else 1.0) / (gpu.tflops["bf16"] * fraction) / 1e6 + LAUNCH_US * (3 if training else 1)
