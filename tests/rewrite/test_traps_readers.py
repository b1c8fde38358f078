"""Traps 7, 14, 15 and 22: other readers, readers out of order, views of slices, weights read past the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_convert.plan.model import Outcome
from te_convert.reasons import ReasonCode
from tests.rewrite.trap_samples import WIDTH, Net, One, assert_near, assert_trains_alike, both, pair, x_of

JOINT = "layernorm_a_b"


# ---- 7: another consumer before or after the Linears -----------------------------------------------------------------
def other_first(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    gate = torch.softmax(n[..., :6], -1)
    out: Tensor = m.a(n) * m.b(n) * gate
    return out


def other_last(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    y = m.a(n) * m.b(n)
    out: Tensor = y + n[..., :6]
    return out


def other_between(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    first = m.a(n)
    out: Tensor = first * (n.mean(-1, keepdim=True) + m.b(n))
    return out


@pytest.mark.parametrize("use", [other_first, other_last, other_between])
def test_trap_07_a_consumer_that_nobody_recorded_gets_the_value_and_the_linears_still_fuse(
    use: Callable[[Any, Tensor], Tensor],
) -> None:
    made = pair(One(), fused=1).use(use)
    made.model(x_of())
    assert made.counts(JOINT) == (1, 0)
    assert_trains_alike(made)


@pytest.mark.parametrize("use", [other_first, other_last, other_between])
def test_trap_07_a_consumer_that_was_recorded_keeps_the_norm_apart(use: Callable[[Any, Tensor], Tensor]) -> None:
    made = pair(One(use=use), fused=1)
    site = made.report.site("norm")
    assert (site.outcome, site.replacement) == (Outcome.CONVERTED, "te.LayerNorm")
    assert [r.code for r in site.reasons] == [ReasonCode.FUSION_OTHER_READER]
    assert made.fused == ["a_b"]
    assert made.report.site("a").executed
    assert made.report.site("a").fallbacks == 0
    made.model(x_of())
    assert made.counts("a_b") == (1, 0)
    assert_trains_alike(made)


def test_trap_07_an_in_place_consumer_makes_the_linears_take_the_changed_value() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        n = m.norm(x)
        n[..., 3] = 0.0
        out: Tensor = m.a(n) * m.b(n)
        return out

    made = pair(One(), fused=1).use(use)
    made.model(x_of())
    assert made.counts(JOINT) == (0, 2)
    assert_trains_alike(made)


# ---- 14: readers called otherwise than recorded ----------------------------------------------------------------------
def twice(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    out: Tensor = m.a(n) * m.b(n) + m.a(n) * 2
    return out


def other_order(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    second = m.b(n)
    out: Tensor = second * m.a(n)
    return out


def another_tensor(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    out: Tensor = m.a(n) * m.b(x * 0.5)
    return out


def half_of_it(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    out: Tensor = m.a(n)[:, :2] * m.b(n[:, :2])
    return out


def two_calls_of_the_norm(m: Any, x: Tensor) -> Tensor:
    n, o = m.norm(x), m.norm(x.flip(-1))
    first, second = m.a(n), m.b(o)
    out: Tensor = first * m.b(n) - second * m.a(o)
    return out


def by_keyword(m: Any, x: Tensor) -> Tensor:
    n = m.norm(input=x)
    out: Tensor = m.a(input=n) * m.b(input=n)
    return out


def reader_by_keyword(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    out: Tensor = m.a(input=n) * m.b(input=n)
    return out


def viewed(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x).view(-1, WIDTH)
    out: Tensor = (m.a(n) * m.b(n)).view(*x.shape[:-1], -1)
    return out


@pytest.mark.parametrize(
    ("use", "counts"),
    [
        (twice, (2, 0)),
        (other_order, (1, 0)),
        (another_tensor, (1, 1)),
        (half_of_it, (1, 1)),
        (two_calls_of_the_norm, (2, 0)),
        (by_keyword, (0, 2)),
        (reader_by_keyword, (1, 0)),
        (viewed, (1, 0)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_trap_14_readers_called_otherwise_than_recorded(use: Callable[[Any, Tensor], Tensor], counts: tuple[int, int]) -> None:
    made = pair(One(), fused=1).use(use)
    made.model(x_of())
    assert made.counts(JOINT) == counts
    assert_trains_alike(made)


def test_trap_14_a_reader_that_is_not_called_has_no_effect_on_the_other() -> None:
    made = pair(One(), fused=1).use(lambda m, x: m.a(m.norm(x)))
    made.model(x_of())
    assert made.counts(JOINT) == (1, 0)
    assert_trains_alike(made, unused="b")


def test_trap_14_columns_that_nobody_took_are_not_given_to_another_input() -> None:
    made = pair(One(), fused=1)
    for x in (x_of(), x_of(seed=2), x_of(3, WIDTH, seed=3)):
        for model in made.both():
            model.a(model.norm(x))
        assert_near(made.model(x), made.original(x))


def test_trap_14_readers_of_two_norms_exchanged() -> None:
    """q of one block reads the other block's norm: no fusion's own lazy tensor, so the value."""
    made = pair(Net(), fused=5)

    def run(model: Any, x: Tensor) -> Tensor:
        first, second = model.blocks
        out: Tensor = first.attn(second.norm1(x)) + second.mlp(first.norm2(x)) + first.mlp(first.norm2(x))
        return out

    run(made.model, x_of())
    assert made.counts("blocks.0.attn.layernorm_qkv") == (0, 3)
    assert made.counts("blocks.1.mlp") == (0, 1)
    assert made.counts("blocks.0.mlp") == (1, 0)
    for model in made.both():
        model.forward = run.__get__(model)
    assert_near(made.model(x_of()), made.original(x_of()))


def test_trap_14_a_reader_replaced_by_the_user_gets_the_value() -> None:
    made = pair(One(), fused=1)
    torch.manual_seed(3)
    other = nn.Linear(WIDTH, 6)
    for model in made.both():
        model.b = other
    assert_near(made.model(x_of()), made.original(x_of()))


def test_trap_14_a_lora_wrapper_around_a_reader_works() -> None:
    class Lora(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.base, self.down, self.up = base, nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x) + self.up(self.down(x))
            return out

    made = pair(One(), fused=1)
    for model in made.both():
        model.a = Lora(model.a)
    outputs = [model(x_of()) for model in made.both()]
    assert_near(outputs[1], outputs[0])
    assert made.counts(JOINT) == (1, 0)
    for output in outputs:
        output.square().sum().backward()
    for name in ("a.down.weight", "a.up.weight", "norm.weight"):
        torch.testing.assert_close(
            made.model.get_parameter(name).grad, made.original.get_parameter(name).grad, rtol=1e-4, atol=1e-4
        )


# ---- 15: views of a slice, in-place on a slice -----------------------------------------------------------------------
def heads_first(m: Any, x: Tensor) -> Tensor:
    """fairseq's [T, B, H] → [T, B * heads, d], which only a contiguous tensor allows."""
    n = m.norm(x)
    a, b = m.a(n).view(5, -1, 3), m.b(n).view(5, -1, 3)
    out: Tensor = a * b
    return out


def test_trap_15_a_recorded_view_over_the_slice_makes_the_slices_contiguous() -> None:
    made = pair(One(use=heads_first), x_of(5, 2, WIDTH), fused=1)
    assert made.record(JOINT).decision.contiguous
    made.model(x_of(5, 2, WIDTH))
    assert made.counts(JOINT) == (1, 0)
    assert_trains_alike(made, x_of(5, 2, WIDTH))


def test_trap_15_without_such_a_view_the_slices_are_not_copied() -> None:
    made = pair(One(), fused=1)
    assert not made.record(JOINT).decision.contiguous
    n = made.model.norm(x_of())
    a, b = made.model.a(n), made.model.b(n)
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def in_place_on_slices(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    a, b = m.a(n), m.b(n)
    a *= 2.0
    b[..., 0] = 1.0
    out: Tensor = a * b
    return out


@pytest.mark.parametrize("recorded", [True, False])
def test_trap_15_in_place_on_a_slice_changes_that_slice_alone(recorded: bool) -> None:
    made = pair(One(use=in_place_on_slices if recorded else both), fused=1).use(in_place_on_slices)
    made.model(x_of())
    assert made.counts(JOINT) == (1, 0)
    assert_trains_alike(made)


# ---- 22: the weight read past the module -----------------------------------------------------------------------------
def past_the_reader(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    out: Tensor = F.linear(n, m.a.weight, m.a.bias) * m.b(n)
    return out


def test_trap_22_a_recorded_bypass_keeps_the_linear_out_of_the_fusion() -> None:
    made = pair(nn.Sequential(One(use=past_the_reader), nn.LayerNorm(6), nn.Linear(6, 3)), fused=1)
    assert made.report.site("0.a").outcome is Outcome.REFUSED
    assert made.report.site("0.norm").outcome is Outcome.CONVERTED
    assert made.fused == ["2.layernorm_2"]
    assert_trains_alike(made)


def test_trap_22_a_bypass_that_nobody_recorded_computes_and_trains_as_the_original() -> None:
    made = pair(One(), fused=1).use(past_the_reader)
    made.model(x_of())
    assert made.counts(JOINT) == (1, 0)
    assert_trains_alike(made)


def test_trap_22_timm_beit_reads_qkv_past_the_module_and_its_mlp_is_looked_at_alone() -> None:
    import timm

    model = timm.create_model("beit_base_patch16_224", img_size=32, embed_dim=32, depth=1, num_heads=4).eval()
    made = pair(model, x_of(2, 3, 32, 32))
    assert made.report.site("blocks.0.attn.qkv").outcome is Outcome.REFUSED
    assert made.report.site("blocks.0.norm1").outcome is Outcome.CONVERTED
    assert made.report.site("blocks.0.norm2").outcome is Outcome.FUSED
    assert made.report.site("blocks.0.mlp.fc1").outcome is Outcome.FUSED
    assert_trains_alike(made, x_of(2, 3, 32, 32), 1e-4)
