"""Quantise-dequantise of one tensor as Transformer Engine's recipes do it, in float32 on any device.

Values are rounded to nearest, ties to even, with subnormals, and saturate at the largest value of the format, as TE's kernels
(``cvt.rn.satfinite``).  Per-tensor and NVFP4 quantisers are bit-equal to TE's pure-Python references
(``pytorch/custom_recipes/reference_current_scaling.py``, ``reference_nvfp4.py``); the others follow its CUDA sources, which are
named at each function.  Every function takes a matrix and puts its blocks along the last dimension; the other direction is the
transpose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A floating-point format: ``mantissa`` stored bits, exponent of the smallest normal number, largest value.

    ``dtype`` is torch's, which casts in the same way but turns what overflows into NaN or infinity.
    """

    name: str
    mantissa: int
    smallest_exponent: int
    largest: float
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        return self.name


E4M3 = Format("E4M3", 3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = Format("E5M2", 2, -14, 57344.0, torch.float8_e5m2)
E2M1 = Format("E2M1", 1, 0, 6.0)

FP8_BLOCK = 128
"""Float8BlockScaling: 1 × 128 for activations and gradients, 128 × 128 for weights."""
MXFP8_BLOCK = 32
NVFP4_BLOCK = 16
"""NVFP4: 1 × 16, and 16 × 16 for weights."""

_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Quantized:
    """A quantised matrix.

    Attributes:
        data: values of the format, as float32, [rows, columns].
        scale_inv: what each value is multiplied by, float32: one element, or one for each block [row blocks, column blocks].
        block: rows and columns of a block; None for one scale.
        tensor_scale: NVFP4's second scale, for the whole tensor.
    """

    data: Tensor
    scale_inv: Tensor
    block: tuple[int, int] | None = None
    tensor_scale: Tensor | None = None

    def dequantize(self) -> Tensor:
        """The values that a GEMM sees, float32 [rows, columns]."""
        scale = self.scale_inv if self.tensor_scale is None else self.scale_inv * self.tensor_scale
        if self.block is None:
            return self.data * scale
        rows, columns = self.data.shape
        return (_blocks(self.data, self.block) * scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]


def round_to(x: Tensor, fmt: Format) -> Tensor:
    """The nearest value of a format, ties to even, saturating; float32 in, float32 out, NaN stays NaN.

    One unit in the last place at x is ``2^(max(exponent(x), smallest_exponent) - mantissa)``, a power of two, so that both the
    division and the product are exact and ``torch.round`` (half to even) is the only rounding.
    """
    x = x.clamp(-fmt.largest, fmt.largest)
    if fmt.dtype is not None:
        return x.to(fmt.dtype).to(torch.float32)
    return round_exactly(x, fmt)


def round_exactly(x: Tensor, fmt: Format) -> Tensor:
    """:func:`round_to` by the formula, for a format that torch has no cast to, and to check those that it has."""
    _, exponent = torch.frexp(x)  # x = m * 2^exponent with m in [1/2, 1)
    unit = (exponent - 1).clamp(min=fmt.smallest_exponent) - fmt.mantissa
    return torch.ldexp(torch.round(torch.ldexp(x, -unit)), unit).clamp(-fmt.largest, fmt.largest)


def current_scale(amax: Tensor, fmt: Format, dtype: torch.dtype, power_of_two: bool = False) -> Tensor:
    """The scale for the largest magnitude of a tensor or of its blocks: ``largest / amax``.

    0 gives 1; where the quotient overflows, the largest number of the tensor's dtype; ``power_of_two`` rounds the scale down to
    one.  An infinite amax gives 0 and so a NaN result, as in TE's Python references (its kernels take 1 and saturate).

    Source: ``_scale_from_amax_tensor`` of ``reference_current_scaling.py``; ``common/recipe/recipe_common.cuh``.
    """
    scale = _quotient(fmt.largest, amax)
    scale = torch.where(scale == torch.inf, torch.finfo(dtype).max, scale)
    if power_of_two:
        _, exponent = torch.frexp(scale)
        scale = torch.where(amax == torch.inf, 0.0, torch.ldexp(torch.ones_like(scale), exponent - 1))
    return torch.where(amax == 0, 1.0, scale)


def _quotient(number: float, x: Tensor) -> Tensor:
    """``number / x`` rounded once; Python's operator makes it ``number * (1 / x)``."""
    return torch.full_like(x, number) / x


def quantize_tensor(x: Tensor, fmt: Format, scale: Tensor | None = None) -> Quantized:
    """One scale for the tensor: its own (current scaling), or the one given (delayed scaling), float32 with one element.

    ``data = round(x * scale)``, ``scale_inv = 1 / scale``.
    """
    if scale is None:
        scale = current_scale(largest_magnitude(x), fmt, x.dtype)
    return Quantized(round_to(x.to(torch.float32) * scale, fmt), scale.reciprocal())


def largest_magnitude(x: Tensor) -> Tensor:
    """amax of a tensor, float32 without dimensions; 0 for an empty one."""
    return x.detach().abs().amax().to(torch.float32) if x.numel() else x.new_zeros((), dtype=torch.float32)


def quantize_blocks(x: Tensor, fmt: Format, block: tuple[int, int]) -> Quantized:
    """Float8BlockScaling: one power-of-two scale for each block, ``2^floor(log2(largest / amax))``.

    A block at the edge is filled up with zeros.

    Source: ``common/transpose/quantize_transpose_{vector,square}_blockwise.cu``, scales of ``recipe_common.cuh`` with
    ``pow_2_scaling``, which is the recipe's default.
    """
    values = _blocks(x.to(torch.float32), block)
    scale = current_scale(values.abs().amax((1, 3)), fmt, x.dtype, power_of_two=True)
    return _quantized(x, values, scale, fmt, scale.reciprocal(), block)


def quantize_mxfp8(x: Tensor, fmt: Format = E4M3) -> Quantized:
    """MXFP8: 1 × 32 blocks with E8M0 scales, ``scale_inv = 2^ceil(log2(amax / largest))``, so that nothing overflows.

    The exponent is held in [-127, 127]; an amax of 0 gives the smallest.

    Source: ``common/cast/mxfp8/quantize_mxfp8.cuh``, ``float_to_e8m0`` and ``exp2f_rcp`` of ``common/util/ptx*.cuh``.
    """
    block = (1, MXFP8_BLOCK)
    values = _blocks(x.to(torch.float32), block)
    mantissa, exponent = torch.frexp(values.abs().amax((1, 3)) * (1.0 / fmt.largest))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)  # a power of two needs no rounding up
    exponent = torch.where(mantissa == 0, -127, exponent).clamp(-127, 127)
    one = torch.ones_like(mantissa)
    return _quantized(x, values, torch.ldexp(one, -exponent), fmt, torch.ldexp(one, exponent), block)


def quantize_nvfp4(x: Tensor, block: tuple[int, int] = (1, NVFP4_BLOCK)) -> Quantized:
    """NVFP4: E2M1 values, an E4M3 scale for each block, and a float32 scale for the tensor.

    With the tensor's amax A and a block's amax a: ``encode = 6 · 448 / A``, ``scale_inv = E4M3(a · (encode · (1/6)))`` and
    ``data = E2M1(x / (scale_inv · (1 / encode)))``; the value is ``data · scale_inv · A / (6 · 448)``.

    Source: ``_quantize_blockwise_reference`` and ``qgemm`` of ``reference_nvfp4.py``; ``common/cast/nvfp4/core_nvfp4.cuh``.
    """
    values = _blocks(x.to(torch.float32), block)
    amax = largest_magnitude(x)
    encode = _quotient(E4M3.largest * E2M1.largest, amax).clamp(max=_FLOAT32_MAX)
    encode = torch.where(encode == 0, 1.0, encode)
    sixth = torch.full_like(encode, E2M1.largest).reciprocal()
    decode = round_to((values.abs().amax((1, 3)) * (encode * sixth)).clamp(max=_FLOAT32_MAX), E4M3)
    scale = (decode * encode.reciprocal()).reciprocal().clamp(max=_FLOAT32_MAX)
    found = _quantized(x, values, scale, E2M1, decode, block)
    return Quantized(found.data, decode, block, amax / (E4M3.largest * E2M1.largest))


def hadamard(x: Tensor) -> Tensor:
    """TE's random Hadamard transform of each 16 consecutive elements of the last dimension, filled up with zeros.

    Its signs are a constant of TE, so it is the same in every run; it is orthogonal, so that a product over that dimension keeps
    its value, and it spreads an outlier over its block.

    Source: ``get_wgrad_sign_vector`` and ``_build_hadamard_matrix`` of ``reference_nvfp4.py``.
    """
    matrix = torch.ones(1, 1, dtype=torch.float32)
    while len(matrix) < NVFP4_BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.tensor([1.0, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=torch.float32)
    matrix = (signs[:, None] * matrix * NVFP4_BLOCK**-0.5).to(x.device)
    rows, columns = x.shape
    filled: Tensor = F.pad(x.to(torch.float32), (0, -columns % NVFP4_BLOCK))
    transformed: Tensor = filled.reshape(-1, NVFP4_BLOCK) @ matrix
    return transformed.view(rows, -1)


def _blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """[rows, columns] → [row blocks, rows of one, column blocks, columns of one], filled up with zeros."""
    rows, columns = x.shape
    height, width = block
    filled = F.pad(x, (0, -columns % width, 0, -rows % height)) if rows % height or columns % width else x
    blocks: Tensor = filled.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    return blocks


def _quantized(x: Tensor, values: Tensor, scale: Tensor, fmt: Format, scale_inv: Tensor, block: tuple[int, int]) -> Quantized:
    """Scale, round, and put the blocks together again without what filled them up."""
    rows, columns = x.shape
    data = round_to(values * scale[:, None, :, None], fmt).flatten(2).flatten(0, 1)[:rows, :columns]
    return Quantized(data, scale_inv, block)
