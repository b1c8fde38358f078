"""A bias of the scores on te.DotProductAttention itself: T5's relative positions and a learnt mask of torch's function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import te_convert
from tests.rewrite import attention_models as zoo
from tests.rewrite.test_attention import attention_sites, records
from tests.rewrite.test_attention_bias import CASES
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu

pytestmark = needs_te


@pytest.fixture(autouse=True)
def te() -> Iterator[Any]:
    with te_on_cpu() as package:
        yield package


def convert(model: Any, inputs: Any) -> Any:
    result = te_convert.convert(model, inputs, backend="te")
    assert result.report.parity.passed
    assert not result.report.parity.reverted
    assert all(site.replacement == "te.DotProductAttention" for site in attention_sites(result.report))
    for record in records(result.model):
        record.executed = record.fallbacks = 0
    return result.model


def backward(model: Any, inputs: Any) -> Tensor:
    output = model(**inputs)
    y: Tensor = output if isinstance(output, Tensor) else output[0]
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)))
    return y.detach()


@pytest.mark.parametrize("name", ["t5", "t5, eager", "t5, padded", "mt5", "direct"])
def test_outputs_and_gradients_are_the_originals(name: str) -> None:
    make, inputs, count = CASES[name]
    original = make()
    model = convert(original, inputs)
    torch.testing.assert_close(backward(model, inputs), backward(original, inputs), rtol=1e-5, atol=1e-5)
    assert [(record.executed, record.fallbacks) for record in records(model)] == [(1, 0)] * count
    reverted: Any = te_convert.revert(model)
    for parameter_name, parameter in original.named_parameters():
        ours, theirs = reverted.get_parameter(parameter_name).grad, parameter.grad
        size = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * size, msg=parameter_name)


def test_generate_gives_the_same_tokens() -> None:
    make, inputs, _ = CASES["t5"]
    original = make()
    model = convert(original, inputs)
    options: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(zoo.ids(), **options), original.generate(zoo.ids(), **options))
    assert {(record.executed, record.fallbacks) for record in records(model)} == {(1, 0), (8, 0)}
