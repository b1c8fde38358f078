"""Which Transformers layers become te.TransformerLayer, and why the near misses stay in parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from te_convert.plan.model import Outcome, Plan
from te_convert.replacements.specs import TransformerLayerSpec
from te_convert.weights.ops import Concat, Move, Transpose
from tests.rewrite.layer_models import bert, clip_text, gpt2, inputs
from tests.rules.rule_cases import codes, plan_of

GPT2 = TransformerLayerSpec(
    32, 128, 4, 1e-5, True, "gelu", "LayerNorm", False, False, False, "encoder", "bshd", "causal", "float32"
)
BERT = replace(GPT2, ffn_hidden_size=48, eps=1e-12, activation="relu", post_layernorm=True, self_attn_mask_type="no_mask")
CLIP = replace(GPT2, ffn_hidden_size=48, activation="qgelu")


def plan(model: Any, given: Any, **options: Any) -> Plan:
    return plan_of(model, given, **options)


def layers(found: Plan) -> dict[str, Any]:
    return {fusion.scope: fusion for fusion in found.fusions if fusion.rule == "transformers-layer"}


@pytest.mark.parametrize(
    ("make", "scope", "spec"),
    [
        (gpt2, "transformer.h.0", GPT2),
        (lambda: gpt2("eager"), "transformer.h.0", replace(GPT2, self_attn_mask_type="no_mask")),
        (bert, "encoder.layer.0", BERT),
        (lambda: bert(hidden_act="gelu_new"), "encoder.layer.0", replace(BERT, activation="gelu")),
        (clip_text, "encoder.layers.0", CLIP),
    ],
    ids=["gpt2", "gpt2, eager", "bert, relu", "bert, gelu_new", "clip text"],
)
def test_every_form(make: Any, scope: str, spec: TransformerLayerSpec) -> None:
    """Without a mask an eager attention sees everything, which the masks of its calls then say."""
    found = layers(plan(make(), inputs("gpt2" if "h." in scope else "")))
    assert len(found) == 2
    assert (found[scope].fqn, found[scope].spec) == (f"{scope}.transformer_layer", spec)


def test_weights_of_both_orders() -> None:
    ops = layers(plan(gpt2(), inputs("gpt2")))["transformer.h.0"].weights.ops
    assert Transpose("attn.c_attn.weight", "self_attention.layernorm_qkv.weight") in ops
    assert Move("ln_2.weight", "layernorm_mlp.layer_norm_weight") in ops
    ops = layers(plan(bert(), inputs("bert")))["encoder.layer.0"].weights.ops
    names = tuple(f"attention.self.{name}.weight" for name in ("query", "key", "value"))
    assert Concat(names, "self_attention.qkv.weight", (32, 32, 32)) in ops
    assert Move("attention.output.LayerNorm.weight", "layernorm_mlp.layer_norm_weight") in ops
    assert Move("output.LayerNorm.weight", "layernorm.weight") in ops


def test_erf_gelu_has_to_be_allowed() -> None:
    model = bert(hidden_act="gelu")
    found = plan(model, inputs("bert"))
    assert not layers(found)
    assert codes(found.get("encoder.layer.0")) == ["activation.gelu-erf"]
    allowed = layers(plan(model, inputs("bert"), allow=("gelu-tanh",)))
    assert {fusion.approximation for fusion in allowed.values()} == {"gelu-tanh"}


def later_eps(model: Any) -> None:
    model.transformer.h[0].ln_2.eps = 1e-3


def other_scale(model: Any) -> None:
    model.transformer.h[0].attn.scaling = 0.3


def hook(model: Any) -> None:
    model.transformer.h[0].mlp.register_forward_hook(lambda *_: None)


def dropout(model: Any) -> None:
    model.transformer.h[0].mlp.dropout.p = 0.1


def dropout_attribute(model: Any) -> None:
    model.transformer.h[0].attn.drop_rate = 0.1


def clash(model: Any) -> None:
    model.transformer.h[0].transformer_layer = torch.nn.Identity()


def tied(model: Any) -> None:
    model.transformer.h[0].ln_2.weight = model.transformer.h[1].ln_2.weight


MISSES = [
    (later_eps, "block.form"),
    (other_scale, "block.form"),
    (hook, "module.hooks"),
    (dropout, "block.dropout"),
    (dropout_attribute, "block.dropout"),
    (clash, "block.form"),
    (tied, "block.form"),
]


@pytest.mark.parametrize(("change", "code"), MISSES, ids=[change.__name__ for change, _ in MISSES])
def test_near_misses(change: Any, code: str) -> None:
    model = gpt2()
    change(model)
    found = plan(model, inputs("gpt2"))
    assert "transformer.h.0" not in layers(found)
    decision = found.get("transformer.h.0")
    assert (decision.outcome, codes(decision)) == (Outcome.NO_MATCH, [code])
    assert found.get("transformer.h.0.attn.c_attn").outcome is not Outcome.NO_MATCH


def test_a_layer_that_fills_a_cache_stays_in_parts() -> None:
    found = plan(gpt2(), {"input_ids": inputs("gpt2")["input_ids"]})
    assert not layers(found)
    assert codes(found.get("transformer.h.0")) == ["block.cache"]
    assert {fusion.rule for fusion in found.fusions} == {"norm-linear", "norm-mlp", "attention"}


def test_rotary_layers_are_silent() -> None:
    from tests.rewrite.attention_models import llama

    found = plan(llama(), {**inputs(""), "use_cache": False})
    assert not layers(found)
    assert "model.layers.0" not in {decision.fqn for decision in found.decisions}
