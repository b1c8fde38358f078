"""Trap 4: the norm's input, its weight or its output changed in place between the norm and its readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_convert.rewrite.lazy import LazyNorm
from tests.rewrite.trap_samples import MLP, One, assert_near, assert_trains_alike, both, pair, x_of

JOINT = "layernorm_a_b"
CHANGED = "changed in place between the norm and its reader"


def input_changed(m: Any, x: Tensor) -> Tensor:
    h = x * 1.0
    n = m.norm(h)
    h.mul_(2)
    out: Tensor = m.a(n) * m.b(n)
    return out


def weight_changed(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    with torch.no_grad():
        m.norm.weight.mul_(2)
    out: Tensor = m.a(n) * m.b(n)
    return out


def bias_changed(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    with torch.no_grad():
        m.norm.bias.add_(2)
    out: Tensor = n * 1.0
    return out


@pytest.mark.parametrize("use", [input_changed, weight_changed, bias_changed])
@pytest.mark.parametrize("grad", [True, False])
def test_trap_04_an_input_or_weight_changed_before_its_reader_raises(use: Callable[[Any, Tensor], Tensor], grad: bool) -> None:
    made = pair(One(), fused=1).use(use)
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=CHANGED):
        made.model(x_of())


def test_trap_04_an_input_changed_before_a_fused_mlp_raises() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        h = x * 1.0
        n = m.norm(h)
        h.add_(1)
        out: Tensor = m.mlp(n)
        return out

    made = pair(One(use=lambda m, x: m.mlp(m.norm(x)), mlp=MLP()), fused=1).use(use)
    with pytest.raises(RuntimeError, match=CHANGED):
        made.model(x_of())


def test_trap_04_an_input_changed_after_all_readers_gives_the_originals_numbers_and_error() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        h = x * 1.0
        n = m.norm(h)
        out: Tensor = m.a(n) * m.b(n)
        h.mul_(2)
        return out

    made = pair(One(), fused=1).use(use)
    with torch.no_grad():
        assert_near(made.model(x_of()), made.original(x_of()))
    assert made.counts(JOINT) == (1, 0)
    for model in made.both():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(x_of()).sum().backward()


def test_trap_04_an_input_changed_between_two_readers_gives_the_originals_numbers() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        h = x * 1.0
        n = m.norm(h)
        first = m.a(n)
        h.mul_(2)
        out: Tensor = first * m.b(n)
        return out

    made = pair(One(), fused=1).use(use)
    with torch.no_grad():
        assert_near(made.model(x_of()), made.original(x_of()))


def scaled(y: Tensor) -> None:
    y.mul_(2)


def one_entry(y: Tensor) -> None:
    y[..., 0] = 3.0


def through_a_view(y: Tensor) -> None:
    y[:, 1:].add_(1)


def through_detach(y: Tensor) -> None:
    y.detach().mul_(2)


def through_data(y: Tensor) -> None:
    y.data.mul_(2)


def through_numpy(y: Tensor) -> None:
    y.numpy()[...] *= 2


def through_out(y: Tensor) -> None:
    torch.mul(y, 2, out=y)


IN_PLACE = [scaled, one_entry, through_a_view, through_detach, through_data]


@pytest.mark.parametrize("change", IN_PLACE, ids=lambda change: change.__name__)
def test_trap_04_a_hook_that_changes_the_output_in_place_is_obeyed(change: Callable[[Tensor], None]) -> None:
    def hook(module: Any, args: Any, output: Tensor) -> None:
        with torch.no_grad():
            change(output)

    made = pair(One(), fused=1)
    for model in made.both():
        model.norm.register_forward_hook(hook)
    assert_near(made.model(x_of()), made.original(x_of()))
    assert made.counts(JOINT) == (0, 2)
    assert_trains_alike(made)


@pytest.mark.parametrize("change", [*IN_PLACE, through_out, through_numpy], ids=lambda change: change.__name__)
def test_trap_04_an_output_changed_between_two_readers_is_obeyed(change: Callable[[Tensor], None]) -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        n = m.norm(x)
        first = m.a(n)
        change(n)
        out: Tensor = first * m.b(n)
        return out

    made = pair(One(), fused=1).use(use)
    with torch.no_grad():
        assert_near(made.model(x_of()), made.original(x_of()))


def test_trap_04_an_output_changed_in_place_under_grad_has_the_originals_gradients() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        n = m.norm(x)
        n += 1.0
        n *= x.detach()
        out: Tensor = m.a(n) * m.b(n)
        return out

    made = pair(One(), fused=1).use(use)
    made.model(x_of())
    assert made.counts(JOINT) == (0, 2)
    assert_trains_alike(made)


def test_trap_04_an_output_changed_in_place_in_inference_mode_is_obeyed() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        n = m.norm(x)
        n.mul_(3)
        out: Tensor = m.a(n) * m.b(n)
        return out

    made = pair(One(), fused=1).use(use)
    with torch.inference_mode():
        assert_near(made.model(x_of()), made.original(x_of()))


def test_trap_04_a_hook_that_replaces_the_output_is_obeyed() -> None:
    made = pair(One(), fused=1)
    for model in made.both():
        model.norm.register_forward_hook(lambda m, a, y: y * 2 + 1)
    made.model(x_of())
    assert made.counts(JOINT) == (0, 2)
    assert_trains_alike(made)


@pytest.mark.parametrize("reader", ["a", "b"])
def test_trap_04_a_weight_changed_by_the_readers_own_pre_hook_is_obeyed(reader: str) -> None:
    """As weight constraints do: every call first clamps or normalises the weight."""

    def hook(module: nn.Linear, args: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(0.5)

    made = pair(One(), fused=1)
    for model in made.both():
        model.get_submodule(reader).register_forward_pre_hook(hook)
    with torch.no_grad():
        assert_near(made.model(x_of()), made.original(x_of()))


def test_trap_04_weights_changed_in_place_between_two_steps_take_effect() -> None:
    made = pair(One(), fused=1).use(both)
    for step in range(3):
        assert_near(made.model(x_of()), made.original(x_of()))
        for model in made.both():
            with torch.no_grad():
                model.a.weight.mul_(1.5 + step)
                model.b.bias[2] = 4.0
                model.norm.weight.add_(0.25)
    assert made.counts(JOINT) == (3, 0)
    assert type(made.model.norm(x_of())) is LazyNorm
