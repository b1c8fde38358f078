"""Attention of Transformers models on te.DotProductAttention: results, generation, padding, training and tracing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.rewrite.attention import AttentionRecord
from te_convert.rewrite.fused import fused_record
from tests.rewrite import attention_models as zoo


def records(model: nn.Module) -> list[AttentionRecord]:
    found = [fused_record(module) for module in model.modules()]
    return [record for record in found if isinstance(record, AttentionRecord)]


def convert(model: nn.Module, inputs: Any, **options: Any) -> tuple[Any, Any]:
    result = te_convert.convert(model, inputs, backend="reference", **options)
    for record in records(result.model):
        record.executed = record.fallbacks = 0
    return result.model, result.report


def attention_sites(report: Any) -> list[Any]:
    return [site for site in report.sites if site.kind == "Attention"]


def configs(model: Any) -> list[str]:
    return [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]


@pytest.mark.parametrize("name", zoo.CONVERTED)
def test_converted_and_equal(name: str) -> None:
    model, inputs = zoo.CONVERTED[name](), zoo.inputs_of(name)
    converted, report = convert(model, inputs)
    sites = attention_sites(report)
    assert report.parity.passed
    assert sites
    assert not report.parity.reverted
    for site in sites:
        assert (str(site.outcome), site.replacement) == ("CONVERTED", "te.DotProductAttention")
        assert site.executed > 0
        assert site.fallbacks == 0
        assert site.parity is not None
        assert site.parity.passed
    with torch.no_grad():
        torch.testing.assert_close(converted(**inputs)[0], model(**inputs)[0], rtol=1e-4, atol=1e-5)
    assert all(record.executed == 1 and record.fallbacks == 0 for record in records(converted))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "gemma2", "gpt2", "bart", "whisper", "t5"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_gives_the_same_tokens(name: str, cache: str) -> None:
    model, inputs = zoo.CONVERTED[name](), zoo.inputs_of(name)
    converted, _ = convert(model, inputs)
    given = {key: value for key, value in inputs.items() if not key.startswith("decoder")}
    options: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    if cache == "static" and name not in ("bart", "whisper"):
        options |= {"cache_implementation": "static", "disable_compile": True}
    expected = model.generate(**given, **options)
    assert torch.equal(converted.generate(**given, **options), expected)
    on_te = any(record.executed for record in records(converted))
    assert on_te or (name, cache) == ("mistral", "static")  # a window over a static cache: the first position is a tensor


def test_decode_with_a_growing_cache_runs_on_te() -> None:
    converted, _ = convert(zoo.llama(), zoo.inputs_of("llama"))
    converted.generate(zoo.ids(), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert [(record.executed, record.fallbacks) for record in records(converted)] == [(6, 0), (6, 0)]


def test_chunked_prefill_is_aligned_at_the_bottom_right() -> None:
    model = zoo.llama()
    converted, _ = convert(model, zoo.inputs_of("llama"))
    tokens = zoo.ids()
    with torch.no_grad():
        expected = model(tokens).logits
        first = converted(tokens[:, :5], use_cache=True)
        cache = first.get("cache", None) or first.past_key_values
        keyword = "cache" if "cache" in first else "past_key_values"
        second = converted(tokens[:, 5:], **{keyword: cache})
    torch.testing.assert_close(torch.cat((first.logits, second.logits), 1), expected, rtol=1e-4, atol=1e-5)
    assert [(record.executed, record.fallbacks) for record in records(converted)] == [(2, 0), (2, 0)]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "gemma2", "gpt2"])
@pytest.mark.report("NVIDIA/bionemo-framework:bionemo-recipes/models/llama3/modeling_llama_te.py")
def test_generate_on_a_left_padded_batch(name: str) -> None:
    model = zoo.CONVERTED[name]()
    converted, _ = convert(model, zoo.inputs_of(name))
    tokens, mask = zoo.ids(), zoo.padding("left", 0, 4)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(converted.generate(tokens, **options), model.generate(tokens, **options))
    assert all((record.executed, record.fallbacks) == (6, 0) for record in records(converted))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "bert", "bart"])
def test_padded_batches_agree_where_they_are_valid(name: str, side: str) -> None:
    model, inputs = zoo.CONVERTED[name](), zoo.inputs_of(name)
    mask = zoo.padding(side, 0, 4)
    inputs = {**inputs, "attention_mask": mask}
    converted, report = convert(model, inputs)
    assert report.parity.passed
    assert not report.parity.reverted
    valid = mask.bool() if name != "bart" else torch.ones(2, 9, dtype=torch.bool)
    with torch.no_grad():
        ours, original = converted(**inputs)[0], model(**inputs)[0]
    assert torch.isfinite(ours).all()
    torch.testing.assert_close(ours[valid], original[valid], rtol=1e-4, atol=1e-5)
    assert all((record.executed, record.fallbacks) == (1, 0) for record in records(converted))


def test_an_encoder_with_right_padding_agrees_at_padded_positions_too() -> None:
    model, inputs = zoo.bert(), {"input_ids": zoo.ids(), "attention_mask": zoo.padding("right", 0, 4)}
    converted, _ = convert(model, inputs)
    with torch.no_grad():
        torch.testing.assert_close(converted(**inputs)[0], model(**inputs)[0], rtol=1e-4, atol=1e-5)
    assert all((record.executed, record.fallbacks) == (1, 0) for record in records(converted))


def test_only_fallbacks_are_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionRecord, "_plan", lambda self, call: None)
    _, report = convert(zoo.llama(), zoo.inputs_of("llama"))
    for site in attention_sites(report):
        assert site.executed == 0
        assert site.fallbacks > 0


def test_training_step_gives_the_same_gradients() -> None:
    model = zoo.llama().train()
    converted, _ = convert(model, zoo.inputs_of("llama"))
    for each in (model, converted):
        each.train()
        each(input_ids=zoo.ids(), labels=zoo.ids()).loss.backward()
    expected = model.model.layers[0].self_attn.o_proj.weight.grad
    assert expected is not None
    reverted: Any = te_convert.revert(converted)
    torch.testing.assert_close(reverted.model.layers[0].self_attn.o_proj.weight.grad, expected, rtol=1e-4, atol=1e-6)
    assert converted.training


def test_bfloat16_and_autocast() -> None:
    inputs = zoo.inputs_of("llama")
    converted, report = convert(zoo.llama().to(torch.bfloat16), inputs)
    assert report.parity.passed
    assert all(site.executed and not site.fallbacks for site in attention_sites(report))
    model = zoo.llama()
    converted, _ = convert(model, inputs)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours, original = converted(**inputs).logits, model(**inputs).logits
    torch.testing.assert_close(ours, original, rtol=0.05, atol=0.02)
    assert all(record.executed == 1 for record in records(converted))


@pytest.mark.report("peer:attention-dropout")
def test_dropout_runs_on_te_in_training_when_it_is_the_same() -> None:
    model = zoo.llama(attention_dropout=0.5)
    converted, report = convert(model, zoo.inputs_of("llama"))
    assert report.parity.passed
    assert {site.replacement for site in attention_sites(report)} == {"te.DotProductAttention"}
    converted.train()
    a, b = (converted(**zoo.inputs_of("llama")).logits for _ in range(2))
    assert not torch.equal(a, b)
    assert all(record.executed == 2 for record in records(converted))
    for record in records(converted):
        record.owner.attention_dropout = 0.25
    converted(**zoo.inputs_of("llama"))
    assert all((record.executed, record.fallbacks) == (2, 1) for record in records(converted))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradient_checkpointing() -> None:
    model = zoo.llama().train()
    converted, _ = convert(model, zoo.inputs_of("llama"))
    converted.train()
    converted.gradient_checkpointing_enable({"use_reentrant": False})
    converted(input_ids=zoo.ids(), labels=zoo.ids(), use_cache=False).loss.backward()
    model(input_ids=zoo.ids(), labels=zoo.ids()).loss.backward()
    reverted: Any = te_convert.revert(converted)
    theirs = reverted.model.embed_tokens.weight.grad
    torch.testing.assert_close(theirs, model.model.embed_tokens.weight.grad, rtol=1e-4, atol=1e-6)


def test_compile_takes_the_original_path_without_a_graph_break() -> None:
    inputs, model = zoo.inputs_of("llama"), zoo.llama()
    converted, _ = convert(model, inputs, exclude=("*norm*", "*mlp*", "*proj", "lm_head"))
    compiled: Any = torch.compile(converted.model.layers[0].self_attn, backend="eager", fullgraph=True)
    hidden = torch.randn(2, 5, 32)
    position = converted.model.rotary_emb(hidden, torch.arange(5)[None])
    with torch.no_grad():
        ours = compiled(hidden, position_embeddings=position, attention_mask=None)[0]
        original = model.model.layers[0].self_attn(hidden, position_embeddings=position, attention_mask=None)[0]
    torch.testing.assert_close(ours, original, rtol=1e-4, atol=1e-5)
    assert all(record.executed == 0 for record in records(converted))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_takes_the_original_path() -> None:
    converted, _ = convert(zoo.vit(), zoo.inputs_of("vit"))
    pixels = torch.randn(3, 1, 3, 16, 16)
    with torch.no_grad():
        ours = torch.func.vmap(lambda x: converted(pixel_values=x).last_hidden_state)(pixels)
        expected = torch.stack([converted(pixel_values=x).last_hidden_state for x in pixels])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
