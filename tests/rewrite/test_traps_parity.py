"""Traps 25 to 28: originals that do not reproduce themselves, gradients that are zero in theory, rounding or error.

Traps 23 and 24 (attention functions, padded positions) concern no norm and no Linear; they are proved with the attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.rewrite.trap_samples import (
    MLP,
    WIDTH,
    Net,
    One,
    assert_near,
    assert_same_gradients,
    assert_trains_alike,
    gradients,
    loss_of,
    pair,
    relative_error,
    x_of,
)


# ---- 25: originals that do not reproduce themselves ------------------------------------------------------------------
def test_trap_25_numpys_generator_in_the_forward_does_not_revert_anything() -> None:
    def masked(m: Any, x: Tensor) -> Tensor:
        mask = torch.from_numpy(np.random.rand(*x.shape[:2], 1) > 0.5)
        n = m.norm(x * mask)
        out: Tensor = m.a(n) * m.b(n)
        return out

    state = np.random.get_state()
    made = pair(One(use=masked), fused=1)
    np.random.set_state(state)
    first = made.original(x_of())
    np.random.set_state(state)
    assert_near(made.model(x_of()), first)


def test_trap_25_batch_norm_statistics_are_what_they_were_and_training_moves_them_alike() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        n = m.norm(m.batch(x.transpose(1, 2)).transpose(1, 2))
        out: Tensor = m.a(n) * m.b(n)
        return out

    model = One(use=use, batch=nn.BatchNorm1d(WIDTH)).train()
    mean = model.get_buffer("batch.running_mean").clone()
    made = pair(model, fused=1)
    assert torch.equal(made.model.batch.running_mean, mean)
    assert made.model.batch.num_batches_tracked == 0
    assert_trains_alike(made)
    assert relative_error(made.model.batch.running_mean, made.original.batch.running_mean) <= 1e-6
    assert not torch.equal(made.model.batch.running_mean, mean)


def softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


# ---- 26: gradients that are zero in theory ---------------------------------------------------------------------------
def test_trap_26_a_keys_bias_has_no_gradient_but_rounding_in_both_models() -> None:
    made = pair(Net(1), fused=3)
    for model in made.both():
        model.blocks[0].attn.weigh = softmax
        loss_of(model(x_of())).backward()
    found, expected = gradients(made.model), gradients(made.original)
    name, scale = "blocks.0.attn.k_proj.bias", "blocks.0.attn.v_proj.bias"
    gradient, other = found[name], found[scale]
    assert gradient is not None
    assert other is not None
    assert gradient.abs().max() <= 1e-5 * other.abs().max()
    assert_same_gradients(found, expected)


# ---- 27: parameters without elements ---------------------------------------------------------------------------------
def test_trap_27_parameters_without_elements_beside_a_fusion() -> None:
    model = One()
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    model.register_parameter("tokens", nn.Parameter(torch.zeros(1, 0, WIDTH)))
    made = pair(model, fused=1)
    assert made.model.empty.shape == (0,)
    assert_trains_alike(made)


# ---- 28: is it rounding? ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mlp", [MLP, lambda: MLP(inside=0.1)])
def test_trap_28_in_float64_nothing_is_left_of_the_difference(mlp: Callable[[], nn.Module]) -> None:
    made = pair(Net(2, mlp=mlp).eval(), fused=5)
    for model in made.both():
        model.double()
    assert_trains_alike(made, x_of().double(), 1e-12)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma", "gpt_neox", "vit", "bert", "siglip_vision"])
def test_trap_28_real_models_agree_in_float64_forward_and_backward(name: str) -> None:
    from te_convert.verify.precision import Widen
    from tests.verify.model_zoo import build, cast

    model, inputs = build(name)
    made = pair(model, inputs)
    outputs = []
    for each in made.both():
        each.double()
        with Widen(torch.float64):
            outputs.append(each(**cast(inputs, torch.float64))[0])
            loss_of(outputs[-1]).backward()
    assert sum(made.counts(fqn)[0] for fqn in made.fused) == len(made.fused)
    assert_near(outputs[1], outputs[0], 1e-10)
    assert_same_gradients(gradients(made.model), gradients(made.original), 1e-8)
