"""Mistakes that a conversion of attention could make: verification must find each and put the sites back."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from te_convert.rewrite.attention import AttentionRecord
from te_convert.rewrite.attention_call import AttentionRun
from tests.rewrite import attention_models as zoo
from tests.rewrite.test_attention import attention_sites, convert, records
from tests.rewrite.test_attention_traps import codes


def plant(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    original = AttentionRun.converted

    def wrong(self: AttentionRun, module: Any) -> Tensor:
        y: Tensor = change(original, self, module)
        return y

    monkeypatch.setattr(AttentionRun, "converted", wrong)


def lost_scale(original: Any, run: AttentionRun, module: Any) -> Any:
    kept = module.softmax_scale
    module.softmax_scale = 1.0
    try:
        return original(run, module)
    finally:
        module.softmax_scale = kept


def causality_lost(original: Any, run: AttentionRun, module: Any) -> Any:
    return original(replace(run, masking=replace(run.masking, mask_type="no_mask", window=None)), module)


def causal_off_by_one(original: Any, run: AttentionRun, module: Any) -> Any:
    call = replace(run.call, key=run.call.key.roll(1, 2), value=run.call.value.roll(1, 2))
    return original(replace(run, call=call), module)


def window_off_by_one(original: Any, run: AttentionRun, module: Any) -> Any:
    window = run.masking.window
    assert window is not None
    return original(replace(run, masking=replace(run.masking, window=(window[0] + 1, window[1]))), module)


def groups_permuted(original: Any, run: AttentionRun, module: Any) -> Any:
    call = replace(run.call, key=run.call.key.flip(1), value=run.call.value.flip(1))
    return original(replace(run, call=call), module)


def polarity(original: Any, run: AttentionRun, module: Any) -> Any:
    """Padding where there is none and the other way round, kept on the right so that it is accepted."""
    assert run.masking.padding is not None
    queries, keys = run.masking.padding
    inverted = keys.logical_not().flip(-1)
    inverted[..., 0] = False
    return original(replace(run, masking=replace(run.masking, padding=(queries, inverted))), module)


def padding_lost(original: Any, run: AttentionRun, module: Any) -> Any:
    return original(replace(run, masking=replace(run.masking, mask_type="no_mask", padding=None)), module)


def layout_swapped(original: Any, run: AttentionRun, module: Any) -> Any:
    output = original(run, module)
    return output.transpose(1, 2).reshape(output.shape)


@pytest.mark.parametrize(
    ("mistake", "name", "padded"),
    [
        (lost_scale, "llama", 0),
        (causality_lost, "llama", 0),
        (causal_off_by_one, "llama", 0),
        (window_off_by_one, "mistral", 0),
        (groups_permuted, "llama", 0),
        (layout_swapped, "bert", 0),
        (polarity, "bert", 4),
        (padding_lost, "bert", 4),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_mistake_is_found_and_put_back(monkeypatch: pytest.MonkeyPatch, mistake: Any, name: str, padded: int) -> None:
    plant(monkeypatch, mistake)
    inputs = zoo.inputs_of(name)
    if padded:
        inputs = {**inputs, "attention_mask": zoo.padding("right", 0, padded)}
    model = zoo.CONVERTED[name]()
    converted, report = convert(model, inputs)
    assert report.parity.passed
    assert not records(converted)
    assert all("parity.failed" in codes(site) for site in attention_sites(report))
    assert {module.config._attn_implementation for module in converted.modules() if hasattr(module, "config")} == {"sdpa"}


def test_a_site_that_no_run_reached_is_compared_on_random_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionRecord, "_plan", lambda self, call: None)
    converted, report = convert(zoo.llama(), zoo.inputs_of("llama"))
    assert records(converted)
    for site in attention_sites(report):
        assert site.parity.random_input
        assert site.parity.passed


def test_a_site_without_runs_still_catches_a_lost_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lost_scale)
    monkeypatch.setattr(AttentionRecord, "_plan", lambda self, call: None)
    converted, _ = convert(zoo.llama(), zoo.inputs_of("llama"))
    assert not records(converted)


def test_record_counts_start_at_zero_in_copies() -> None:
    converted, _ = convert(zoo.llama(), zoo.inputs_of("llama"))
    converted(zoo.ids())
    copied = records(copy.deepcopy(converted))
    assert [type(record) for record in copied] == [AttentionRecord, AttentionRecord]
    assert all(record.executed == 0 for record in copied)
