"""Padded positions are left out of the comparison of causal Transformers models, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from te_convert.capture.scenario import Scenario
from te_convert.verify.padding import hide_padding, padding_mask
from tests.rewrite import attention_models as zoo


def scenario(**inputs: Any) -> Scenario:
    return Scenario("inputs", (), inputs)


@pytest.mark.parametrize("build", [zoo.llama, zoo.bert])
def test_of_a_transformers_model(build: Callable[[], Any]) -> None:
    mask = zoo.padding("right", 0, 4)
    found = padding_mask(build(), scenario(input_ids=zoo.ids(), attention_mask=mask))
    assert found is not None
    assert torch.equal(found, mask == 0)


@pytest.mark.parametrize("mask", [None, torch.ones(2, 12, dtype=torch.long), torch.zeros(2, 1, 12, 12), torch.ones(2, 12)])
def test_nothing_without_padding(mask: Any) -> None:
    assert padding_mask(zoo.llama(), scenario(input_ids=zoo.ids(), attention_mask=mask)) is None


def test_other_peoples_models_are_compared_everywhere() -> None:
    padded = scenario(input_ids=zoo.ids(), attention_mask=zoo.padding("right", 0, 4))
    assert padding_mask(nn.Linear(2, 2), padded) is None


def test_a_decoders_outputs_have_the_decoders_padding() -> None:
    encoder, decoder = zoo.padding("right", 0, 4), zoo.padding("right", 2, 0, length=9)
    inputs = {"input_ids": zoo.ids(), "attention_mask": encoder, "decoder_input_ids": zoo.ids(length=9)}
    assert padding_mask(zoo.bart(), scenario(**inputs)) is None
    found = padding_mask(zoo.bart(), scenario(**inputs, decoder_attention_mask=decoder))
    assert found is not None
    assert torch.equal(found, decoder == 0)


@pytest.mark.parametrize(
    ("shape", "place"), [((2, 12, 5), 1), ((2, 12), 1), ((2, 4, 12, 8), 2), ((2, 12, 4, 8), 1), ((2, 4, 12, 12), 2), ((2, 7), None)]
)
def test_hidden_positions(shape: tuple[int, ...], place: int | None) -> None:
    padded = zoo.padding("right", 0, 4) == 0
    output = hide_padding(torch.ones(shape), padded)
    if place is None:
        assert torch.equal(output, torch.ones(shape))
        return
    moved = output.movedim(place, 1)
    assert (moved[~padded] == 1).all()
    assert (moved[padded] == 0).all()
