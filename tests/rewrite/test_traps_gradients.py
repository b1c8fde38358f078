"""Traps 1 to 3: gradients through C++-level Functions, values taken under another mode than the norm's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from te_convert.reasons import ReasonCode
from te_convert.rewrite.lazy import LazyNorm
from tests.rewrite.trap_samples import (
    CLOSE,
    Net,
    One,
    assert_near,
    assert_same_gradients,
    assert_trains_alike,
    both,
    call,
    gradients,
    loss_of,
    pair,
    reentrant,
    relative_error,
    x_of,
)

JOINT = "layernorm_a_b"


class Squared(torch.autograd.Function):
    """A Function as Bloom's GELU is one: C++ hands it the lazy tensor without asking ``__torch_function__``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * upstream[0]


def through_function(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    out: Tensor = m.a(n) * m.b(n) + Squared.apply(n)[..., :6]
    return out


def function_only(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.a(Squared.apply(m.norm(x)))
    return out


# ---- 1: consumed below __torch_function__ ----------------------------------------------------------------------------
def test_trap_01_the_lazy_tensor_has_a_grad_fn_exactly_when_the_norms_output_has_one() -> None:
    made = pair(One(), fused=1)
    lazy = made.model.norm(x_of())
    assert type(lazy) is LazyNorm
    assert lazy.requires_grad
    assert lazy.grad_fn is not None
    with torch.no_grad():
        assert not made.model.norm(x_of()).requires_grad
    made.model.requires_grad_(False)
    assert not made.model.norm(x_of()).requires_grad
    assert made.model.norm(x_of().requires_grad_()).requires_grad


@pytest.mark.parametrize("child", ["attn", "mlp"])
def test_trap_01_reentrant_checkpoint_around_a_reader_keeps_all_gradients(child: str) -> None:
    made = pair(Net(), fused=5)
    for model in made.both():
        for block in model.blocks:
            block.around = {child: reentrant}
    assert_trains_alike(made)


@pytest.mark.parametrize(("use", "unused"), [(through_function, ""), (function_only, "b")])
def test_trap_01_a_custom_function_that_nobody_recorded_keeps_all_gradients(
    use: Callable[[Any, Tensor], Tensor], unused: str
) -> None:
    assert_trains_alike(pair(One(), fused=1).use(use), unused=unused)


def test_trap_01_a_custom_function_that_was_recorded_keeps_the_norm_out_of_the_fusion() -> None:
    made = pair(One(use=through_function), fused=1)  # a and b then share an input that is no fused norm's
    assert [r.code for r in made.report.site("norm").reasons] == [ReasonCode.FUSION_OTHER_READER]
    assert made.fused == ["a_b"]
    assert_trains_alike(made)


def test_trap_01_a_function_with_a_frozen_norm_gives_the_input_its_gradient() -> None:
    model = One()
    model.norm.requires_grad_(False)
    assert_trains_alike(pair(model, fused=1).use(through_function))


# ---- 2: somebody takes the value under no_grad -----------------------------------------------------------------------
def test_trap_02_a_value_taken_under_no_grad_by_a_hook_is_not_used_for_training() -> None:
    made, seen = pair(One(), fused=1), []

    def log(module: Any, args: Any, output: Tensor) -> None:
        with torch.no_grad():
            seen.append((output * 1.0).mean())

    for model in made.both():
        model.norm.register_forward_hook(log)
    x = x_of()
    outputs = [model(x) for model in made.both()]
    assert_near(outputs[1], outputs[0])
    assert relative_error(seen[1], seen[0]) <= CLOSE
    assert made.counts(JOINT) == (1, 0)
    assert_trains_alike(made)


def test_trap_02_a_value_taken_under_no_grad_still_carries_gradients_to_a_later_reader() -> None:
    def logged_then_read(m: Any, x: Tensor) -> Tensor:
        n = m.norm(x)
        with torch.no_grad():
            size = n.abs().mean()
        out: Tensor = m.a(n) * m.b(n) + n[..., :6] / size
        return out

    assert_trains_alike(pair(One(), fused=1).use(logged_then_read))


def test_trap_02_a_value_taken_under_inference_mode_still_carries_gradients() -> None:
    def looked_at(m: Any, x: Tensor) -> Tensor:
        n = m.norm(x)
        with torch.inference_mode():
            (n + 1).sum()
        out: Tensor = m.a(n) * m.b(n) + n[..., 6:12]
        return out

    assert_trains_alike(pair(One(), fused=1).use(looked_at))


# ---- 3: norm and consumer in different modes -------------------------------------------------------------------------
def norm_in(mode: Callable[[], AbstractContextManager[Any]]) -> Callable[[Any, Tensor], Tensor]:
    def use(m: Any, x: Tensor) -> Tensor:
        with mode():
            n = m.norm(x)
        out: Tensor = m.a(n) * m.b(n) + x[..., :6]
        return out

    return use


def readers_in(mode: Callable[[], AbstractContextManager[Any]]) -> Callable[[Any, Tensor], Tensor]:
    def use(m: Any, x: Tensor) -> Tensor:
        n = m.norm(x)
        with mode():
            y = m.a(n)
        out: Tensor = y * m.b(n)
        return out

    return use


def _bf16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_trap_03_a_norm_under_no_grad_stays_without_gradients_and_its_readers_train() -> None:
    made = pair(One(), fused=1).use(norm_in(torch.no_grad))
    outputs = [model(x_of()) for model in made.both()]
    assert_near(outputs[1], outputs[0])
    assert made.counts(JOINT) == (0, 2)
    for output in outputs:
        loss_of(output).backward()
    expected = gradients(made.original)
    assert expected["norm.weight"] is None
    assert expected["a.weight"] is not None
    assert_same_gradients(gradients(made.model), expected)


def test_trap_03_one_reader_under_no_grad_and_one_under_grad() -> None:
    made = pair(One(), fused=1).use(readers_in(torch.no_grad))
    outputs = [model(x_of()) for model in made.both()]
    assert_near(outputs[1], outputs[0])
    for output in outputs:
        loss_of(output).backward()
    expected = gradients(made.original)
    assert expected["a.weight"] is None
    assert expected["b.weight"] is not None
    assert_same_gradients(gradients(made.model), expected, unused="a")


def test_trap_03_a_norm_under_inference_mode_feeds_readers_outside() -> None:
    made = pair(One(), fused=1).use(norm_in(torch.inference_mode))
    with torch.no_grad():
        outputs = [model(x_of()) for model in made.both()]
    assert_near(outputs[1], outputs[0])
    assert made.counts(JOINT) == (0, 2)
    for model in made.both():  # grad mode: torch forbids to save an inference tensor for backward, in both models alike
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            model(x_of())


def test_trap_03_everything_under_inference_mode_fuses() -> None:
    made = pair(One(), fused=1)
    with torch.inference_mode():
        outputs = [model(x_of()) for model in made.both()]
    assert outputs[1].is_inference()
    assert_near(outputs[1], outputs[0])
    assert made.counts(JOINT) == (1, 0)


def test_trap_03_an_inference_tensor_outside_inference_mode_gives_the_same_values() -> None:
    made = pair(One(), fused=1)
    with torch.inference_mode():
        x = x_of()
    with torch.no_grad():
        outputs = [model(x) for model in made.both()]
    assert_near(outputs[1], outputs[0])


@pytest.mark.parametrize("use", [norm_in(_bf16), readers_in(_bf16)], ids=["norm", "reader"])
def test_trap_03_autocast_around_one_side_only_gives_the_originals_dtypes_and_numbers(use: Callable[[Any, Tensor], Tensor]) -> None:
    made = pair(One(), fused=1).use(use)
    exact = made.original.use(made.original, x_of())
    outputs = [model(x_of()) for model in made.both()]
    assert outputs[1].dtype is outputs[0].dtype
    # the value path: the same torch calls in the same mode
    assert relative_error(outputs[1], outputs[0]) <= CLOSE
    made.use(both)
    wide = [model(x_of()) for model in made.both()]
    assert_near(wide[1], wide[0])
    assert exact.dtype is outputs[0].dtype
    for output in outputs:
        loss_of(output.float()).backward()
    assert_same_gradients(gradients(made.model), gradients(made.original), 1e-2)


def test_trap_03_autocast_around_everything_is_as_near_to_float32_as_the_original() -> None:
    made = pair(One(), fused=1)
    exact = made.original(x_of())
    with _bf16():
        outputs = [model(x_of()) for model in made.both()]
    assert outputs[1].dtype is outputs[0].dtype
    errors = [relative_error(output.float(), exact) for output in outputs]
    assert errors[1] <= max(1.5 * errors[0], 1e-2)
    assert made.counts(JOINT)[0] + made.counts(JOINT)[1] > 0


def test_trap_03_leaving_grad_mode_in_the_middle_of_a_group_runs_the_rest_without_gradients() -> None:
    def use(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        n = m.norm(x)
        first = m.a(n)
        with torch.no_grad():
            return first, m.b(n)

    made = pair(One(), fused=1).use(use)
    outputs = [call(model, x_of()) for model in made.both()]
    assert outputs[0][0].requires_grad
    assert not outputs[0][1].requires_grad
    assert_near(outputs[1], outputs[0])
