"""Mistakes that the conversion of written-out attention could make: each is found, and the site is put back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import te_convert
from te_convert.rewrite.eager_attention import EagerRun
from tests.rewrite.test_eager_attention import Biased, Merged, NanoGPT, inputs, model_of, padding


def lost_scale(original: Any, run: EagerRun, module: Any) -> Any:
    kept, module.softmax_scale = module.softmax_scale, 1.0
    try:
        return original(run, module)
    finally:
        module.softmax_scale = kept


def causality_lost(original: Any, run: EagerRun, module: Any) -> Any:
    return original(replace(run, masking=replace(run.masking, mask_type="no_mask")), module)


def causal_off_by_one(original: Any, run: EagerRun, module: Any) -> Any:
    length = run.value.shape[-2]
    mask = torch.ones(length, length, dtype=torch.bool).triu(2)[None, None]
    return original(replace(run, masking=replace(run.masking, mask_type="arbitrary", mask=mask)), module)


def bias_lost(original: Any, run: EagerRun, module: Any) -> Any:
    return original(replace(run, masking=replace(run.masking, bias=None)), module)


def bias_of_the_wrong_sign(original: Any, run: EagerRun, module: Any) -> Any:
    assert run.masking.bias is not None
    return original(replace(run, masking=replace(run.masking, bias=-run.masking.bias)), module)


def polarity(original: Any, run: EagerRun, module: Any) -> Any:
    """What is hidden is seen; nothing changes for samples without padding."""
    if run.masking.mask is None:
        return original(run, module)
    mask = torch.where(run.masking.mask.any(-1, keepdim=True), ~run.masking.mask, run.masking.mask)
    return original(replace(run, masking=replace(run.masking, mask_type="arbitrary", mask=mask)), module)


def heads_and_samples_swapped(original: Any, run: EagerRun, module: Any) -> Any:
    y = original(run, module)
    return y.flip(0)


MUTANTS: list[tuple[Callable[..., Any], Any, tuple[torch.Tensor, ...]]] = [
    (lost_scale, NanoGPT, ()),
    (causality_lost, NanoGPT, ()),
    (causal_off_by_one, NanoGPT, ()),
    (bias_lost, Biased, ()),
    (bias_of_the_wrong_sign, Biased, ()),
    (bias_lost, Merged, ()),
    (polarity, Biased, (padding(),)),
    (heads_and_samples_swapped, Merged, ()),
]


@pytest.mark.parametrize(("mutant", "attention", "rest"), MUTANTS)
def test_verification_puts_the_site_back(
    mutant: Callable[..., Any], attention: Any, rest: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = EagerRun.converted
    monkeypatch.setattr(EagerRun, "converted", lambda run, module: mutant(original, run, module))
    model = model_of(attention())
    result, report = te_convert.convert(model, inputs(*rest))
    assert [site.fqn for site in report.parity.reverted] == ["attention.core_attention"]
    assert [reason.code for reason in report.site("attention").reasons] == ["parity.failed"]
    with torch.no_grad():
        assert torch.allclose(result(*inputs(*rest)), model(*inputs(*rest)), atol=1e-5)
