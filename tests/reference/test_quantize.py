"""Quantisers against Transformer Engine's pure-Python references (recorded), torch's casts, and what each format promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from te_convert.reference.quantize import (
    E2M1,
    E4M3,
    E5M2,
    Format,
    Quantized,
    current_scale,
    hadamard,
    quantize_blocks,
    quantize_mxfp8,
    quantize_nvfp4,
    quantize_tensor,
    round_exactly,
    round_to,
)

RECORDED = load_file(Path(__file__).parent / "quantizers.safetensors")
"""Made by scripts/record_quantizers.py with Transformer Engine."""
NAMES = sorted({key.partition("/")[0] for key in RECORDED})
CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
FORMATS = (E4M3, E5M2, E2M1)


def unpacked(data: Tensor) -> Tensor:
    """Two E2M1 values in each byte, the first in its lower half."""
    pairs = torch.stack([CODES[data.long() % 16], CODES[data.long() // 16]], -1)
    return pairs.flatten(1)


def assert_bit_equal(a: Tensor, b: Tensor) -> None:
    """NaN equals NaN."""
    assert torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))
    assert torch.equal(a.isnan(), b.isnan())


# --- against TE ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_current_scaling_is_bit_equal_to_te(name: str, fmt: Format) -> None:
    assert fmt.dtype is not None
    key = f"{name}/current-{fmt.name.lower()}"
    found = quantize_tensor(RECORDED[f"{name}/input"], fmt)
    assert_bit_equal(found.data, RECORDED[f"{key}/data"].view(fmt.dtype).float())
    assert_bit_equal(found.scale_inv.view(1), RECORDED[f"{key}/scale_inv"])


@pytest.mark.parametrize("block", [(1, 16), (16, 16)], ids=["1d", "2d"])
@pytest.mark.parametrize("name", [name for name in NAMES if f"{name}/nvfp4-1d/data" in RECORDED])
def test_nvfp4_is_bit_equal_to_te(name: str, block: tuple[int, int]) -> None:
    key, x = f"{name}/nvfp4-{'1d' if block[0] == 1 else '2d'}", RECORDED[f"{name}/input"]
    for side, suffix in ((x, ""), (x.t(), "_t")):
        found = quantize_nvfp4(side, block)
        assert_bit_equal(found.data, unpacked(RECORDED[f"{key}/data{suffix}"]))
        scale = RECORDED[f"{key}/scale{suffix}"].view(torch.float8_e4m3fn).float()
        assert_bit_equal(found.scale_inv.repeat_interleave(block[0], 0), scale)
        assert found.tensor_scale is not None
        assert float(found.tensor_scale * 6 * 448) == pytest.approx(float(RECORDED[f"{key}/amax{suffix}"]), rel=1e-6)


@pytest.mark.parametrize("name", ["normal-float32", "outlier"])
def test_hadamard_transform_is_te_s(name: str) -> None:
    """Not bit for bit, since the sums' order is the matrix library's: a value may fall on the other side of a boundary."""
    found = quantize_nvfp4(hadamard(RECORDED[f"{name}/input"].t()))
    theirs = unpacked(RECORDED[f"{name}/nvfp4-rht/data_t"])
    assert (found.data != theirs).float().mean() < 0.01
    amax = hadamard(RECORDED[f"{name}/input"].t()).abs().max()
    torch.testing.assert_close(amax.view(1), RECORDED[f"{name}/nvfp4-rht/amax_t"])


def test_the_recording_is_small() -> None:
    assert (Path(__file__).parent / "quantizers.safetensors").stat().st_size < 100_000


# --- rounding ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_rounding_is_torch_s_cast_bit_for_bit(fmt: Format) -> None:
    """Every bfloat16, every boundary between two values of the format and its neighbours, and random float32 bit patterns."""
    assert fmt.dtype is not None
    values = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    values = values[values.isfinite()].sort().values
    middle = (values[1:] + values[:-1]) / 2
    near = [middle, torch.nextafter(middle, torch.tensor(torch.inf)), torch.nextafter(middle, torch.tensor(-torch.inf))]
    bfloat16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=random).to(torch.int32).view(torch.float32)
    x = torch.cat([values, *near, bfloat16, bits])
    x = x[~x.isnan()].clamp(-fmt.largest, fmt.largest)
    cast = x.to(fmt.dtype).float()
    assert torch.equal(round_exactly(x, fmt).view(torch.int32), cast.view(torch.int32))
    assert torch.equal(round_to(x, fmt).view(torch.int32), cast.view(torch.int32))


def test_e2m1_rounds_to_nearest_even() -> None:
    x = torch.tensor([0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 2.51, 3.5, 5.0, 5.01, 7.0, torch.inf, 0.0])
    expected = torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0, 6.0, 0.0])
    assert torch.equal(round_to(x, E2M1), expected)
    assert torch.equal(round_to(-x, E2M1), -expected)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_rounding_saturates_and_keeps_nan(fmt: Format) -> None:
    x = torch.tensor([torch.inf, -torch.inf, 1e30, fmt.largest * 1.01, torch.nan])
    top = fmt.largest
    assert torch.equal(round_to(x, fmt)[:4], torch.tensor([top, -top, top, top]))
    assert bool(round_to(x, fmt)[4].isnan())


# --- properties ----------------------------------------------------------------------------------------------------------------

QUANTIZERS: dict[str, tuple[Callable[[Tensor], Quantized], float]] = {
    "e4m3": (lambda x: quantize_tensor(x, E4M3), 2**-4),
    "e5m2": (lambda x: quantize_tensor(x, E5M2), 2**-3),
    "blocks": (lambda x: quantize_blocks(x, E4M3, (1, 128)), 2**-4),
    "square": (lambda x: quantize_blocks(x, E4M3, (128, 128)), 2**-4),
    "mxfp8": (quantize_mxfp8, 2**-4),
    "nvfp4": (quantize_nvfp4, 1 / 3),
}
"""With the largest relative error of a value in the upper part of the range: half a unit in the last place."""
quantizers = pytest.mark.parametrize("name", QUANTIZERS)
shapes = st.tuples(st.integers(1, 40), st.integers(1, 150))
exponents = st.integers(-20, 20)


def matrix(shape: tuple[int, int], seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random) * torch.randn(shape, generator=random).exp()


@quantizers
@settings(max_examples=25, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**31), power=exponents)
def test_scale_invariant_sign_symmetric_and_within_bounds(name: str, shape: tuple[int, int], seed: int, power: int) -> None:
    quantize, relative = QUANTIZERS[name]
    x = matrix(shape, seed)
    y = quantize(x).dequantize()
    assert y.shape == x.shape
    assert torch.equal(quantize(-x).dequantize(), -y)
    factor = 2.0**power
    torch.testing.assert_close(quantize(x * factor).dequantize(), y * factor, rtol=1e-6, atol=0)
    # Half a unit in the last place of the value, or of the smallest values that the block's scale leaves: amax / 2^8 of E4M3
    # (448 / 2^-6 is more than 2^14, of which two powers may be lost to a scale that is a power of two).
    floor = x.abs().max() * (1 / 12 if name == "nvfp4" else 2.0**-17 if name != "e5m2" else 2.0**-30)
    slack = 1.13 if name == "nvfp4" else 1.0001  # NVFP4's scales are rounded, too, by up to 2^-4
    assert bool(((y - x).abs() <= (x.abs() * relative).clamp(min=floor) * slack).all())


@quantizers
@settings(max_examples=20, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**31))
def test_idempotent(name: str, shape: tuple[int, int], seed: int) -> None:
    """What is on the grid stays, up to the scale's own rounding; NVFP4's rounded scale may give a coarser grid once more."""
    quantize, _ = QUANTIZERS[name]
    once = quantize(matrix(shape, seed)).dequantize()
    twice = quantize(once).dequantize()
    if name == "nvfp4":
        assert (twice - once).norm() <= 0.08 * once.norm()
    else:
        torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)


@quantizers
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_monotone(name: str, seed: int) -> None:
    """Within one block a larger number is never quantised to a smaller one."""
    quantize, _ = QUANTIZERS[name]
    x = matrix((1, 16), seed).sort().values
    y = quantize(x).dequantize()
    assert bool((y.diff() >= 0).all())


@settings(max_examples=50, deadline=None)
@given(amax=st.floats(2.0**-100, 2.0**100, width=32))
def test_scales(amax: float) -> None:
    exact = torch.tensor([amax])
    plain = current_scale(exact, E4M3, torch.float32)
    assert float(plain) == float(torch.full((1,), 448.0) / exact)
    power = current_scale(exact, E4M3, torch.float32, power_of_two=True)
    assert float(torch.frexp(power).mantissa) == 0.5
    assert float(power) <= float(plain) < 2 * float(power)
    inverse = quantize_mxfp8(exact[:, None]).scale_inv
    assert float(torch.frexp(inverse).mantissa) == 0.5
    assert amax <= 448 * float(inverse)
    assert amax * 1.000001 > 448 * float(inverse) / 2


# --- blocks and edges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantize", "block"),
    [
        (lambda x: quantize_blocks(x, E4M3, (1, 128)), (1, 128)),
        (lambda x: quantize_blocks(x, E4M3, (128, 128)), (128, 128)),
        (quantize_mxfp8, (1, 32)),
    ],
    ids=["1x128", "128x128", "1x32"],
)
def test_each_block_has_its_own_scale(quantize: Callable[[Tensor], Quantized], block: tuple[int, int]) -> None:
    x = matrix((150, 200), 3)
    found = quantize(x)
    height, width = block
    for row, column in ((0, 0), (140, 190), (100, 130)):
        row, column = row // height * height, column // width * width
        part = x[row : row + height, column : column + width]
        assert torch.equal(found.dequantize()[row : row + height, column : column + width], quantize(part).dequantize())
    assert found.scale_inv.shape == (-(-150 // height), -(-200 // width))


@quantizers
def test_zero_stays_zero_and_tiny_and_huge_stay_finite(name: str) -> None:
    quantize, _ = QUANTIZERS[name]
    assert torch.equal(quantize(torch.zeros(3, 40)).dequantize(), torch.zeros(3, 40))
    assert quantize(torch.zeros(0, 40)).dequantize().shape == (0, 40)
    for factor in (1e-44, 1e-38, 1e37):
        x = matrix((4, 40), 1).clamp(-9, 9) * factor
        assert bool(quantize(x).dequantize().isfinite().all())


@quantizers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_input_is_widened_exactly(name: str, dtype: torch.dtype) -> None:
    quantize, _ = QUANTIZERS[name]
    x = matrix((8, 130), 5).to(dtype)
    assert torch.equal(quantize(x).dequantize(), quantize(x.float()).dequantize())
