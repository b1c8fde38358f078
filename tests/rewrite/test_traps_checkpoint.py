"""Trap 5: activation checkpoints of both kinds around the layer, the attention alone and the MLP alone."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from te_convert.reasons import ReasonCode
from tests.rewrite.trap_samples import (
    MLP,
    WIDTH,
    Attention,
    Net,
    One,
    Pair,
    assert_same_gradients,
    assert_trains_alike,
    gradients,
    lazies_of,
    pair,
    reentrant,
    replayed,
    x_of,
)

KINDS = pytest.mark.parametrize("kind", [reentrant, replayed], ids=["reentrant", "replayed"])
QKV, FFN = "blocks.0.attn.layernorm_qkv", "blocks.0.mlp"


def checkpointed(where: str, kind: Callable[..., Any]) -> Pair:
    made = pair(Net(), fused=5)
    for model in made.both():
        if where == "layer":
            model.around = kind
        for block in model.blocks if where != "layer" else ():
            block.around = {where: kind}
    return made


@KINDS
@pytest.mark.parametrize("where", ["layer", "attn", "mlp", "norm1"])
@pytest.mark.parametrize("training", [True, False])
def test_trap_05_gradients_under_a_checkpoint(where: str, kind: Callable[..., Any], training: bool) -> None:
    made = checkpointed(where, kind)
    for model in made.both():
        model.train(training)
    assert_trains_alike(made)


@pytest.mark.parametrize(
    ("where", "kind", "qkv", "ffn"),
    [
        ("layer", reentrant, (2, 0), (2, 0)),
        # a replay stops once it has what backward asks for, which is before the end of the block's last run
        ("layer", replayed, (2, 0), (1, 0)),
        # the lazy tensor enters the checkpoint: replayed with it, or (reentrant) turned into a value by autograd itself
        ("attn", replayed, (2, 0), (1, 0)),
        ("attn", reentrant, (0, 6), (1, 0)),
        ("mlp", replayed, (1, 0), (1, 0)),
        ("mlp", reentrant, (1, 0), (0, 2)),
    ],
)
def test_trap_05_what_ran_under_a_checkpoint(
    where: str, kind: Callable[..., Any], qkv: tuple[int, int], ffn: tuple[int, int]
) -> None:
    made = checkpointed(where, kind)
    made.model(x_of().requires_grad_()).square().sum().backward()
    assert made.counts(QKV) == qkv
    assert made.counts(FFN) == ffn


def test_trap_05_a_replay_does_not_meet_the_columns_of_the_first_run() -> None:
    """Backward twice through one forward: the second replay gets the same lazy tensor once more."""
    made = checkpointed("attn", replayed)
    for model in made.both():
        loss = model(x_of().requires_grad_()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_trains_alike(made)


def reader_before(m: Any, x: Tensor) -> Tensor:
    """q runs before the checkpoint, k and v inside: the replay asks for k and v alone."""
    n = m.norm(x)
    first = m.a(n)
    out: Tensor = replayed(lambda n: first * m.b(n), n)
    return out


def reader_after(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    first = replayed(m.a, n)
    out: Tensor = first * m.b(n)
    return out


def value_inside(m: Any, x: Tensor) -> Tensor:
    """Something that nobody recorded takes the value inside: the replay finds it computed."""
    n = m.norm(x)
    out: Tensor = replayed(lambda n: m.a(n) * m.b(n) * n[..., :6].sigmoid(), n)
    return out


def value_before(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    gate = n[..., :6].sigmoid()
    out: Tensor = replayed(lambda n: m.a(n) * m.b(n) * gate, n)
    return out


def norm_inside(m: Any, x: Tensor) -> Tensor:
    n = replayed(m.norm, x)
    out: Tensor = m.a(n) * m.b(n)
    return out


def norm_inside_reentrant(m: Any, x: Tensor) -> Tensor:
    n = reentrant(m.norm, x)
    out: Tensor = m.a(n) * m.b(n) + n[..., :6]
    return out


SHAPES = [reader_before, reader_after, value_inside, value_before, norm_inside, norm_inside_reentrant]


@pytest.mark.parametrize("use", SHAPES, ids=lambda use: use.__name__)
def test_trap_05_checkpoints_around_parts_of_a_group(use: Callable[[Any, Tensor], Tensor]) -> None:
    assert_trains_alike(pair(One(), fused=1).use(use))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@KINDS
def test_trap_05_a_checkpoint_that_was_recorded(kind: Callable[..., Any]) -> None:
    model = Net()
    model.around = kind
    made = pair(model, fused=5)
    made.model(x_of().requires_grad_()).square().sum().backward()
    assert made.counts(QKV) == (2, 0)
    assert_trains_alike(made)


def test_trap_05_checkpoint_sequential_over_blocks() -> None:
    made = pair(Net(blocks=4), fused=9)

    def run(model: Any, x: Tensor) -> Tensor:
        h = checkpoint_sequential(list(model.blocks), 2, model.inp(x), use_reentrant=False)
        out: Tensor = model.head(model.norm(h))
        return out

    assert_trains_alike(made, run=run)


class PostNorm(nn.Module):
    """BERT's order: the norm ends the block, its readers are in the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm1, self.mlp, self.norm2 = Attention(), nn.LayerNorm(WIDTH), MLP(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        out: Tensor = self.norm2(x + self.mlp(x))
        return out


class Lateral(nn.Module):
    """The norm is in one repeated block and its only readers are in another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), MLP()])
        self.around: Callable[..., Any] = lambda module, x: module(x)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = self.around(step, x)
        return x


@KINDS
def test_trap_05_a_norm_read_in_another_repeated_block_is_not_deferred(kind: Callable[..., Any]) -> None:
    model = nn.Sequential(Lateral(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))
    made = pair(model, fused=1)
    assert [r.code for r in made.report.site("0.steps.0.1").reasons] == [ReasonCode.FUSION_CROSSES_BLOCK]
    for each in made.both():
        each[0].around = kind
    assert_trains_alike(made)


@KINDS
def test_trap_05_a_post_norm_stack_under_a_checkpoint(kind: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    made = pair(nn.Sequential(*(PostNorm() for _ in range(2))), fused=2)  # q, k, v of each block share a plain input

    def run(model: Any, x: Tensor) -> Tensor:
        for block in model:
            x = kind(block, x)
        return x

    assert [name.rpartition(".")[2] for name in made.fused] == ["qkv", "qkv"]
    run(made.model, x_of().requires_grad_()).sum().backward()
    assert made.counts("0.attn.qkv") == (2, 0)
    assert_trains_alike(made, run=run)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@KINDS
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_trap_05_transformers_own_gradient_checkpointing(name: str, kind: Callable[..., Any]) -> None:
    from tests.verify.model_zoo import build

    model, inputs = build(name)
    made = pair(model, inputs)
    for each in made.both():
        each.gradient_checkpointing_enable({"use_reentrant": kind is reentrant})
        each.train()
        torch.manual_seed(0)
        each(**inputs, use_cache=False).logits.square().mean().backward()
    assert sum(made.counts(name)[0] for name in made.fused) >= 2 * len(made.fused) - 1
    assert_same_gradients(gradients(made.model), gradients(made.original))


@KINDS
def test_trap_05_nothing_is_left_behind_after_a_checkpointed_step(kind: Callable[..., Any]) -> None:
    made = checkpointed("attn", kind)
    lazies = lazies_of(made.model.blocks[0].norm1)
    made.model(x_of().requires_grad_()).sum().backward()
    gc.collect()
    assert [lazy() for lazy in lazies] == [None]
