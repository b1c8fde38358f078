"""Attention with a bias of its scores: T5's relative positions, and float masks of torch's function that are learnt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import te_convert
from te_convert.facts.attention import is_bias_shape
from te_convert.plan.model import Plan
from te_convert.rewrite.attention_bias import as_bias
from te_convert.rewrite.attention_call import AttentionRun
from tests.rewrite import attention_models as zoo
from tests.rewrite.bias_samples import (
    HEADS,
    LENGTH,
    MASKS,
    Attention,
    Boolean,
    HidesAll,
    HidesAllByBoolean,
    HidesByBuffer,
    layoutlm,
    model,
    mt5,
    t5,
    timm_model,
    x,
)
from tests.rewrite.test_attention import attention_sites, convert, records
from tests.rewrite.test_attention_mutants import plant
from tests.rewrite.test_attention_traps import codes

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
CASES: dict[str, tuple[Callable[[], Any], Any, int]] = {
    "t5": (t5, zoo.inputs_of("t5"), 6),
    "t5, eager": (lambda: t5("eager"), zoo.inputs_of("t5"), 6),
    "t5, padded": (t5, {**zoo.inputs_of("t5"), "attention_mask": zoo.padding("right", 0, 4)}, 6),
    "mt5": (mt5, zoo.inputs_of("t5"), 3),
    "beit": (lambda: timm_model("beit_base_patch16_224"), {"x": IMAGES}, 2),
    "vit_relpos": (lambda: timm_model("vit_relpos_small_patch16_224"), {"x": IMAGES}, 2),
    "direct": (model, {"input": x()}, 1),
}


def first(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


@pytest.mark.parametrize("name", CASES)
def test_converted_with_the_same_output_and_gradients(name: str) -> None:
    make, inputs, count = CASES[name]
    original = make()
    converted, report = convert(original, inputs)
    assert report.parity.passed
    assert not report.parity.reverted
    sites = attention_sites(report)
    assert len(sites) == count
    for site in sites:
        assert (str(site.outcome), site.replacement) == ("CONVERTED", "te.DotProductAttention")
        assert site.executed > 0
    assert all(record.decision.spec.bias for record in records(converted) if not record.is_direct)  # type: ignore[union-attr]
    for each in (original, converted):
        y = first(each(**inputs))
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)))
    torch.testing.assert_close(first(converted(**inputs)), first(original(**inputs)), rtol=1e-4, atol=1e-5)
    assert all(record.executed and not record.fallbacks for record in records(converted))
    reverted: Any = te_convert.revert(converted)
    trained = {name: parameter for name, parameter in original.named_parameters() if parameter.grad is not None}
    for parameter_name, parameter in trained.items():
        assert parameter.grad is not None
        size = max(float(parameter.grad.abs().max()), 1e-3)  # what is added to all scores of a row has a gradient of 0
        theirs = reverted.get_parameter(parameter_name).grad
        torch.testing.assert_close(theirs, parameter.grad, rtol=0, atol=1e-5 * size, msg=parameter_name)
    biases = [
        name for name, parameter in original.named_parameters() if "relative" in name or "rel_pos" in name or name[-5:] == "table"
    ]
    assert any(original.get_parameter(name).grad.abs().max() > 1e-3 for name in biases)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", ["t5", "t5, eager", "mt5"])
def test_generate_takes_a_row_of_the_bias_per_step(name: str, beams: int) -> None:
    make, inputs, _ = CASES[name]
    original = make()
    converted, _ = convert(original, inputs)
    options: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "num_beams": beams}
    assert torch.equal(converted.generate(zoo.ids(), **options), original.generate(zoo.ids(), **options))
    for record in records(converted):
        assert (record.executed, record.fallbacks) == (1 if record.decision.scope.startswith("encoder") else 8, 0)


def test_a_static_cache_and_left_padding() -> None:
    original = t5()
    converted, _ = convert(original, zoo.inputs_of("t5"))
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    for more in ({"cache_implementation": "static", "disable_compile": True}, {"attention_mask": zoo.padding("left", 0, 4)}):
        ours, theirs = (each.generate(zoo.ids(), **options, **more) for each in (converted, original))
        assert torch.equal(ours, theirs)
    assert not any(record.fallbacks for record in records(converted))


def test_bfloat16_and_autocast() -> None:
    inputs = zoo.inputs_of("t5")
    _, report = convert(t5().to(torch.bfloat16), inputs)
    assert report.parity.passed
    assert all(site.executed and not site.fallbacks for site in attention_sites(report))
    original = t5()
    converted, _ = convert(original, inputs)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours, theirs = converted(**inputs)[0], original(**inputs)[0]
    torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.1 * float(theirs.abs().max()))
    assert all((record.executed, record.fallbacks) == (1, 0) for record in records(converted))


def test_the_plan_tells_and_survives_json() -> None:
    plan = te_convert.analyze(t5(), zoo.inputs_of("t5"))
    assert Plan.from_dict(plan.to_dict()) == plan
    assert all(site.spec.bias for site in plan.sites if site.kind == "Attention")  # type: ignore[union-attr]
    plain = te_convert.analyze(zoo.llama(), zoo.inputs_of("llama"))
    assert not any(site.spec.bias for site in plain.sites if site.kind == "Attention")  # type: ignore[union-attr]


# ---- masks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("attention", MASKS)
def test_a_mask_of_torchs_function_is_a_bias(attention: Any) -> None:
    original = model(attention())
    converted, report = convert(original, x())
    assert report.parity.passed
    assert not report.parity.reverted
    for each in (original, converted):
        each(x()).square().sum().backward()
    torch.testing.assert_close(converted(x()), original(x()), rtol=1e-4, atol=1e-5)
    assert [(record.executed, record.fallbacks) for record in records(converted)] == [(2, 0)]
    reverted: Any = te_convert.revert(converted)
    for name, parameter in original.named_parameters():
        if parameter.grad is not None:
            theirs = reverted.get_parameter(name).grad
            torch.testing.assert_close(theirs, parameter.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_a_bias_of_each_sample() -> None:
    boxes = torch.randint(0, 20, (2, zoo.LENGTH, 4), generator=torch.Generator().manual_seed(0)).sort(-1)[0]
    inputs = {"input_ids": zoo.ids(), "bbox": boxes}
    original = layoutlm()
    converted, report = convert(original, inputs)
    assert report.parity.passed
    with torch.no_grad():
        torch.testing.assert_close(converted(**inputs)[0], original(**inputs)[0], rtol=1e-4, atol=1e-5)
    assert [(record.executed, record.fallbacks) for record in records(converted)] == [(1, 0)]


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
        torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1),
        torch.randn(2, HEADS, LENGTH, LENGTH),
        torch.randn(1, 1, LENGTH, LENGTH),
        torch.randn(2, 1, 1, LENGTH),
        torch.randn(LENGTH, LENGTH),
        torch.full((LENGTH, LENGTH), -torch.inf),
        torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min),
    ],
    ids=["bool", "bool, nothing seen", "samples", "one head", "keys alone", "2-D", "-inf alone", "the least number alone"],
)
@pytest.mark.report("NVIDIA/TransformerEngine#614")
def test_another_mask_runs_on_te(mask: Tensor) -> None:
    original = Attention().eval()
    converted, _ = convert(original, x())
    with torch.no_grad():
        torch.testing.assert_close(converted(x(), mask), original(x(), mask), rtol=1e-4, atol=1e-5)
    assert [(record.executed, record.fallbacks) for record in records(converted)] == [(1, 0)]


@pytest.mark.parametrize(
    ("mask", "eager", "shape"),
    [
        (torch.ones(2, 1, 5, 5, dtype=torch.bool), False, (2, 1, 5, 5)),
        (torch.ones(2, 1, 5, 5, dtype=torch.bool), True, None),  # eager attention would add it
        (torch.zeros(2, 1, 1, 5), True, (2, 1, 5, 5)),
        (torch.zeros(4, 5, 5), False, (1, 4, 5, 5)),
        (torch.zeros(1, 2, 5, 5), False, None),  # two of four heads
        (torch.zeros(3, 1, 5, 5), False, None),
        (torch.zeros(2, 1, 5, 6), False, None),
        (torch.zeros(1, 1, 1, 5, 5), False, None),
        (torch.zeros(5, 5, dtype=torch.long), False, None),
    ],
)
def test_shapes_of_a_bias(mask: Tensor, eager: bool, shape: tuple[int, ...] | None) -> None:
    found = as_bias(mask, (2, 4, 5, 5), torch.zeros(2, 4, 5, 8), eager=eager)
    assert (None if found is None else tuple(found[0].shape)) == shape
    assert found is None or is_bias_shape(tuple(found[0].shape), (2, 4, 5, 5))


def test_the_least_number_stays_one_in_a_narrower_dtype() -> None:
    """Eager attention averages all values where a query sees no key; the least float32 would be -inf in bfloat16."""
    hidden = torch.full((1, 1, 5, 5), torch.finfo(torch.float32).min)
    found = as_bias(hidden, (1, 1, 5, 5), torch.zeros(1, 1, 5, 8, dtype=torch.bfloat16), eager=True)
    assert found is not None
    assert bool(found[0].isfinite().all())


def test_another_length_runs_on_te() -> None:
    original = Attention().eval()
    converted, _ = convert(original, x())
    with torch.no_grad():
        torch.testing.assert_close(converted(x(4)), original(x(4)), rtol=1e-4, atol=1e-5)
    assert [(record.executed, record.fallbacks) for record in records(converted)] == [(1, 0)]


def test_a_bias_that_no_recorded_call_had_runs_the_original() -> None:
    original = zoo.llama()
    converted, _ = convert(original, zoo.inputs_of("llama"))
    bias = torch.randn(1, 4, zoo.LENGTH, zoo.LENGTH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = (each(zoo.ids(), position_bias=bias).logits for each in (converted, original))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert all((record.executed, record.fallbacks) == (0, 1) for record in records(converted))


def test_a_function_that_ignores_the_bias_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.models.t5.modeling_t5 as modeling

    original = modeling.eager_attention_forward

    def forgetful(*args: Any, position_bias: Any = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setattr(modeling, "eager_attention_forward", forgetful)
    plan = te_convert.analyze(t5("eager"), zoo.inputs_of("t5"))
    assert all(codes(site) == ["attention.not-recognised"] for site in plan.sites if site.kind == "Attention")


# ---- mistakes --------------------------------------------------------------------------------------------------------
def ignored(original: Any, run: AttentionRun, module: Any) -> Any:
    return original(replace(run, masking=replace(run.masking, bias=None)), module)


def turned(original: Any, run: AttentionRun, module: Any) -> Any:
    assert run.masking.bias is not None
    square = run.masking.bias.shape[2] == run.masking.bias.shape[3]
    return original(replace(run, masking=replace(run.masking, bias=run.masking.bias.mT if square else None)), module)


def of_another_head(original: Any, run: AttentionRun, module: Any) -> Any:
    assert run.masking.bias is not None
    return original(replace(run, masking=replace(run.masking, bias=run.masking.bias.roll(1, 1))), module)


def without_its_gradient(original: Any, run: AttentionRun, module: Any) -> Any:
    assert run.masking.bias is not None
    return original(replace(run, masking=replace(run.masking, bias=run.masking.bias.detach())), module)


def seen_as_hidden(original: Any, run: AttentionRun, module: Any) -> Any:
    hidden = torch.zeros(1, 1, run.call.query.shape[2], 1, dtype=torch.bool)
    hidden[:, :, -1] = True
    return original(replace(run, masking=replace(run.masking, hidden=hidden)), module)


def hidden_not_zero(original: Any, run: AttentionRun, module: Any) -> Any:
    return original(replace(run, masking=replace(run.masking, hidden=None)), module)


@pytest.mark.parametrize(
    ("mistake", "attention"),
    [(seen_as_hidden, HidesByBuffer), (hidden_not_zero, HidesAll), (hidden_not_zero, HidesAllByBoolean), (ignored, Boolean)],
)
def test_a_mistake_with_a_mask_is_found_and_put_back(monkeypatch: pytest.MonkeyPatch, mistake: Any, attention: Any) -> None:
    plant(monkeypatch, mistake)
    converted, report = convert(model(attention()), x())
    assert report.parity.passed
    assert not records(converted)
    assert ["parity.failed" in codes(site) for site in attention_sites(report)] == [True]


@pytest.mark.parametrize("mistake", [ignored, turned, of_another_head, without_its_gradient])
@pytest.mark.parametrize("name", ["t5", "direct"])
def test_a_planted_mistake_is_found_and_put_back(monkeypatch: pytest.MonkeyPatch, mistake: Any, name: str) -> None:
    plant(monkeypatch, mistake)
    make, inputs, _ = CASES[name]
    converted, report = convert(make(), inputs)
    assert report.parity.passed
    kept = {record.decision.scope for record in records(converted)}
    assert not {scope for scope in kept if "EncDecAttention" not in scope}  # whose bias is 0
    found = [site for site in attention_sites(report) if site.fqn not in kept]
    assert all("parity.failed" in codes(site) for site in found)


def test_a_site_that_no_run_reached_is_compared_with_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {**zoo.inputs_of("t5"), "output_attentions": True}
    converted, report = convert(t5("eager"), inputs)
    unreached = [site for site in attention_sites(report) if site.parity.random_input]
    assert unreached
    assert all(site.parity.passed for site in unreached)
    assert len(records(converted)) == 6
    plant(monkeypatch, ignored)
    assert not records(convert(t5("eager"), inputs)[0])
