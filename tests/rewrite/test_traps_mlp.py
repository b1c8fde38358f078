"""Traps 16 and 17: dropout inside and after a fused MLP, calls that are not one positional tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_convert
from te_convert.plan.model import Outcome
from te_convert.reasons import ReasonCode
from tests.rewrite.trap_parts import Feed, WithResidual, with_residual
from tests.rewrite.trap_samples import (
    MLP,
    WIDTH,
    One,
    Pair,
    assert_near,
    assert_same_gradients,
    assert_trains_alike,
    gradients,
    loss_of,
    pair,
    x_of,
)


def feed(mlp: nn.Module, fused: int | None = 1, **options: Any) -> Pair:
    torch.manual_seed(0)
    for module in mlp.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    return pair(Feed(mlp).eval(), fused=fused, **options)


def seeded(model: Any, x: Tensor) -> Any:
    torch.manual_seed(11)
    return model(x)


# ---- 16: dropout -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("inside", "after", "counts"), [(0.3, 0.0, (0, 1)), (0.0, 0.3, (1, 0)), (0.3, 0.3, (0, 1)), (0.0, 0.0, (1, 0))]
)
def test_trap_16_dropout_in_train_mode_draws_the_same_numbers(inside: float, after: float, counts: tuple[int, int]) -> None:
    made = feed(MLP(inside=inside, after=after))
    for model in made.both():
        model.train()
    outputs = [seeded(model, x_of()) for model in made.both()]
    assert_near(outputs[1], outputs[0])
    assert made.counts("mlp") == counts
    if inside or after:
        torch.manual_seed(12)
        assert not torch.allclose(made.model(x_of()), outputs[1])
    assert_trains_alike(made, run=seeded)


@pytest.mark.parametrize(("inside", "after"), [(0.3, 0.0), (0.0, 0.3)])
def test_trap_16_dropout_is_idle_in_eval_mode_and_back(inside: float, after: float) -> None:
    made = feed(MLP(inside=inside, after=after))
    made.model.train()
    made.model(x_of())
    made.model.eval()
    made.reset()
    assert_near(made.model(x_of()), made.original(x_of()))
    assert made.counts("mlp") == (1, 0)


def test_trap_16_a_dropout_switched_on_after_the_conversion_is_obeyed() -> None:
    made = feed(MLP())
    for model in made.both():
        model.train()
        model.mlp.inner.p = 0.5
        model.mlp.outer.p = 0.25
    outputs = [seeded(model, x_of()) for model in made.both()]
    assert_near(outputs[1], outputs[0])
    assert made.counts("mlp") == (0, 1)


def test_trap_16_train_and_eval_reach_the_parts_of_a_fused_mlp() -> None:
    made = feed(MLP(inside=0.3))
    made.model.train()
    assert made.model.mlp.inner.training
    made.model.mlp.eval()
    assert not made.model.mlp.inner.training
    assert_near(made.model(x_of()), made.original(x_of()))
    assert made.counts("mlp") == (1, 0)


def test_trap_16_a_dropout_before_a_reader_that_draws_gives_the_value() -> None:
    def dropped(m: Any, x: Tensor) -> Tensor:
        n = m.drop(m.norm(x))
        out: Tensor = m.a(n) * m.b(n)
        return out

    made = pair(One(use=dropped, drop=nn.Dropout(0.4)).eval())
    for model in made.both():
        model.train()
    outputs = [seeded(model, x_of()) for model in made.both()]
    assert_near(outputs[1], outputs[0])
    assert_trains_alike(made, run=seeded)


# ---- 17: other arguments ---------------------------------------------------------------------------------------------
CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "residual": with_residual,
    "keyword": lambda m, x: m.mlp(x=m.norm(x)),
    "keyword beside": lambda m, x: m.mlp(m.norm(x), residual=x),
    "both": lambda m, x: m.mlp(m.norm(x), x, scale=2.0),
    "another tensor": lambda m, x: m.mlp(x * 2) + m.norm(x),
    "part of it": lambda m, x: m.mlp(m.norm(x)[:, :2]),
    "lazy as second": lambda m, x: m.mlp(x, m.norm(x)),
    "only a part of the mlp": lambda m, x: m.mlp.fc2(m.mlp.act(m.mlp.fc1(m.norm(x)))),
}


@pytest.mark.parametrize("name", CALLS)
def test_trap_17_a_call_that_nobody_recorded_runs_the_original_forward(name: str) -> None:
    mlp = WithResidual()
    made = pair(Feed(mlp, lambda m, x: x + m.mlp(m.norm(x))), fused=1).use(CALLS[name])
    made.model(x_of())
    assert made.counts("mlp")[0] == 0
    assert_trains_alike(made)


def test_trap_17_an_mlp_recorded_with_more_arguments_has_no_owner_and_its_first_linear_fuses() -> None:
    made = pair(Feed(WithResidual(), with_residual), fused=1)
    assert made.fused == ["mlp.layernorm_fc1"]
    assert [r.code for r in made.report.site("mlp.fc1").reasons] == [ReasonCode.MLP_NO_OWNER]
    made.model(x_of())
    assert made.counts("mlp.layernorm_fc1") == (1, 0)
    assert_trains_alike(made)


def test_trap_17_bloom() -> None:
    from tests.verify.model_zoo import build

    model, inputs = build("bloom")
    made = pair(model, inputs)
    assert made.report.site("transformer.h.0.mlp.dense_h_to_4h").outcome is Outcome.FUSED
    assert made.report.site("transformer.h.0.mlp.dense_h_to_4h").replacement == "te.LayerNormLinear"
    outputs = [each(**inputs).logits for each in made.both()]
    assert_near(outputs[1], outputs[0])
    for output in outputs:
        loss_of(output).backward()
    assert_same_gradients(gradients(made.model), gradients(made.original), 5e-5)


# ---- 14 for an MLP: parts replaced or hooked after the conversion ----------------------------------------------------
def _other_fc1(mlp: Any) -> None:
    torch.manual_seed(3)
    mlp.fc1 = nn.Linear(WIDTH, 24)


def _other_fc2(mlp: Any) -> None:
    torch.manual_seed(3)
    mlp.fc2 = nn.Sequential(mlp.fc2, nn.Linear(WIDTH, WIDTH))


def _other_activation(mlp: Any) -> None:
    mlp.act = nn.ReLU()


def _hook_on_fc1(mlp: Any) -> None:
    mlp.fc1.register_forward_hook(lambda m, a, y: y * 2)


def _hook_on_the_activation(mlp: Any) -> None:
    mlp.act.register_forward_pre_hook(lambda m, a: (a[0] + 1,))


CHANGES = [_other_fc1, _other_fc2, _other_activation, _hook_on_fc1, _hook_on_the_activation]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_trap_14_a_part_of_a_fused_mlp_changed_afterwards_takes_effect(change: Callable[[Any], None]) -> None:
    made = feed(MLP())
    for model in made.both():
        change(model.mlp)
    assert_near(made.model(x_of()), made.original(x_of()))


def test_trap_14_hooks_on_the_mlp_itself_run_whichever_path_it_takes() -> None:
    made = feed(MLP(inside=0.3))
    for model in made.both():
        model.mlp.register_forward_hook(lambda m, a, y: y * 2)
        model.mlp.register_forward_pre_hook(lambda m, a: None)
    assert_near(made.model(x_of()), made.original(x_of()))
    assert made.counts("mlp") == (1, 0)
    for model in made.both():
        model.train()
    assert_near(seeded(made.model, x_of()), seeded(made.original, x_of()))
    assert made.counts("mlp") == (1, 1)


def test_trap_14_attributes_and_methods_of_the_mlp_stay() -> None:
    class Named(MLP):
        scale = 3

        def extra(self) -> int:
            return self.fc1.in_features

    made = feed(Named())
    assert made.model.mlp.scale == 3
    assert made.model.mlp.extra() == WIDTH
    assert [name for name, _ in made.model.mlp.named_children()] == [name for name, _ in made.original.mlp.named_children()]
    assert list(te_convert.original_state_dict(made.model)) == list(made.original.state_dict())
