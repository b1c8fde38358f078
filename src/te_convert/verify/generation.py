"""Greedy decoding of a small batch with a cache: the logits of every step, until the tokens part."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from te_convert.capture.scenario import Scenario
from te_convert.verify.compare import Outputs, compare
from te_convert.verify.model import Figures
from te_convert.verify.run import Setting, prepared

NEW_TOKENS = 6
_TOKENS = "tokens"


def can_generate(model: nn.Module, scenario: Scenario) -> bool:
    """A Transformers model that decodes from ``input_ids`` alone."""
    common: Any = sys.modules.get("transformers.modeling_utils")
    if common is None or not isinstance(model, common.PreTrainedModel) or not model.can_generate():
        return False
    ids = scenario.kwargs.get("input_ids")
    others = set(scenario.kwargs) - {"input_ids", "attention_mask", "labels"}
    return isinstance(ids, torch.Tensor) and ids.dim() == 2 and not scenario.args and not others


def generate_outputs(model: Any, scenario: Scenario, setting: Setting) -> Outputs:
    """The new tokens, and the logits [batch, vocabulary] of each step.

    Raises:
        Exception: whatever the model raises.
    """
    ids = scenario.kwargs["input_ids"][:2, :8]
    ids = ids if len(ids) == 2 else ids.repeat(2, 1)
    with prepared(model, scenario, setting):
        result = model.generate(
            input_ids=ids.clone(),
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
    tokens = result.sequences[:, -len(result.logits) :].clone()
    return [(_TOKENS, tokens), *((f"step {step}", logits.detach().clone()) for step, logits in enumerate(result.logits))]


def compare_generated(original: Outputs, converted: Outputs) -> tuple[str, Figures]:
    """The worst step up to where the tokens part: there, equal logits mean a tie that rounding decided."""
    (_, tokens), (_, others) = original[0], converted[0]
    worst = ("", Figures(float("inf"), 0.0, bit_equal=True, numel=0))
    for step, ((name, a), (_, b)) in enumerate(zip(original[1:], converted[1:], strict=False)):
        figures = compare(a, b)
        if figures.sqnr_db < worst[1].sqnr_db or not worst[1].numel:
            worst = (name, figures)
        if step >= tokens.shape[1] or step >= others.shape[1] or not torch.equal(tokens[:, step], others[:, step]):
            break
    return worst
