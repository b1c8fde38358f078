"""torch's encoder and decoder layers: what they become, and every layer that stays in parts with its reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_convert.plan.model import Outcome, Plan
from te_convert.replacements.specs import TransformerLayerSpec
from te_convert.weights.ops import Fill, Move, Rows
from tests.rewrite.block_samples import FFN, HEADS, MEMORY, WIDTH, X, decoder_layer, encoder_layer, floats
from tests.rules.rule_cases import Wrapped, codes, plan_of

SPEC = TransformerLayerSpec(
    WIDTH, FFN, HEADS, 1e-5, True, "relu", "LayerNorm", False, True, False, "encoder", "bshd", "no_mask", "float32"
)


def plan(layer: nn.Module, *inputs: Any, **options: Any) -> Plan:
    return plan_of(nn.Sequential(layer).eval(), inputs or (X,), **options)


class Decodes(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        return self.layer(x, memory)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_encoder_layers(batch_first: bool, norm_first: bool, bias: bool) -> None:
    layer = encoder_layer(batch_first=batch_first, norm_first=norm_first, bias=bias, layer_norm_eps=1e-3)
    (fusion,) = plan(layer).fusions
    layout = "bshd" if batch_first else "sbhd"
    assert fusion.spec == replace(SPEC, bias=bias, eps=1e-3, attn_input_format=layout, post_layernorm=not norm_first)
    assert (fusion.rule, fusion.fqn, fusion.scope, fusion.approximation) == ("torch-encoder-layer", "0", "0", "")
    parts = ["self_attn", "self_attn.out_proj", "linear1", "linear2", "norm1", "norm2"]
    assert [m.fqn for m in fusion.members] == ["0", *(f"0.{name}" for name in parts)]
    assert [m.role for m in fusion.members] == ["owner", *["part"] * len(parts)]


def destinations(plan_: Plan) -> dict[str, str]:
    (fusion,) = plan_.fusions
    return {op.source: op.dest for op in fusion.weights.ops if isinstance(op, Move) and op.source.startswith("norm")}


def test_each_norm_goes_to_what_follows_it() -> None:
    attention, cross, mlp = ("self_attention.layernorm_qkv.layer_norm_", "inter_attention.layernorm_query.layer_norm_",
                             "layernorm_mlp.layer_norm_")  # fmt: skip
    assert destinations(plan(encoder_layer(norm_first=True)))["norm1.weight"] == f"{attention}weight"
    assert destinations(plan(encoder_layer(norm_first=True)))["norm2.bias"] == f"{mlp}bias"
    assert destinations(plan(encoder_layer()))["norm1.weight"] == f"{mlp}weight"
    assert destinations(plan(encoder_layer()))["norm2.bias"] == "layernorm.bias"
    for norm_first, places in ((True, (attention, cross, mlp)), (False, (cross, mlp, "layernorm."))):
        found = destinations(plan_of(Decodes(decoder_layer(norm_first=norm_first)).eval(), (X, MEMORY)))
        assert [found[f"norm{index}.weight"] for index in (1, 2, 3)] == [f"{place}weight" for place in places]


@pytest.mark.parametrize("norm_first", [True, False])
def test_decoder_layers(norm_first: bool) -> None:
    found = plan_of(Decodes(decoder_layer(norm_first=norm_first)).eval(), (X, MEMORY))
    (fusion,) = found.fusions
    assert fusion.spec == replace(SPEC, layer_type="decoder", post_layernorm=not norm_first)
    assert fusion.rule == "torch-decoder-layer"
    rows = [op for op in fusion.weights.ops if isinstance(op, Rows)]
    assert [(op.source, op.dest, op.start, op.count) for op in rows if op.source.endswith("weight")] == [
        ("multihead_attn.in_proj_weight", "inter_attention.layernorm_query.weight", 0, WIDTH),
        ("multihead_attn.in_proj_weight", "inter_attention.key_value.weight", WIDTH, 2 * WIDTH),
    ]


def test_a_missing_norm_bias_is_a_zero() -> None:
    (fusion,) = plan(encoder_layer(norm_first=True, bias=False)).fusions
    assert [op for op in fusion.weights.ops if isinstance(op, Fill)] == [
        Fill("self_attention.layernorm_qkv.layer_norm_bias", 0.0, WIDTH),
        Fill("layernorm_mlp.layer_norm_bias", 0.0, WIDTH),
    ]


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        ("relu", "relu"),
        (nn.SiLU(), "silu"),
        (nn.GELU(approximate="tanh"), "gelu"),
        (lambda x: x * torch.sigmoid(1.702 * x), "qgelu"),
        (lambda x: torch.relu(x).square(), "srelu"),
    ],
)
def test_activations(activation: Any, name: str) -> None:
    (fusion,) = plan(encoder_layer(activation=activation)).fusions
    assert fusion.spec == replace(SPEC, activation=name)


@pytest.mark.parametrize("activation", ["gelu", nn.GELU()])
def test_the_exact_gelu_needs_permission(activation: Any) -> None:
    layer = encoder_layer(activation=activation)
    found = plan(layer)
    assert "0" not in [fusion.fqn for fusion in found.fusions]
    assert codes(found.get("0")) == ["activation.gelu-erf"]
    (fusion,) = (found := plan(layer, allow=("gelu-tanh",))).fusions
    assert (fusion.spec, fusion.approximation) == (replace(SPEC, activation="gelu"), "gelu-tanh")
    assert codes(found.get("0")) == ["activation.approximated"]


class OwnForward(nn.TransformerEncoderLayer):
    def forward(self, src: Tensor, *args: Any, **options: Any) -> Tensor:
        return 2 * super().forward(src, *args, **options)


class OwnBlock(nn.TransformerEncoderLayer):
    """A subclass that looks at what its attention gives."""

    def _sa_block(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        self.seen = super()._sa_block(x, *args, **options)
        return self.seen


class OwnAttention(nn.MultiheadAttention):
    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options)


class NoAttention(nn.Module):
    batch_first = True

    def forward(self, query: Tensor, *_: Any, **__: Any) -> Any:
        return query, None


class StochasticDepth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 if self.training else x


def subclass(cls: type[nn.Module]) -> nn.Module:
    return cls(WIDTH, HEADS, FFN, dropout=0.0, batch_first=True)


def changed(**parts: nn.Module) -> Any:
    layer = encoder_layer()
    for name, part in parts.items():
        setattr(layer, name, part)
    return layer


def with_buffer() -> Any:
    layer = encoder_layer()
    layer.register_buffer("seen", torch.zeros(1))
    return layer


def with_parameter() -> Any:
    layer = encoder_layer()
    layer.gain = nn.Parameter(torch.ones(2))
    return layer


def with_hook(name: str) -> Any:
    layer = encoder_layer()
    layer.get_submodule(name).register_forward_pre_hook(lambda *_: None)
    return layer


def wrapped() -> Any:
    layer: Any = encoder_layer()
    layer.linear1.weight = nn.Parameter(layer.linear1.weight.detach().as_subclass(Wrapped))
    return layer


class Doubled(nn.Linear):
    pass


MISSES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "dropout": (lambda: encoder_layer(dropout=0.1), ["block.dropout"]),
    "dropout of the attention": (
        lambda: changed(self_attn=nn.MultiheadAttention(WIDTH, 2, 0.1, batch_first=True)),
        ["block.dropout"],
    ),
    "hook on a linear": (lambda: with_hook("linear1"), ["module.hooks"]),
    "hook on the attention": (lambda: with_hook("self_attn"), ["module.hooks"]),
    "hook on the output projection": (lambda: with_hook("self_attn.out_proj"), ["module.hooks"]),
    "eps": (lambda: changed(norm2=nn.LayerNorm(WIDTH, 1e-3)), ["block.form"]),
    "RMSNorm": (lambda: changed(norm1=nn.RMSNorm(WIDTH, 1e-5)), ["block.form"]),
    "norm without weight": (lambda: changed(norm1=nn.LayerNorm(WIDTH, elementwise_affine=False)), ["block.form"]),
    "a linear without bias": (lambda: changed(linear2=nn.Linear(FFN, WIDTH, bias=False)), ["block.form"]),
    "another linear": (lambda: changed(linear1=Doubled(WIDTH, FFN)), ["block.form"]),
    "another attention": (lambda: changed(self_attn=NoAttention()), ["block.form"]),
    "attention with its own forward": (lambda: changed(self_attn=OwnAttention(WIDTH, 2, batch_first=True)), ["block.form"]),
    "zero attention": (
        lambda: changed(self_attn=nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_zero_attn=True)),
        ["attention.form"],
    ),
    "something for a dropout": (lambda: changed(dropout2=StochasticDepth()), ["block.form"]),
    "another activation": (lambda: encoder_layer(activation=nn.Mish()), ["block.form"]),
    "unknown activation": (lambda: encoder_layer(activation=lambda x: x + 1), ["block.form"]),
    "activation that learns": (lambda: encoder_layer(activation=nn.PReLU()), ["block.form"]),
    "buffer": (with_buffer, ["block.form"]),
    "parameter": (with_parameter, ["block.form"]),
    "tensor subclass": (wrapped, ["block.form"]),
    "float64": (lambda: encoder_layer().double(), ["dtype.float64"]),
    "several": (lambda: changed(norm2=nn.LayerNorm(WIDTH, 1e-3), dropout=nn.Dropout(0.5)), ["block.dropout", "block.form"]),
}


@pytest.mark.parametrize("name", sorted(MISSES))
def test_near_misses(name: str) -> None:
    make, expected = MISSES[name]
    layer = make()
    dtype = next(layer.parameters()).dtype
    found = plan(layer, X.to(dtype))
    assert "0" not in [fusion.fqn for fusion in found.fusions]
    decision = found.get("0")
    assert (decision.outcome, codes(decision)) == (Outcome.NO_MATCH, expected)


@pytest.mark.parametrize("cls", [OwnForward, OwnBlock])
def test_a_subclass_with_its_own_code_is_not_matched(cls: type[nn.Module]) -> None:
    found = plan(subclass(cls))
    assert "0" not in [decision.fqn for decision in found.decisions]
    assert "0" not in [fusion.fqn for fusion in found.fusions]


def test_a_subclass_with_torchs_code_is_matched() -> None:
    class Same(nn.TransformerEncoderLayer):
        """A constructor of its own."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.note = "mine"

    assert [fusion.spec for fusion in plan(subclass(Same)).fusions] == [SPEC]


def test_with_dropout_the_parts_convert() -> None:
    found = plan(encoder_layer(dropout=0.1))
    assert [(fusion.fqn, fusion.spec.name) for fusion in found.fusions] == [("0.self_attn", "te.MultiheadAttention")]
    outcomes = {decision.fqn: decision.outcome for decision in found.decisions}
    assert all(outcomes[f"0.{name}"] is Outcome.CONVERTED for name in ("linear1", "linear2", "norm1", "norm2"))


def test_attentions_of_a_decoder_layer_that_differ() -> None:
    layer = decoder_layer()
    layer.multihead_attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    found = plan_of(Decodes(layer).eval(), (X, MEMORY))
    assert codes(found.get("layer")) == ["block.form"]
    assert [fusion.fqn for fusion in found.fusions] == ["layer.self_attn", "layer.multihead_attn"]


def test_a_layer_that_nothing_calls() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = encoder_layer(), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Any:
            return self.out(x)

    found = plan_of(Idle(), (X,))
    assert found.fusions == ()
    assert codes(found.get("layer")) == ["module.never-called"]


def test_a_recipe_and_a_plan_without_weights() -> None:
    assert plan(encoder_layer(), recipe="fp8").fusions[0].precision == "high"
    wide = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    assert plan(wide, floats(1, 4, 32), recipe="fp8").fusions[0].precision == "recipe"
    assert [fusion.spec for fusion in plan_of(encoder_layer().to("meta"), None).fusions] == [SPEC]
