"""te.DotProductAttention itself: sinks as its learnable softmax offset, and masks of every shape as a bias of the scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rewrite import attention_models as zoo
from tests.rewrite.bias_samples import HEADS, LENGTH, MASKS, Attention, model, x
from tests.rewrite.test_attention import records
from tests.rewrite.test_attention_sinks import INPUTS, gpt_oss
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu
from tests.te_contract.test_attention_bias import convert

pytestmark = needs_te


@pytest.fixture(autouse=True)
def te() -> Iterator[Any]:
    with te_on_cpu() as package:
        yield package


@pytest.mark.parametrize("padded", ["", "left"])
def test_sinks(padded: str) -> None:
    inputs = {**INPUTS, **({"attention_mask": zoo.padding(padded, 0, 4)} if padded else {})}
    valid = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    original = gpt_oss()
    converted = convert(original, inputs)
    outputs = [each(**inputs).logits[valid] for each in (original, converted)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    assert [(record.executed, record.fallbacks) for record in records(converted)] == [(1, 0)] * 2
    for output in outputs:
        output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(9)))
    for ours, theirs in zip(converted.model.layers, original.model.layers, strict=True):
        torch.testing.assert_close(ours.self_attn.sinks.grad, theirs.self_attn.sinks.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("attention", MASKS)
def test_masks_of_modules(attention: Any) -> None:
    original = model(attention())
    converted = convert(original, {"input": x()})
    with torch.no_grad():
        torch.testing.assert_close(converted(x()), original(x()), rtol=1e-4, atol=1e-5)
    assert [(record.executed, record.fallbacks) for record in records(converted)] == [(1, 0)]


@pytest.mark.parametrize(
    "mask",
    [
        torch.randn(2, HEADS, LENGTH, LENGTH),
        torch.randn(1, HEADS, LENGTH, LENGTH),
        torch.randn(2, 1, 1, LENGTH),
        torch.randn(LENGTH, LENGTH),
        torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min),
    ],
    ids=["bhss", "1hss", "keys alone", "11ss", "the least number alone"],
)
def test_shapes_of_masks(mask: Tensor) -> None:
    original = Attention().eval()
    converted = convert(original, {"x": x()})
    with torch.no_grad():
        torch.testing.assert_close(converted(x(), mask), original(x(), mask), rtol=1e-4, atol=1e-5)
    assert [(record.executed, record.fallbacks) for record in records(converted)] == [(1, 0)]
