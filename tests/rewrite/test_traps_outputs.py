"""Traps 6 and 8: lazy tensors in outputs and hooks, backward hooks on norms, readers and MLPs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from te_convert.reasons import ReasonCode
from tests.rewrite.trap_samples import (
    Net,
    One,
    assert_near,
    assert_same_gradients,
    assert_trains_alike,
    both,
    gradients,
    lazies_of,
    loss_of,
    pair,
    relative_error,
    x_of,
)

JOINT = "layernorm_a_b"


class Named(NamedTuple):
    out: Tensor
    hidden: Tensor


@dataclass
class Record:
    """An output class that torch's pytrees do not know."""

    out: Tensor
    hidden: Tensor

    def __iter__(self) -> Any:
        return iter((self.out, self.hidden))


def hidden(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    n = m.norm(x)
    return m.a(n) * m.b(n), n


WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda y, n: (y, n),
    "list": lambda y, n: [y, n],
    "dict": lambda y, n: {"out": y, "hidden_states": n},
    "nested": lambda y, n: (y, {"hidden_states": [n, (n,)]}),
    "named tuple": Named,
    "alone": lambda y, n: n,
}


@pytest.mark.parametrize("way", WAYS)
def test_trap_06_a_norms_output_in_the_models_output_is_a_plain_tensor(way: str) -> None:
    made = pair(One(), fused=1).use(lambda m, x: WAYS[way](*hidden(m, x)))
    found, expected = made.model(x_of()), made.original(x_of())
    assert type(found) is type(expected)
    leaves = torch.utils._pytree.tree_leaves(found)
    assert {type(leaf) for leaf in leaves} == {Tensor}
    for one, other in zip(leaves, torch.utils._pytree.tree_leaves(expected), strict=True):
        assert_near(one, other)
    if way != "alone":
        assert made.counts(JOINT) == (1, 0)


def test_trap_06_an_output_class_unknown_to_pytrees_holds_no_lazy_tensor() -> None:
    made = pair(One(), fused=1).use(lambda m, x: Record(*hidden(m, x)))
    found, expected = made.model(x_of()), made.original(x_of())
    assert isinstance(found, Record)
    assert type(found.hidden) is Tensor
    assert_near(found.hidden, expected.hidden)


def test_trap_06_gradients_through_a_returned_norm() -> None:
    assert_trains_alike(pair(One(), fused=1).use(hidden))


def test_trap_06_a_returned_norm_that_was_recorded_is_another_reader() -> None:
    made = pair(One(use=hidden), fused=1)
    (reason,) = made.report.site("norm").reasons
    assert (reason.code, reason.detail) == (ReasonCode.FUSION_OTHER_READER, "also read by the model's output")
    assert_trains_alike(made)


def test_trap_06_transformers_hidden_states_are_plain_tensors() -> None:
    from tests.verify.model_zoo import build

    model, inputs = build("llama")
    made = pair(model, inputs)
    outputs = [each(**inputs, output_hidden_states=True) for each in made.both()]
    assert len(outputs[1].hidden_states) == 2
    assert_near(list(outputs[1].hidden_states), list(outputs[0].hidden_states))
    assert_near(outputs[1].logits, outputs[0].logits)


def test_trap_06_hooks_see_something_that_behaves_as_the_norms_output() -> None:
    made = pair(Net(1), fused=3)
    seen: list[list[Any]] = [[], []]
    for model, log in zip(made.both(), seen, strict=True):
        block = model.blocks[0]
        block.norm1.register_forward_hook(lambda m, a, y, log=log: log.append(y))
        block.attn.register_forward_pre_hook(lambda m, a, log=log: log.append(a[0]))
        block.attn.q_proj.register_forward_pre_hook(lambda m, a, log=log: log.append(a[0]))
        block.attn.q_proj.register_forward_hook(lambda m, a, y, log=log: log.extend([a[0], y]))
        model(x_of())
    assert len(seen[1]) == 5
    for found, expected in zip(seen[1], seen[0], strict=True):
        assert isinstance(found, Tensor)
        assert (found.shape, found.dtype, found.device, found.ndim) == (expected.shape, expected.dtype, expected.device, 3)
        assert relative_error(found.clone(), expected) <= 2e-5
        assert found.requires_grad
    assert made.counts("blocks.0.attn.layernorm_qkv") == (1, 0)


def test_trap_06_a_hook_on_the_root_sees_the_value() -> None:
    seen: list[Tensor] = []
    made = pair(One(), fused=1).use(hidden)
    for each in made.both():
        each.register_forward_hook(lambda m, a, y: seen.append(y[1]))
        each(x_of())
    assert {type(y) for y in seen} == {Tensor}
    assert_near(seen[1], seen[0])


def test_trap_06_nothing_lazy_stays_alive_after_a_forward_or_an_exception() -> None:
    def fails(m: Any, x: Tensor) -> Tensor:
        n = m.norm(x)
        y: Tensor = m.a(n)
        if x.sum() != 0:
            raise ValueError("in the middle")
        return y

    made = pair(One(), fused=1)
    lazies = lazies_of(made.model.norm)
    made.model(x_of()).sum().backward()
    made.use(fails)
    with pytest.raises(ValueError, match="in the middle") as raised:
        made.model(x_of())
    del raised
    gc.collect()
    assert [lazy() for lazy in lazies] == [None, None]
    made.use(both)
    assert_trains_alike(made)


# ---- 8: backward hooks -----------------------------------------------------------------------------------------------
def _watch(model: Any, fqns: list[str], log: list[Any]) -> None:
    for fqn in fqns:
        model.get_submodule(fqn).register_full_backward_hook(
            lambda m, grad_in, grad_out, fqn=fqn: log.append((fqn, grad_in[0], grad_out[0]))
        )


HOOKED = ["blocks.0.norm1", "blocks.0.attn.q_proj", "blocks.0.attn.v_proj", "blocks.0.attn", "blocks.0.norm2", "blocks.0.mlp"]


@pytest.mark.parametrize(
    "fqns", [*([name] for name in HOOKED), HOOKED, ["blocks.0"], ["blocks.0.mlp.fc1", "blocks.0.mlp.fc2"]], ids="+".join
)
@pytest.mark.parametrize("before", [True, False])
def test_trap_08_full_backward_hooks_see_the_originals_gradients(fqns: list[str], before: bool) -> None:
    logs: list[list[Any]] = [[], []]
    model = Net(1)
    if before:
        current: list[Any] = []
        _watch(model, fqns, current)
        made = pair(model)
    else:
        made = pair(model, fused=3)
        for each, log in zip(made.both(), logs, strict=True):
            _watch(each, fqns, log)
    outputs = []
    for index, each in enumerate(made.both()):
        if before:
            current.clear()
        x = x_of().requires_grad_()
        outputs.append(each(x))
        loss_of(outputs[-1]).backward()
        if before:
            logs[index] = list(current)
    assert_near(outputs[1], outputs[0])
    order = [sorted(log, key=lambda entry: entry[0]) for log in logs]
    assert [name for name, _, _ in order[0]] == sorted(fqns)
    assert [name for name, _, _ in order[1]] == sorted(fqns)
    for (name, grad_in, grad_out), (_, expected_in, expected_out) in zip(order[1], order[0], strict=True):
        assert relative_error(grad_out, expected_out) <= 1e-4, name
        assert relative_error(grad_in, expected_in) <= 1e-4, name
    assert_same_gradients(gradients(made.model), gradients(made.original))


def test_trap_08_a_gradient_hook_on_the_norms_output_sees_the_originals_gradient() -> None:
    made = pair(One(), fused=1)
    seen: list[Tensor] = []

    def use(m: Any, x: Tensor) -> Tensor:
        n = m.norm(x)
        n.register_hook(seen.append)
        out: Tensor = m.a(n) * m.b(n)
        return out

    made.use(use)
    for model in made.both():
        model(x_of()).square().sum().backward()
    assert len(seen) == 2
    assert relative_error(seen[1], seen[0]) <= 2e-5


def test_trap_08_retain_grad_on_the_norms_output() -> None:
    made, kept = pair(One(), fused=1), []

    def use(m: Any, x: Tensor) -> Tensor:
        n = m.norm(x)
        n.retain_grad()
        kept.append(n)
        out: Tensor = m.a(n) * m.b(n)
        return out

    made.use(use)
    for model in made.both():
        model(x_of()).square().sum().backward()
    assert kept[0].grad is not None
    assert kept[1].grad is not None
    assert relative_error(kept[1].grad, kept[0].grad) <= 2e-5
