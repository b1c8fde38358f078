from __future__ import annotations

import pytest

from te_convert.estimate.gpus import find_gpu
from te_convert.estimate.kernels import LAUNCH_US, Product, attention_us, gemm_us, memory_us, quantise_us

H100, B200 = find_gpu("h100"), find_gpu("b200")


def test_a_large_product_takes_its_flops_over_the_peak_that_kernels_reach() -> None:
    product = Product(128 * 132, 8192, 256 * 32)  # whole waves of tiles
    assert gemm_us(H100, product) == pytest.approx(product.flops / (989e12 * 0.746) * 1e6 + LAUNCH_US)


def test_a_half_filled_wave_takes_as_long_as_a_full_one() -> None:
    tiles = H100.multiprocessors
    one, one_and_a_half, two = (gemm_us(H100, Product(round(128 * tiles * waves), 8192, 256)) for waves in (1, 1.5, 2))
    assert one_and_a_half == pytest.approx(two)
    assert two - LAUNCH_US == pytest.approx(2 * (one - LAUNCH_US))


def test_few_tiles_are_split_along_k() -> None:
    assert gemm_us(H100, Product(128, 65536, 256)) < 0.1 * gemm_us(H100, Product(128 * 133, 65536, 256))


def test_a_thin_product_is_bound_by_memory() -> None:
    product = Product(1, 16384, 16384)
    assert gemm_us(H100, product) == pytest.approx(memory_us(H100, 2 * 16384 * 16384, 1), rel=1e-2)
    assert gemm_us(H100, product) / gemm_us(H100, product, "fp8-current") == pytest.approx(2, rel=0.05)


def test_the_three_passes_have_the_same_flops() -> None:
    forward, dgrad, wgrad = Product(3, 5, 7).passes
    assert forward.flops == dgrad.flops == wgrad.flops
    assert (dgrad, wgrad) == (Product(3, 7, 5), Product(7, 3, 5))


def _bytes(gpu_name: str, recipe: str, training: bool, fused: bool = False) -> float:
    gpu, elements = find_gpu(gpu_name), 1e9
    empty = quantise_us(gpu, 0, recipe, training, fused)
    return (quantise_us(gpu, elements, recipe, training, fused) - empty) / memory_us(gpu, elements, 0)


@pytest.mark.parametrize(
    ("gpu", "recipe", "training", "expected"),
    [
        ("h100", "fp8-delayed", False, 3),  # read 2, write 1
        ("h100", "fp8-delayed", True, 4),  # and a transposed copy
        ("b200", "fp8-delayed", True, 3),  # which Blackwell does not need
        ("h100", "fp8-current", True, 6),  # amax first
        ("b200", "mxfp8", False, (2 + 1.03) / 0.82),
        ("b200", "mxfp8", True, (2 + 2 * 1.03) / 0.82),
        ("b200", "nvfp4", True, (4 + 2 * 0.56) / 0.70),
    ],
)
def test_bytes_per_element_of_quantising(gpu: str, recipe: str, training: bool, expected: float) -> None:
    assert _bytes(gpu, recipe, training) == pytest.approx(expected)


def test_the_kernel_before_saves_a_round_trip_where_the_format_allows() -> None:
    assert _bytes("h100", "fp8-delayed", True, fused=True) == pytest.approx(0)
    assert _bytes("h100", "fp8-current", True, fused=True) == pytest.approx(6)


def test_attention_recomputes_in_its_backward() -> None:
    forward, both = (attention_us(H100, 1e12, True, training) - LAUNCH_US * (3 if training else 1) for training in (False, True))
    assert both == pytest.approx(3.5 * forward)
    assert attention_us(H100, 1e12, True, False) < attention_us(H100, 1e12, False, False)
