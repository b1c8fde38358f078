"""Transformers layers on te.TransformerLayer: equal with every mask and in training, the original for all other calls."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_convert
from te_convert.rewrite.fused import fused_record
from te_convert.rewrite.transformers_layer import LayerRecord
from tests.rewrite.attention_models import ids, padding
from tests.rewrite.layer_models import CASES, bert, gpt2, hidden, inputs

every_case = pytest.mark.parametrize("name", CASES)
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}


def convert(model: Any, given: Any, **options: Any) -> Any:
    result = te_convert.convert(model, given, backend="reference", **options)
    assert result.report.parity.passed, result.report
    assert not result.report.parity.reverted
    return result.model


def records(model: nn.Module) -> list[LayerRecord]:
    found = [fused_record(module) for module in model.modules()]
    return [record for record in found if isinstance(record, LayerRecord)]


def counts(model: nn.Module) -> list[tuple[int, int]]:
    return [(record.executed, record.fallbacks) for record in records(model)]


def ran(model: nn.Module, before: list[tuple[int, int]]) -> tuple[set[int], set[int]]:
    """How often each layer ran on TE since, and how often the original did."""
    now = counts(model)
    return {n[0] - b[0] for n, b in zip(now, before, strict=True)}, {n[1] - b[1] for n, b in zip(now, before, strict=True)}


@every_case
def test_outputs_with_and_without_padding(name: str) -> None:
    original = CASES[name]()
    model = convert(original, inputs(name))
    assert len(records(model)) == 2
    for side, expected in (("", ({1}, {0})), ("right", ({1}, {0})), ("left", ({0}, {1}))):
        before, given = counts(model), inputs(name, side)
        with torch.no_grad():
            actual, wanted = hidden(model(**given)), hidden(original(**given))
        valid = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
        torch.testing.assert_close(actual[valid], wanted[valid], **TOLERANCE)
        assert ran(model, before) == expected, side


@pytest.mark.parametrize("name", ["gpt2", "gpt2, eager", "bert, relu", "clip text"])
def test_gradients_and_the_way_back(name: str) -> None:
    original = CASES[name]().train()
    model = convert(original, inputs(name))
    given = inputs(name, "right")
    valid = given["attention_mask"].bool()
    before = counts(model)
    for each in (original, model):
        hidden(each(**given))[valid].pow(2).mean().backward()
    assert ran(model, before) == ({1}, {0})
    reverted = te_convert.revert(model)
    assert not records(reverted)
    assert list(reverted.state_dict()) == list(original.state_dict())
    for (key, value), (other, expected) in zip(reverted.named_parameters(), original.named_parameters(), strict=True):
        assert key == other
        assert torch.equal(value, expected), key
        if expected.grad is not None:
            assert value.grad is not None, key
            torch.testing.assert_close(value.grad, expected.grad, rtol=1e-4, atol=1e-5 * max(1.0, float(expected.grad.abs().max())))
    assert torch.equal(hidden(reverted(**given)), hidden(original(**given)))
    configs: tuple[Any, Any] = (reverted.config, original.config)
    assert configs[0]._attn_implementation == configs[1]._attn_implementation


@pytest.mark.parametrize("name", ["gpt2", "bert, relu"])
def test_state_dicts_in_both_layouts(name: str) -> None:
    original = CASES[name]()
    model = convert(original, inputs(name))
    own = te_convert.original_state_dict(model)
    assert list(own) == list(original.state_dict())
    assert all(torch.equal(own[key], value) for key, value in original.state_dict().items())
    own, te = copy.deepcopy(own), copy.deepcopy(model.state_dict())
    assert any("transformer_layer.layernorm_mlp.fc1_weight" in key for key in te)
    expected = hidden(original(**inputs(name)))
    for state, load in ((own, lambda s: te_convert.load_original_state_dict(model, s)), (te, model.load_state_dict)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load(state)
        torch.testing.assert_close(hidden(model(**inputs(name))), expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["gpt2", "bert, relu"])
def test_copies_and_saved_directories(name: str, tmp_path: Path) -> None:
    result = te_convert.convert(CASES[name](), inputs(name), backend="reference")
    model: Any = result.model
    expected = hidden(model(**inputs(name)))
    result.save(tmp_path / "saved")
    loaded: Any = te_convert.load(tmp_path / "saved", backend="reference")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        before = counts(other)
        assert torch.equal(hidden(other(**inputs(name))), expected)
        assert ran(other, before) == ({1}, {0})


def test_a_model_converted_without_a_cache_generates_the_same_tokens() -> None:
    """Every step brings a cache: the original's forward, counted."""
    original = gpt2()
    model = convert(original, inputs("gpt2"))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    before = counts(model)
    mask = padding("left", 0, 4)
    actual, expected = (m.generate(ids(), attention_mask=mask, **options) for m in (model, original))
    assert torch.equal(actual, expected)
    executed, fallbacks = ran(model, before)
    assert executed == {0}
    assert min(fallbacks) >= 5


def test_what_transformers_collects() -> None:
    """Hidden states come from the layer itself; attention probabilities only the original has."""
    original = bert("eager")
    model = convert(original, inputs("bert"))
    for option, expected in (("output_hidden_states", ({1}, {0})), ("output_attentions", ({0}, {1})), ("return_dict", ({1}, {0}))):
        before = counts(model)
        actual, wanted = (m(**inputs("bert"), **{option: True}) for m in (model, original))
        assert ran(model, before) == expected, option
        pairs = [(actual[key], wanted[key]) for key in wanted]
        for a, b in pairs:
            for x, y in zip(a if isinstance(a, tuple) else (a,), b if isinstance(b, tuple) else (b,), strict=True):
                torch.testing.assert_close(x, y, **TOLERANCE)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    original = gpt2().train()
    model = convert(original, inputs("gpt2"))
    for each in (original, model):
        enable = getattr(each, "activation_checkpointing_enable", None) or each.gradient_checkpointing_enable
        enable({"use_reentrant": reentrant})
        embeddings = each.get_input_embeddings()(ids()).detach().requires_grad_()
        hidden(each(inputs_embeds=embeddings, use_cache=False)).pow(2).mean().backward()
    assert min(record.executed for record in records(model)) >= 2
    for (key, value), expected in zip(te_convert.revert(model).named_parameters(), original.parameters(), strict=True):
        if expected.grad is not None:
            assert value.grad is not None, key
            torch.testing.assert_close(value.grad, expected.grad, rtol=1e-4, atol=1e-5)


def hook_inside(model: Any) -> None:
    model.h[0].mlp.act.register_forward_hook(lambda *_: None)
    model.h[1].attn.register_forward_hook(lambda *_: None)


def other_activation(model: Any) -> None:
    for block in model.h:
        block.mlp.act = nn.ReLU()


def dropout_on(model: Any) -> None:
    model.train()
    for block in model.h:
        block.attn.resid_dropout.p = 1.0


def other_implementation(model: Any) -> None:
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("change", [hook_inside, other_activation, dropout_on, other_implementation])
def test_changes_after_the_conversion_run_the_original(change: Any) -> None:
    original = gpt2()
    model = convert(original, inputs("gpt2"))
    for each in (original, model):
        change(each.transformer)
    before = counts(model)
    assert torch.equal(hidden(model(**inputs("gpt2"))), hidden(te_convert.revert(copy.deepcopy(model))(**inputs("gpt2"))))
    torch.testing.assert_close(hidden(model(**inputs("gpt2"))), hidden(original(**inputs("gpt2"))), **TOLERANCE)
    assert ran(model, before) == ({0}, {2})


def test_a_mask_that_nobody_described_runs_the_original() -> None:
    original = gpt2()
    model = convert(original, inputs("gpt2"))
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril().logical_and(torch.arange(12) != 3) | torch.eye(12, dtype=torch.bool)
    before = counts(model)
    given = {**inputs("gpt2"), "attention_mask": mask}
    torch.testing.assert_close(hidden(model(**given)), hidden(original(**given)), **TOLERANCE)
    assert ran(model, before) == ({0}, {1})


def test_a_second_conversion_leaves_the_layers_alone() -> None:
    model = convert(bert(), inputs("bert"))
    again = convert(model, inputs("bert"))
    assert len(records(again)) == 2
    buffer = io.BytesIO()
    torch.save(again, buffer)
    assert list(te_convert.original_state_dict(again)) == list(bert().state_dict())


MUTANTS = ("qkv", "norms", "causal", "order")


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("name", ["gpt2", "bert, relu"])
def test_verification_finds_a_wrong_layer(name: str, mutant: str) -> None:
    """Queries and keys exchanged, norms exchanged, the other mask type, the residual on the other side of the norm."""
    original = CASES[name]()
    model = convert(original, inputs(name))
    for record in records(model):
        break_layer(record, mutant)
    parity = te_convert.verify(original, model, inputs(name))
    assert not parity.passed
    if mutant in ("causal", "order"):  # a wrong weight shows in the whole model only: the layer's own forward borrows it
        assert sum(not site.passed for site in parity.sites if site.fqn.endswith("transformer_layer")) == 2


def break_layer(record: LayerRecord, mutant: str) -> None:
    layer: Any = record.module
    post = layer.output_layernorm
    attention = layer.self_attention
    with torch.no_grad():
        if mutant == "qkv":
            weight: Tensor = (attention.qkv if post else attention.layernorm_qkv).weight
            weight.copy_(torch.cat([weight[32:64], weight[:32], weight[64:]]))
        elif mutant == "norms":
            second = layer.layernorm.weight if post else layer.layernorm_mlp.layer_norm_weight
            first = layer.layernorm_mlp.layer_norm_weight if post else attention.layernorm_qkv.layer_norm_weight
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)
    if mutant == "order":
        layer.apply_residual_connection_post_layernorm = not post
        layer.layernorm_mlp.return_layernorm_output = not post
    if mutant == "causal":
        masking = record._masking

        def wrong(*args: Any) -> Any:
            found = masking(*args)
            kinds = {"causal": "no_mask", "no_mask": "causal"}
            kind = None if found is None else kinds.get(found[0]["self_attn_mask_type"])
            return found if found is None or kind is None else ({"self_attn_mask_type": kind}, found[1])

        record._masking = wrong  # type: ignore[method-assign, assignment]
