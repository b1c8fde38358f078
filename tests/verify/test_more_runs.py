"""Beyond the inputs as given: generate(), padded batches, optimizer steps; and what is left out for slow models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.rewrite.fused import fused_record
from te_convert.verify import reference
from te_convert.verify.generation import compare_generated
from tests.integration.language_models import build, ids

NAMES = ("inputs[padded right]", "inputs[padded left]", "inputs[gradients]", "inputs[generate]")


def convert(model: Any) -> Any:
    return te_convert.convert(model, {"input_ids": ids()})


def test_a_language_model_is_also_compared_padded_backward_and_decoding() -> None:
    report = convert(build("llama")).report
    names = {scenario.name for scenario in report.parity.scenarios}
    assert set(NAMES) <= names
    assert report.parity.passed
    assert not any("generate" in line or "padded" in line or "gradients" in line for line in report.not_verified)


def test_a_slow_model_makes_do_with_the_inputs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SLOW_S", 0.0)
    report = convert(build("llama")).report
    names = {scenario.name for scenario in report.parity.scenarios}
    assert names == {"inputs"}
    assert report.parity.passed
    assert any("were left out" in note for note in report.parity.notes)
    assert {"gradients", "generate() with a cache", "padded batches"} <= set(report.not_verified)


def test_a_slow_low_precision_model_runs_as_given_where_a_recipe_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are those of the parameters as they are."""
    monkeypatch.setattr(reference, "SLOW_S", -1.0)
    model, inputs = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).bfloat16(), (torch.randn(16, 32).bfloat16(),)
    plain, quantised = (te_convert.convert(model, inputs, recipe=recipe).report for recipe in (None, "fp8-current"))
    assert {scenario.perturbed for scenario in plain.parity.scenarios} == {True}
    assert {scenario.perturbed for scenario in quantised.parity.scenarios} == {True, False}
    assert quantised.parity.passed


def test_decoding_with_wrong_attention_to_the_cache_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal on whole sequences, wrong when one query meets a cache."""
    from te_convert import reference as twins

    own = twins.DotProductAttention.forward

    def forward(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if query.shape[1] == 1 and key.shape[1] > 1:
            key, value = key[:, :1], value[:, :1]
        return own(self, query, key, value, *args, **kwargs)

    monkeypatch.setattr(twins.DotProductAttention, "forward", forward)
    model = build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    report = convert(model).report
    generated = [s for s in report.parity.scenarios if s.name == "inputs[generate]"]
    assert report.parity.reverted or not generated


def test_tokens_that_part_at_equal_logits_are_a_tie() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0]])
    one = [("tokens", torch.tensor([[0, 2]])), ("step 0", logits), ("step 1", torch.randn(1, 3))]
    other = [("tokens", torch.tensor([[1, 0]])), ("step 0", logits), ("step 1", torch.randn(1, 3))]
    assert compare_generated(one, other)[1].bit_equal


def test_tokens_that_part_at_different_logits_are_not() -> None:
    one = [("tokens", torch.tensor([[0]])), ("step 0", torch.tensor([[1.0, 0.0]]))]
    other = [("tokens", torch.tensor([[1]])), ("step 0", torch.tensor([[0.0, 1.0]]))]
    assert compare_generated(one, other)[1].sqnr_db < 10


def test_optimizer_steps_agree_and_leave_both_models_alone() -> None:
    model = build("llama")
    twin = convert(model).model
    before = [copy.deepcopy(te_convert.original_state_dict(each)) for each in (model, twin)]
    parity = te_convert.verify(model, twin, {"input_ids": ids()}, steps=3)
    assert parity.passed
    assert parity.scenarios[-1].name == "inputs[3 steps]"
    for each, state in zip((model, twin), before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in te_convert.original_state_dict(each).items())


def test_a_frozen_copy_of_a_weight_fails_after_a_step() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    twin: Any = te_convert.convert(net, (torch.randn(3, 8),)).model
    twin[0].weight.requires_grad_(False)
    parity = te_convert.verify(net, twin, (torch.randn(3, 8),), steps=5)
    assert not parity.passed
    assert not parity.scenarios[-1].passed


def test_no_fusion_falls_back_on_the_inputs_as_given() -> None:
    twin = convert(build("llama")).model
    records = [record for module in twin.modules() if (record := fused_record(module)) is not None]
    before = sum(record.fallbacks for record in records)
    with torch.no_grad():
        twin(ids())
    assert sum(record.fallbacks for record in records) == before
