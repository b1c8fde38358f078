from __future__ import annotations

from dataclasses import replace

import pytest

from te_convert.estimate.cost import (
    LINEAR_HOST_US,
    TE_HOST_US,
    TE_RECIPE_HOST_US,
    Times,
    can_run,
    original_times,
    takes_recipe,
    te_times,
)
from te_convert.estimate.gpus import find_gpu
from te_convert.estimate.kernels import LAUNCH_US, Product, gemm_us, memory_us, quantise_us
from te_convert.estimate.work import Work

H100 = find_gpu("h100")
PRODUCT = Product(16384, 4096, 4096)
LINEAR = Work("fc", "te.Linear", "linear", products=(PRODUCT,), te_products=(PRODUCT,))


def test_a_linear_is_its_products() -> None:
    times = original_times(H100, LINEAR, training=False)
    assert times == Times(gemm_us=gemm_us(H100, PRODUCT), host_us=LINEAR_HOST_US)
    assert te_times(H100, LINEAR, None, training=False) == replace(times, host_us=TE_HOST_US)
    training = original_times(H100, LINEAR, training=True)
    assert training.gemm_us == pytest.approx(sum(gemm_us(H100, each) for each in PRODUCT.passes))


def test_a_recipe_multiplies_faster_and_quantises_each_operand_once() -> None:
    times = te_times(H100, LINEAR, "fp8-current", training=True)
    sizes = (16384 * 4096, 4096 * 4096, 16384 * 4096)  # input, weight, gradient of the output
    assert times.quantise_us == pytest.approx(sum(quantise_us(H100, size, "fp8-current", True) for size in sizes))
    assert times.gemm_us < 0.6 * original_times(H100, LINEAR, training=True).gemm_us
    assert times.host_us == 2 * TE_RECIPE_HOST_US
    inference = te_times(H100, LINEAR, "fp8-current", training=False)
    assert inference.quantise_us == pytest.approx(sum(quantise_us(H100, size, "fp8-current", False) for size in sizes[:2]))


@pytest.mark.parametrize(
    ("work", "recipe", "takes"),
    [
        (LINEAR, "fp8-current", True),
        (LINEAR, None, False),
        (LINEAR, "bf16", False),
        (replace(LINEAR, high=True), "fp8-current", False),
        (replace(LINEAR, converted=False), "fp8-current", False),
        (replace(LINEAR, te_products=(Product(16, 4096, 4104),)), "fp8-current", False),
        (replace(LINEAR, te_products=(Product(16, 4096, 4112),)), "fp8-current", True),
        (replace(LINEAR, te_products=(Product(16, 4096, 4112),)), "mxfp8", False),
        (replace(LINEAR, te_products=()), "fp8-current", False),
    ],
)
def test_what_takes_a_recipe(work: Work, recipe: str | None, takes: bool) -> None:
    assert takes_recipe(work, recipe) is takes
    if not takes and work.converted:
        assert te_times(H100, work, recipe, True) == te_times(H100, work, None, True)


def test_a_norm_in_python_costs_nine_times_one_in_a_kernel() -> None:
    norm = Work("norm", "te.RMSNorm", "norm", norm_elements=1e8)
    one = original_times(H100, norm, False)
    python = original_times(H100, replace(norm, norm_in_python=True), False)
    assert one.memory_us == pytest.approx(memory_us(H100, 4e8))
    assert python.memory_us - 7 * LAUNCH_US == pytest.approx(9 * (one.memory_us - LAUNCH_US))
    assert te_times(H100, replace(norm, norm_in_python=True), None, False).memory_us == one.memory_us


def test_eager_attention_moves_its_scores_and_te_does_not() -> None:
    fused = Work("attn", "te.DotProductAttention", "attention", attention_flops=1e11)
    eager = replace(fused, scores=1e9)
    assert original_times(H100, eager, True).attention_us > 5 * original_times(H100, fused, True).attention_us
    assert te_times(H100, eager, None, True) == te_times(H100, fused, None, True)


def test_a_fused_activation_saves_a_round_trip() -> None:
    mlp = replace(LINEAR, activation_elements=1e8, gated=True)
    saved = original_times(H100, mlp, False).memory_us - te_times(H100, mlp, None, False).memory_us
    assert saved == pytest.approx(memory_us(H100, 4e8))  # 10 bytes in two kernels, 6 in one


def test_what_stays_costs_the_same_before_and_after() -> None:
    rest = Work("(rest of x)", "elementwise", "other", False, moved_bytes=1e9, kernels=3, other_flops=1e12)
    before = original_times(H100, rest, True)
    assert before == te_times(H100, rest, "fp8-current", True)
    assert before.memory_us == pytest.approx(memory_us(H100, 3e9, 9))


def test_calls_add_up_and_the_longer_of_gpu_and_host_is_the_step() -> None:
    assert original_times(H100, replace(LINEAR, calls=10), True).gemm_us == pytest.approx(
        10 * original_times(H100, LINEAR, True).gemm_us
    )
    assert Times(1, 2, 3, 4, 5).step_us == 10
    assert Times(1, 0, 0, 0, 5).step_us == 5
    assert (Times(1, 2, 3, 4, 5) + Times(1, 1, 1, 1, 1)) * 2 == Times(4, 6, 8, 10, 12)
    assert Times(1, 2, 3, 4, 5).to_dict()["step_us"] == 10


def test_fp4_needs_a_peak() -> None:
    assert not can_run(H100, "nvfp4")
    assert can_run(find_gpu("b200"), "nvfp4")
