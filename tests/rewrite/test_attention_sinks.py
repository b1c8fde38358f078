"""Attention sinks: gpt-oss's learnt share of every softmax is te.DotProductAttention's softmax offset."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_convert
from te_convert.plan.model import Plan
from te_convert.rewrite.attention_call import AttentionRun
from tests.rewrite import attention_models as zoo
from tests.rewrite.test_attention import attention_sites, convert, records
from tests.rewrite.test_attention_mutants import plant
from tests.rewrite.test_attention_traps import codes

SINKS = "model.layers.0.self_attn.sinks"
INPUTS = zoo.inputs_of("llama")


def gpt_oss() -> Any:
    model = zoo.perturbed(zoo.gpt_oss().eval())
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.randn(4, generator=torch.Generator().manual_seed(3)))
    return model


@pytest.mark.parametrize("padded", ["", "left", "right"])
def test_converted_with_the_same_output_and_gradients(padded: str) -> None:
    inputs = {**INPUTS, **({"attention_mask": zoo.padding(padded, 0, 4)} if padded else {})}
    valid = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    original = gpt_oss()
    converted, report = convert(original, inputs)
    assert report.parity.passed
    assert not report.parity.reverted
    assert [str(site.outcome) for site in attention_sites(report)] == ["CONVERTED"] * 2
    outputs = [each(**inputs).logits[valid] for each in (original, converted)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    assert [(record.executed, record.fallbacks) for record in records(converted)] == [(1, 0)] * 2
    for output in outputs:
        output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(9)))
    assert original.get_parameter(SINKS).grad.abs().max() > 1e-3
    reverted: Any = te_convert.revert(converted)
    for name, parameter in original.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(reverted.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_the_sinks_are_the_te_modules_parameter() -> None:
    original = gpt_oss()
    converted, _ = convert(original, INPUTS)
    attention = converted.model.layers[0].self_attn
    assert attention.sinks is attention.core_attention.softmax_offset
    assert "model.layers.0.self_attn.core_attention.softmax_offset" in converted.state_dict()
    assert SINKS not in converted.state_dict()
    twin = copy.deepcopy(converted)
    with torch.no_grad():
        attention.sinks.add_(1.0)
        assert not torch.equal(converted(**INPUTS).logits, twin(**INPUTS).logits)
    for each in (converted, twin):
        reverted: Any = te_convert.revert(each)
        assert type(reverted.model.layers[0].self_attn) is type(original.model.layers[0].self_attn)
        assert reverted.state_dict().keys() == original.state_dict().keys()


def test_generate_and_bfloat16() -> None:
    original = gpt_oss()
    converted, _ = convert(original, INPUTS)
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(converted.generate(zoo.ids(), **options), original.generate(zoo.ids(), **options))
    assert [(record.executed, record.fallbacks) for record in records(converted)] == [(6, 0)] * 2
    _, report = convert(gpt_oss().to(torch.bfloat16), INPUTS)
    assert report.parity.passed
    assert all(site.executed and not site.fallbacks for site in attention_sites(report))


def test_the_plan_tells_and_survives_json() -> None:
    plan = te_convert.analyze(gpt_oss(), INPUTS)
    assert Plan.from_dict(plan.to_dict()) == plan
    sites = [site for site in plan.sites if site.kind == "Attention"]
    assert [site.spec.softmax_type for site in sites] == ["learnable"] * 2  # type: ignore[union-attr]


# ---- near misses -----------------------------------------------------------------------------------------------------
def test_a_function_that_ignores_the_sinks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.models.gpt_oss.modeling_gpt_oss as modeling
    import transformers.models.llama.modeling_llama as llama

    monkeypatch.setattr(modeling, "eager_attention_forward", llama.eager_attention_forward)
    plan = te_convert.analyze(gpt_oss(), INPUTS)
    assert [codes(site) for site in plan.sites if site.kind == "Attention"] == [["attention.not-recognised"]] * 2


def test_sinks_that_are_computed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    model = gpt_oss()
    for layer in model.model.layers:
        values = layer.self_attn._parameters.pop("sinks")
        layer.self_attn.register_buffer("values", values.detach())
    monkeypatch.setattr(GptOssAttention, "sinks", property(lambda self: self.values * 1.0), raising=False)
    plan = te_convert.analyze(model, INPUTS)
    assert [codes(site) for site in plan.sites if site.kind == "Attention"] == [["attention.extra-inputs"]] * 2


# ---- mistakes --------------------------------------------------------------------------------------------------------
def with_sinks(change: Any) -> Any:
    def mistake(original: Any, run: AttentionRun, module: Any) -> Any:
        kept = module._parameters["softmax_offset"]
        module._parameters["softmax_offset"] = torch.nn.Parameter(change(kept.detach()))
        try:
            return original(run, module)
        finally:
            module._parameters["softmax_offset"] = kept

    return mistake


def vanilla(original: Any, run: AttentionRun, module: Any) -> Any:
    module.softmax_type = "vanilla"
    try:
        return original(run, module)
    finally:
        module.softmax_type = "learnable"


@pytest.mark.parametrize(
    "mistake", [vanilla, with_sinks(torch.zeros_like), with_sinks(torch.neg), with_sinks(lambda sinks: sinks.roll(1))]
)
def test_a_planted_mistake_is_found_and_put_back(monkeypatch: pytest.MonkeyPatch, mistake: Any) -> None:
    plant(monkeypatch, mistake)
    converted, report = convert(gpt_oss(), INPUTS)
    assert report.parity.passed
    assert not records(converted)
    assert all("parity.failed" in codes(site) for site in attention_sites(report))
