"""Written-out attention on te.DotProductAttention itself, with each kind of mask and bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_convert
from tests.rewrite.test_eager_attention import CASES, Merged, inputs, model_of, padding, record_of
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu

pytestmark = needs_te
KEEP = torch.ones(6, 6, dtype=torch.bool).tril()[None, None] & (padding() == 0)


@pytest.fixture(autouse=True)
def te() -> Iterator[Any]:
    with te_on_cpu() as package:
        yield package


@pytest.mark.parametrize(("attention", "rest", "mask_type"), [*CASES, (Merged(), (KEEP,), "arbitrary")])
def test_outputs_and_gradients_are_the_originals(attention: nn.Module, rest: tuple[Tensor, ...], mask_type: str) -> None:
    model = model_of(attention)
    result, report = te_convert.convert(model, inputs(*rest), backend="te")
    assert report.parity.passed
    assert not report.parity.reverted
    record = record_of(result)
    seen: list[Any] = []
    record.observer = lambda _, given, __: seen.append(given[0][0])
    found = []
    for each in (model, result):
        x, *others = inputs(*rest)
        y = each(x.requires_grad_(), *others)
        found.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-4 * a.abs().max()
    assert (record.executed, record.fallbacks) == (1, 0)
    assert seen[0].masking.mask_type == mask_type
