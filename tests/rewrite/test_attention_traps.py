"""Each way in which attention behind Transformers' interface goes wrong silently."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

import te_convert
from te_convert.facts.attention import compared_names
from tests.rewrite import attention_models as zoo
from tests.rewrite.test_attention import convert, records


def codes(site: Any) -> list[str]:
    return [reason.code for reason in site.reasons]


# ---- what the interface does silently --------------------------------------------------------------------------------
def test_a_mask_function_is_registered_with_the_attention_function() -> None:
    """Without one Transformers makes no mask at all: padding and sliding windows vanish without an error."""
    import transformers.masking_utils as masking
    import transformers.modeling_utils as modeling

    convert(zoo.llama(), zoo.inputs_of("llama"))
    for name in ("te_convert", "te_convert_eager"):
        assert name in modeling.ALL_ATTENTION_FUNCTIONS
        assert name in masking.ALL_MASK_ATTENTION_FUNCTIONS


def test_a_window_shorter_than_the_sequence_is_kept() -> None:
    model, long = zoo.mistral(), {"input_ids": zoo.ids(length=30)}
    converted, _ = convert(model, zoo.inputs_of("mistral"))
    with torch.no_grad():
        torch.testing.assert_close(converted(**long).logits, model(**long).logits, rtol=1e-4, atol=1e-5)
    assert all((record.executed, record.fallbacks) == (1, 0) for record in records(converted))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_the_example_inputs_did_not_have(side: str) -> None:
    model = zoo.llama()
    converted, _ = convert(model, zoo.inputs_of("llama"))
    mask = zoo.padding(side, 0, 5)
    with torch.no_grad():
        ours = converted(zoo.ids(), attention_mask=mask).logits
        original = model(zoo.ids(), attention_mask=mask).logits
    torch.testing.assert_close(ours[mask.bool()], original[mask.bool()], rtol=1e-4, atol=1e-5)


def test_a_sample_of_padding_alone_gives_what_torch_gives() -> None:
    model = zoo.bert()
    converted, _ = convert(model, zoo.inputs_of("bert"))
    mask = zoo.padding("right", 0, zoo.LENGTH)
    with torch.no_grad():
        ours = converted(zoo.ids(), attention_mask=mask)[0]
        torch.testing.assert_close(ours, model(zoo.ids(), attention_mask=mask)[0], rtol=1e-4, atol=1e-5)
    assert all((record.executed, record.fallbacks) == (1, 0) for record in records(converted))


def test_a_mask_of_the_callers_own_is_a_bias() -> None:
    model = zoo.llama()
    converted, _ = convert(model, zoo.inputs_of("llama"))
    own = torch.rand(2, 1, zoo.LENGTH, zoo.LENGTH, generator=torch.Generator().manual_seed(0)) > 0.4
    own |= torch.eye(zoo.LENGTH, dtype=torch.bool)
    with torch.no_grad():
        ours, original = converted(zoo.ids(), attention_mask=own).logits, model(zoo.ids(), attention_mask=own).logits
    torch.testing.assert_close(ours, original, rtol=1e-4, atol=1e-5)
    assert all((record.executed, record.fallbacks) == (1, 0) for record in records(converted))


def test_packed_sequences_have_a_mask_that_is_a_bias() -> None:
    model = zoo.llama()
    converted, _ = convert(model, zoo.inputs_of("llama"))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]]).expand(2, -1)
    with torch.no_grad():
        ours = converted(zoo.ids(), position_ids=positions, use_cache=False).logits
        original = model(zoo.ids(), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(ours, original, rtol=1e-4, atol=1e-5)
    assert all((record.executed, record.fallbacks) == (1, 0) for record in records(converted))


def test_an_unknown_tensor_argument_runs_the_original() -> None:
    model = zoo.llama()
    converted, _ = convert(model, zoo.inputs_of("llama"))
    with torch.no_grad():
        converted(zoo.ids(), sinks=torch.zeros(4))
    assert all((record.executed, record.fallbacks) == (0, 1) for record in records(converted))


def test_a_model_without_sdpa_support_is_refused_under_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.llama()
    monkeypatch.setattr(type(model), "_supports_sdpa", False)
    monkeypatch.setattr(type(model.model), "_supports_sdpa", False)
    plan = te_convert.analyze(model, zoo.inputs_of("llama"))
    assert all(codes(site) == ["attention.no-sdpa"] for site in plan.sites if site.kind == "Attention")


def test_a_fixed_implementation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.llama()
    monkeypatch.setattr(type(model.model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    plan = te_convert.analyze(model, zoo.inputs_of("llama"))
    assert all(codes(site) == ["attention.not-switchable"] for site in plan.sites if site.kind == "Attention")


def test_another_implementation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.masking_utils as masking
    import transformers.modeling_utils as modeling

    mapping, masks = modeling.AttentionInterface._global_mapping, masking.AttentionMaskInterface._global_mapping
    monkeypatch.setitem(mapping, "mine", mapping["sdpa"])
    monkeypatch.setitem(masks, "mine", masks["sdpa"])
    model: Any = zoo.llama("mine")
    plan = te_convert.analyze(model, zoo.inputs_of("llama"))
    assert all(codes(site) == ["attention.implementation"] for site in plan.sites if site.kind == "Attention")


def test_a_model_that_compares_the_name_is_refused() -> None:
    """GPT-2 asks whether its implementation is "eager": under another name it would take the other way."""
    plan = te_convert.analyze(zoo.gpt2("eager"), zoo.inputs_of("gpt2"))
    assert all(codes(site) == ["attention.name-compared"] for site in plan.sites if site.kind == "Attention")


def test_a_model_that_compares_the_name_with_sdpa_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call inside Transformers' own function is caught (DeepSeek-V3.2 makes its sparse mask under that name alone)."""
    monkeypatch.setattr("te_convert.match.attention._compared", lambda file: frozenset({"sdpa"}))
    model = zoo.llama("sdpa")
    result = te_convert.convert(model, zoo.inputs_of("llama"), backend="reference")
    sites = [site for site in result.report.sites if site.kind == "Attention"]
    assert result.report.parity.passed
    assert all(str(site.outcome) == "CONVERTED" and site.executed and not site.fallbacks for site in sites)
    assert cast("Any", result.model.config)._attn_implementation == "sdpa"
    with torch.no_grad():
        args = zoo.inputs_of("llama")
        torch.testing.assert_close(result.model(**args).logits, model(**args).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('if self.config._attn_implementation == "sdpa":', {"sdpa"}),
        ('if config._attn_implementation in ("eager", "sdpa"):', {"eager", "sdpa"}),
        ('if config._attn_implementation not in ["flash_attention_2"]:', {"flash_attention_2"}),
        ("interface = get_interface(self.config._attn_implementation, eager_attention_forward)", set()),
    ],
)
def test_compared_names(source: str, names: set[str]) -> None:
    assert compared_names(source) == names


def test_another_formula_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager function that is not softmax attention: squared scores here."""
    import transformers.models.llama.modeling_llama as llama

    original = llama.eager_attention_forward

    def squared(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(module, query * query, *args, **kwargs)

    monkeypatch.setattr(llama, "eager_attention_forward", squared)
    plan = te_convert.analyze(zoo.llama("eager"), zoo.inputs_of("llama"))
    assert all(codes(site) == ["attention.not-recognised"] for site in plan.sites if site.kind == "Attention")


def test_is_causal_decides_without_a_mask() -> None:
    model = zoo.llama()
    converted, _ = convert(model, zoo.inputs_of("llama"))
    for each in (model, converted):
        for layer in each.model.layers:
            layer.self_attn.is_causal = False
    with torch.no_grad():
        torch.testing.assert_close(converted(zoo.ids()).logits, model(zoo.ids()).logits, rtol=1e-4, atol=1e-5)
    assert all((record.executed, record.fallbacks) == (1, 0) for record in records(converted))


def test_eager_attention_without_a_mask_is_full() -> None:
    model = zoo.bert("eager")
    converted, report = convert(model, zoo.inputs_of("bert"))
    assert report.parity.passed
    assert all(record.fallbacks == 0 for record in records(converted))


def test_requested_probabilities_come_from_eager_attention() -> None:
    model = zoo.llama("eager")
    converted, _ = convert(model, zoo.inputs_of("llama"))
    with torch.no_grad():
        ours, original = (each(zoo.ids(), output_attentions=True).attentions for each in (converted, model))
    for a, b in zip(ours, original, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert all((record.executed, record.fallbacks) == (0, 1) for record in records(converted))


def test_another_scale_runs_the_original() -> None:
    model = zoo.llama()
    converted, _ = convert(model, zoo.inputs_of("llama"))
    for each in (model, converted):
        for layer in each.model.layers:
            layer.self_attn.scaling = 0.7
    with torch.no_grad():
        torch.testing.assert_close(converted(zoo.ids()).logits, model(zoo.ids()).logits, rtol=1e-4, atol=1e-5)
    assert all(record.fallbacks == 1 for record in records(converted))


def test_softcap_is_kept() -> None:
    model = zoo.gemma2()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # scores that reach the cap
    converted, report = convert(model, zoo.inputs_of("gemma2"))
    assert report.parity.passed
    assert records(converted)[0].module.softcap == 2.0
