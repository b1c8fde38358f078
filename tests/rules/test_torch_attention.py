"""nn.MultiheadAttention: what it becomes, and every form that te.MultiheadAttention lacks with its reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from te_convert.plan.model import Outcome, Plan
from te_convert.replacements.specs import MultiheadAttentionSpec
from te_convert.weights.ops import Move, Rows, WeightMap
from tests.rewrite.block_samples import MEMORY, WIDTH, Attends, X, floats
from tests.rules.rule_cases import Wrapped, codes, plan_of

SIZE = WIDTH


def plan(model: nn.Module, *inputs: Any, **options: Any) -> Plan:
    return plan_of(model.eval(), inputs or (X,), **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention(batch_first: bool, bias: bool) -> None:
    (fusion,) = plan(Attends(batch_first=batch_first, bias=bias, dropout=0.25)).fusions
    layout = "bshd" if batch_first else "sbhd"
    assert fusion.spec == MultiheadAttentionSpec(SIZE, 2, 0.25, bias, "self", layout, "float32")
    names = ("weight", "bias") if bias else ("weight",)
    moves = [(Move(f"in_proj_{n}", f"qkv.{n}"), Move(f"out_proj.{n}", f"proj.{n}")) for n in names]
    assert fusion.weights == WeightMap(tuple(op for pair in moves for op in pair))
    assert (fusion.fqn, fusion.scope, fusion.rule, fusion.precision) == ("attn", "attn", "torch-attention", "recipe")
    assert [(m.role, m.fqn) for m in fusion.members] == [("owner", "attn"), ("part", "attn.out_proj")]


def test_cross_attention() -> None:
    (fusion,) = plan(Attends(), X, MEMORY).fusions
    assert fusion.spec == MultiheadAttentionSpec(SIZE, 2, 0.0, True, "cross", "bshd", "float32")
    assert fusion.weights.ops[:2] == (
        Rows("in_proj_weight", "query_layer.weight", 0, SIZE, 3 * SIZE),
        Rows("in_proj_weight", "key_value.weight", SIZE, 2 * SIZE, 3 * SIZE),
    )


def test_both_members_are_fused_sites() -> None:
    found = plan(Attends())
    assert [(d.fqn, d.outcome, d.fused_into) for d in found.decisions] == [
        ("attn", Outcome.FUSED, "attn"),
        ("attn.out_proj", Outcome.FUSED, "attn"),
    ]


def test_a_recipe_that_cannot_take_the_width() -> None:
    assert plan(Attends(), recipe="fp8").fusions[0].precision == "high"
    wide = nn.MultiheadAttention(32, 2, batch_first=True)
    x = floats(2, 4, 32)
    assert plan_of(wide.eval(), (x, x, x, None, False), recipe="fp8").fusions[0].precision == "recipe"


class By(nn.Module):
    """Calls in many ways."""

    def __init__(self, call: Callable[[Any, Tensor, Tensor], Any], **options: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 2, **{"batch_first": True, **options})
        self.call = call

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        return self.call(self.attn, x, memory)[0]


PAD, MASK = torch.zeros(2, 5, dtype=torch.bool), torch.zeros(5, 5, dtype=torch.bool)
CALLS: dict[str, tuple[str, Callable[[Any, Tensor, Tensor], Any]]] = {
    "positional": ("self", lambda a, x, m: a(x, x, x, None, False)),
    "positional mask": ("self", lambda a, x, m: a(x, x, x, PAD, False, MASK)),
    "keywords": ("self", lambda a, x, m: a(query=x, key=x, value=x, need_weights=False)),
    "keywords in another order": ("cross", lambda a, x, m: a(value=m, need_weights=False, key=m, query=x)),
    "masks first": ("self", lambda a, x, m: a(key_padding_mask=PAD, attn_mask=MASK, key=x, value=x, query=x, need_weights=False)),
    "masks between": ("self", lambda a, x, m: a(x, x, attn_mask=MASK, value=x, need_weights=False)),
    "no masks by name": ("cross", lambda a, x, m: a(x, m, value=m, key_padding_mask=None, need_weights=False)),
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_way_of_calling_it(name: str) -> None:
    kind, call = CALLS[name]
    (fusion,) = plan(By(call), X, MEMORY).fusions
    assert isinstance(fusion.spec, MultiheadAttentionSpec)
    assert fusion.spec.attention_type == kind


class Own(nn.MultiheadAttention):
    """A subclass that computes something else."""

    def forward(self, *args: Any, **options: Any) -> Any:
        y, weights = super().forward(*args, **options)
        return 2 * y, weights


class Extra(nn.MultiheadAttention):
    """A subclass with the same forward and more to hold."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.ones(3))


class Buffered(nn.MultiheadAttention):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("seen", torch.zeros(1))


class Named(nn.MultiheadAttention):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.proj = nn.Identity()


def replaced(cls: type[nn.MultiheadAttention]) -> nn.Module:
    model = Attends()
    model.attn = cls(WIDTH, 2, batch_first=True)
    return model


def changed(change: Callable[[Any], Any], **options: Any) -> nn.Module:
    model = Attends(**options)
    change(model.attn)
    return model


def half_biased(attn: Any) -> None:
    attn.out_proj.bias = None


def hooked(attn: Any) -> None:
    attn.out_proj.register_forward_hook(lambda *_: None)


def patched(attn: Any) -> None:
    attn.forward = attn.forward


def special(attn: Any) -> None:
    attn.out_proj.weight = nn.Parameter(attn.out_proj.weight.detach().as_subclass(Wrapped))


def mixed_dtype(attn: Any) -> None:
    attn.out_proj.bias = nn.Parameter(attn.out_proj.bias.detach().double())


def parametrized(attn: Any) -> None:
    parametrizations.weight_norm(attn.out_proj)


def called(call: Callable[[Any, Tensor, Tensor], Any], **options: Any) -> nn.Module:
    return By(call, **options)


NARROW = floats(2, 3, 8)
MISSES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], list[str]]] = {
    "kdim": (lambda: Attends(kdim=8, vdim=8), (X, NARROW), ["attention.form"]),
    "bias_kv": (lambda: Attends(add_bias_kv=True), (X,), ["attention.form"]),
    "zero_attn": (lambda: Attends(add_zero_attn=True), (X,), ["attention.form"]),
    "everything": (lambda: Attends(kdim=8, vdim=8, add_zero_attn=True), (X, NARROW), ["attention.form", "attention.form"]),
    "one bias": (lambda: changed(half_biased), (X,), ["attention.form"]),
    "own forward": (lambda: replaced(Own), (X,), []),
    "own parameter": (lambda: replaced(Extra), (X,), ["block.form"]),
    "own buffer": (lambda: replaced(Buffered), (X,), ["block.form"]),
    "child with a name of TE's": (lambda: replaced(Named), (X,), ["block.form"]),
    "hooks inside": (lambda: changed(hooked), (X,), ["module.hooks"]),
    "forward replaced": (lambda: changed(patched), (X,), ["block.form"]),
    "tensor subclass": (lambda: changed(special), (X,), ["block.form"]),
    "keys and values apart": (
        lambda: called(lambda a, x, m: a(x, m, m + 1, need_weights=False)),
        (X, MEMORY),
        ["attention.mixed-use"],
    ),
    "values alone": (lambda: called(lambda a, x, m: a(x, x, x + 1, need_weights=False)), (X, MEMORY), ["attention.mixed-use"]),
    "weights asked for": (lambda: called(lambda a, x, m: a(x, x, x)), (X, MEMORY), ["attention.weights-asked"]),
}


@pytest.mark.parametrize("name", sorted(MISSES))
def test_near_misses(name: str) -> None:
    make, inputs, expected = MISSES[name]
    found = plan(make(), *inputs)
    assert found.fusions == ()
    decision = found.get("attn")
    assert (decision.outcome, codes(decision)) == (Outcome.NO_MATCH, expected)


def test_float64_and_parametrized_are_refused_too() -> None:
    for model, x in ((Attends().double(), X.double()), (changed(parametrized), X)):
        assert plan(model, x).fusions == ()


def test_self_and_cross_use_of_one_module() -> None:
    found = plan_of(Attends().eval(), [(X, MEMORY), (X, X + 0), (X,)])
    assert found.fusions == ()
    assert codes(found.get("attn")) == ["attention.mixed-use"]


def test_a_shared_weight_that_would_become_two() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
            self.b.in_proj_weight = self.a.in_proj_weight

        def forward(self, x: Tensor, memory: Tensor) -> Any:
            return self.a(x, memory, memory, need_weights=False)[0] + self.b(x, x, x, need_weights=False)[0]

    found = plan(Two(), X, MEMORY)
    assert [fusion.fqn for fusion in found.fusions] == ["b"]
    assert codes(found.get("a")) == ["block.form"]


def test_never_called() -> None:
    model = Attends()
    model.spare = nn.MultiheadAttention(WIDTH, 2)
    found = plan(model)
    assert [fusion.fqn for fusion in found.fusions] == ["attn"]
    assert "attention.mixed-use" in codes(found.get("spare"))


def test_excluded_or_without_fusions() -> None:
    for options in ({"exclude": ("attn",)}, {"exclude": ("attn.out_proj",)}, {"include": ("other",)}, {"fuse": False}):
        assert plan(Attends(), **options).fusions == ()
