"""BLOOM, which writes its attention out and returns the weights from every layer: generation, weights asked for, a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import te_convert
from te_convert.rewrite.eager_attention import EagerRecord
from te_convert.rewrite.lazy_scores import LazyScores

transformers = pytest.importorskip("transformers")
IDS = torch.arange(14).reshape(2, 7)
MASK = torch.tensor([[1] * 7, [0, 0] + [1] * 5])


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4, attention_dropout=0.0, hidden_dropout=0.0)
    model = transformers.BloomForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    result = te_convert.convert(model, {"input_ids": IDS, "attention_mask": MASK})
    assert result.report.parity.passed
    assert not result.report.parity.reverted
    return model, result


def records(model: Any) -> list[EagerRecord]:
    found = dict.fromkeys(v for module in model.modules() for v in vars(module).values() if isinstance(v, EagerRecord))
    for record in found:
        record.executed = record.fallbacks = 0
    return list(found)


def test_a_padded_batch_runs_on_the_replacement(models: tuple[Any, Any]) -> None:
    model, (converted, _) = models
    found = records(converted)
    with torch.no_grad():
        a, b = (each(input_ids=IDS, attention_mask=MASK).logits for each in (model, converted))
    assert torch.allclose(a[MASK == 1], b[MASK == 1], atol=1e-4)
    assert [(record.executed, record.fallbacks) for record in found] == [(1, 0)] * 2


def test_it_generates_the_same_tokens(models: tuple[Any, Any]) -> None:
    model, (converted, _) = models
    found = records(converted)
    options: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **options), converted.generate(IDS, **options))
    assert [(record.executed, record.fallbacks) for record in found] == [(4, 0)] * 2


def test_weights_that_are_asked_for_are_plain_tensors_with_the_original_values(models: tuple[Any, Any]) -> None:
    model, (converted, _) = models
    with torch.no_grad():
        a, b = (each(input_ids=IDS, output_attentions=True).attentions for each in (model, converted))
    assert len(b) == 2
    for theirs, ours in zip(a, b, strict=True):
        assert type(ours) is not LazyScores
        assert torch.allclose(theirs, ours, atol=1e-5)


def test_a_written_directory_runs_the_same(models: tuple[Any, Any], tmp_path: Path) -> None:
    _, result = models
    te_convert.save(result, tmp_path / "bloom")
    loaded = te_convert.load(tmp_path / "bloom")
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, result.model(input_ids=IDS).logits)
    assert len(records(loaded)) == 2
