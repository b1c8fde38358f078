"""The norm-linear rule: a norm read by Linears alone becomes one te.LayerNormLinear per set of equal Linears."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_convert.plan.model import Outcome
from te_convert.replacements.specs import LayerNormLinearSpec
from te_convert.weights.ops import Concat, Fill, Move, Transpose
from tests.rewrite.trap_parts import LN, LayerNorm, Llama
from tests.rewrite.trap_samples import MLP, WIDTH, One, assert_same_gradients, gradients, loss_of, pair
from tests.rules.fusion_cases import (
    Mistake,
    assert_caught,
    attribute,
    codes_of,
    fusion_of,
    outcomes_of,
    planned,
    proved,
    rolled,
    zeroed,
)

JOINT = "layernorm_a_b"


def conv1d(out: int, width: int = WIDTH) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(out, width)  # type: ignore[no-any-return]


def with_linears(a: nn.Module, b: nn.Module, norm: nn.Module | None = None) -> One:
    model = One(norm=norm)
    model.add_module("a", a)
    model.add_module("b", b)
    return model


NORMS: dict[str, tuple[Callable[[], nn.Module], str, bool, float]] = {
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH, eps=1e-3), "LayerNorm", False, 1e-3),
    "LayerNorm without bias": (lambda: nn.LayerNorm(WIDTH, bias=False), "LayerNorm", False, 1e-5),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH, eps=1e-6), "RMSNorm", False, 1e-6),
    "Llama": (lambda: Llama(WIDTH), "RMSNorm", False, 1e-6),
    "Gemma, 1 + w": (lambda: LayerNorm(WIDTH, offset=1.0), "RMSNorm", True, 1e-6),
    "odd parameter names": (lambda: LN(WIDTH), "LayerNorm", False, 1e-5),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_every_norm_with_and_without_bias(name: str, bias: bool) -> None:
    make, kind, plus_one, eps = NORMS[name]
    plan = proved(with_linears(nn.Linear(WIDTH, 6, bias=bias), nn.Linear(WIDTH, 6, bias=bias), make()))
    fusion = fusion_of(plan, "norm-linear")
    spec = fusion.spec
    assert isinstance(spec, LayerNormLinearSpec)
    assert (spec.in_features, spec.out_features, spec.bias, spec.normalization, spec.zero_centered_gamma) == (
        WIDTH,
        12,
        bias,
        kind,
        plus_one,
    )
    assert spec.eps == pytest.approx(eps, rel=1e-3)
    assert fusion.fqn == JOINT
    assert set(outcomes_of(plan).values()) == {Outcome.FUSED}
    assert {plan.get(name).fused_into for name in ("norm", "a", "b")} == {JOINT}


def test_the_weight_map_names_every_tensor() -> None:
    fusion = fusion_of(planned(One()), "norm-linear")
    assert fusion.weights.ops == (
        Move("norm.weight", "layer_norm_weight"),
        Move("norm.bias", "layer_norm_bias"),
        Concat(("a.weight", "b.weight"), "weight", (6, 6)),
        Concat(("a.bias", "b.bias"), "bias", (6, 6)),
    )
    bare = fusion_of(planned(One(norm=nn.LayerNorm(WIDTH, bias=False))), "norm-linear")
    assert bare.weights.ops[1] == Fill("layer_norm_bias", 0.0, WIDTH)


def test_one_linear_alone_keeps_its_parameter_object() -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))
    fusion = fusion_of(proved(model), "norm-linear")
    assert fusion.fqn == "1.layernorm_1"
    assert fusion.weights.ops[2:] == (Move("1.weight", "weight"), Move("1.bias", "bias"))


def grouped_query(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    q, k, v = m.q_proj(n).unflatten(-1, (4, 4)), m.k_proj(n).unflatten(-1, (2, 4)), m.v_proj(n).unflatten(-1, (2, 4))
    k, v = k.repeat_interleave(2, -2), v.repeat_interleave(2, -2)
    scores = torch.softmax(torch.einsum("bthd,bshd->bhts", q, k), -1)
    return torch.einsum("bhts,bshd->bthd", scores, v).flatten(-2)


def gqa() -> nn.Module:
    torch.manual_seed(0)
    linears = {"q_proj": nn.Linear(WIDTH, 16), "k_proj": nn.Linear(WIDTH, 8), "v_proj": nn.Linear(WIDTH, 8)}
    model = One(use=grouped_query, **linears)
    del model.a, model.b
    return model


@pytest.mark.report("NVIDIA/TransformerEngine#432")
def test_grouped_query_sizes() -> None:
    fusion = fusion_of(proved(gqa()), "norm-linear")
    assert fusion.fqn == "layernorm_qkv"
    assert fusion.weights.ops[2] == Concat(("q_proj.weight", "k_proj.weight", "v_proj.weight"), "weight", (16, 8, 8))


def test_conv1d_weights_are_transposed() -> None:
    fusion = fusion_of(proved(with_linears(conv1d(6), conv1d(6))), "norm-linear")
    assert fusion.weights.ops[2] == Concat(("a.weight", "b.weight"), "weight", (6, 6), transposed=True)
    alone = nn.Sequential(nn.LayerNorm(WIDTH), conv1d(WIDTH))  # square: the shape does not tell the layout
    assert fusion_of(proved(alone), "norm-linear").weights.ops[2] == Transpose("1.weight", "weight")


def test_linears_that_differ_get_matrices_of_their_own_and_share_the_norm() -> None:
    plan = proved(with_linears(nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6, bias=False)), fused=2)
    assert {fusion.fqn for fusion in plan.fusions} == {"layernorm_a", "layernorm_b"}
    plan = proved(with_linears(nn.Linear(WIDTH, 6), conv1d(6)), fused=2)
    assert {fusion.fqn for fusion in plan.fusions} == {"layernorm_a", "layernorm_b"}


@pytest.mark.parametrize("frozen", [("a",), ("norm",), ("a", "b"), ("norm", "a", "b"), ("a.bias",)])
def test_frozen_parameters_stay_frozen(frozen: tuple[str, ...]) -> None:
    model = One()
    for name in frozen:
        target = model.get_parameter(name) if "." in name else model.get_submodule(name)
        target.requires_grad_(False)
    mixed = {"a", "a.bias"} & set(frozen) and "b" not in frozen
    proved(model, fused=2 if mixed else 1)


def test_a_head_tied_to_the_embedding_keeps_its_tie() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.norm, self.head = nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.norm(x + self.embed.weight.mean(0)))
            return out

    plan = proved(Tied())
    assert fusion_of(plan, "norm-linear").weights.ops[2] == Move("head.weight", "weight")


def test_two_tied_linears_get_matrices_of_their_own() -> None:
    model = One()
    model.b.weight = model.a.weight
    assert {fusion.fqn for fusion in proved(model, fused=2).fusions} == {"layernorm_a", "layernorm_b"}


def parallel(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    out: Tensor = x[..., :6] + m.a(n) * m.b(n) + m.mlp(n)[..., :6]
    return out


def test_attention_and_mlp_that_share_one_norm() -> None:
    """GPT-J, Falcon, Cohere: the MLP as a whole and the rest of the readers, on one norm."""
    plan = proved(One(use=parallel, mlp=MLP()), fused=2)
    assert {(fusion.fqn, fusion.rule) for fusion in plan.fusions} == {("mlp", "norm-mlp"), (JOINT, "norm-linear")}


_PARALLEL: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "gptj": (
        "GPTJ",
        {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 8, "n_positions": 32},
        "transformer.h.0.ln_1",
        "transformer.h.0.attn.q_proj",
        "transformer.h.0.mlp.fc_in",
    ),
    "falcon": (
        "Falcon",
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
        "transformer.h.0.input_layernorm",
        "transformer.h.0.self_attention.query_key_value",
        "transformer.h.0.mlp.dense_h_to_4h",
    ),
    "cohere": (
        "Cohere",
        {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 64,
        },
        "model.layers.0.input_layernorm",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.gate_proj",
    ),
}


@pytest.mark.parametrize("name", _PARALLEL)
def test_parallel_blocks_of_transformers(name: str) -> None:
    import transformers

    prefix, config, *members = _PARALLEL[name]
    torch.manual_seed(0)
    settings = getattr(transformers, f"{prefix}Config")(vocab_size=100, bos_token_id=1, eos_token_id=2, pad_token_id=0, **config)
    model = getattr(transformers, f"{prefix}ForCausalLM")(settings).eval()
    tokens = {"input_ids": torch.arange(3, 19).reshape(2, 8)}
    made = pair(model, tokens)
    sites = [made.report.site(member) for member in members]
    assert [site.outcome for site in sites] == [Outcome.FUSED] * 3
    # erf GELU: qkv and fc1 of Falcon are one matrix; else the MLP is a whole beside qkv
    assert len({site.fused_into for site in sites}) == (1 if name == "falcon" else 2)
    assert all(site.executed and not site.fallbacks for site in sites)
    for each in made.both():
        loss_of(each(**tokens).logits).backward()
    assert_same_gradients(gradients(made.model), gradients(made.original), 1e-4)


# ---- near misses -----------------------------------------------------------------------------------------------------
def residual(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    out: Tensor = m.a(n) * m.b(n) + n[..., :6]
    return out


def scaled(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.a(m.norm(x) * 2) * m.b(x)
    return out


def twice(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    out: Tensor = m.a(n) + m.a(n) * m.b(n)
    return out


def other_calls(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.a(m.norm(x)) * m.b(m.norm(x * 2))
    return out


def sliced(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    out: Tensor = m.a(n[:, :1]) * m.b(n)
    return out


def folded(m: Any, x: Tensor) -> Tensor:
    """A view that changes the last dimension does not commute with the norm."""
    out: Tensor = m.c(m.norm(x).view(2, 5, 2, WIDTH // 2))
    return out


NEAR_MISSES: dict[str, tuple[Callable[[Any, Tensor], Any], list[str]]] = {
    "residual": (residual, ["fusion.other-reader"]),
    "sliced for one": (sliced, ["fusion.other-reader"]),
    "twice": (twice, ["fusion.calls-differ"]),
    "other readers in another call": (other_calls, ["fusion.calls-differ"]),
    "no linear reads it": (scaled, []),
    "folded": (folded, []),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name: str) -> None:
    use, codes = NEAR_MISSES[name]
    plan = planned(One(use=use, c=nn.Linear(WIDTH // 2, 3)))
    assert codes_of(plan, "norm") == codes
    assert plan.get("norm").outcome is Outcome.CONVERTED
    assert not [fusion for fusion in plan.fusions if fusion.rule != "shared-linear"]
    assert all(reason.detail for reason in plan.get("norm").reasons)


def test_a_norm_whose_weight_is_another_modules_too() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        n = m.norm(x)
        out: Tensor = m.a(n) * m.b(n) * m.other(x)[..., :6]
        return out

    model = One(use=use, other=nn.LayerNorm(WIDTH))
    model.get_submodule("other").weight = model.norm.weight
    plan = planned(model)
    assert codes_of(plan, "norm") == ["fusion.tied"]
    assert not [fusion for fusion in plan.fusions if fusion.rule == "norm-linear"]


def test_readers_in_another_repeated_block() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList([nn.Sequential(nn.LayerNorm(WIDTH)), nn.Sequential(nn.Linear(WIDTH, 4))])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.steps[1](self.steps[0](x))
            return out

    plan = planned(Blocks())
    assert codes_of(plan, "steps.0.0") == ["fusion.crosses-block"]
    assert plan.fusions == ()


def test_excluded_members_and_fuse_off() -> None:
    assert planned(One(), fuse=False).fusions == ()
    plan = planned(One(), exclude="norm")
    assert not [fusion for fusion in plan.fusions if fusion.rule == "norm-linear"]
    plan = planned(One(), exclude="a")
    assert codes_of(plan, "norm") == ["fusion.other-reader"]


# ---- mistakes --------------------------------------------------------------------------------------------------------
MISTAKES: dict[str, Mistake] = {
    "blocks in another order": rolled("weight", 6),
    "biases in another order": rolled("bias", 6),
    "bias lost": zeroed("bias"),
    "norm bias lost": zeroed("layer_norm_bias"),
    "norm weight lost": lambda module: module._parameters.update(layer_norm_weight=nn.Parameter(torch.ones(WIDTH))),
    "eps x 10": attribute("eps", lambda eps: eps * 10),
    "1 + w": attribute("zero_centered_gamma", lambda on: not on),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_verifier_catches_a_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(monkeypatch, One(), MISTAKES[name], JOINT)


def test_the_verifier_catches_a_lost_one_plus_w(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = attribute("zero_centered_gamma", lambda on: not on)
    assert_caught(monkeypatch, One(norm=LayerNorm(WIDTH, offset=1.0)), lost, JOINT)


def test_the_verifier_catches_exchanged_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix is right, but each reader takes the other's columns."""

    def exchanged(module: Any) -> None:
        record = module.__dict__["_te_convert"]
        record.__dict__["readers"] = record.role("linear")[::-1]

    def beside(m: Any, x: Tensor) -> Tensor:
        n = m.norm(x)
        return torch.cat([m.a(n), m.b(n)], -1)

    assert_caught(monkeypatch, One(use=beside), exchanged, JOINT)
