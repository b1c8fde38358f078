"""generate() gives the same tokens after conversion: greedy, sampling, beams, static cache, left-padded batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration.language_models import DECODERS, build, converted, ids

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "beam": {"do_sample": False, "num_beams": 3},
    "no cache": {"do_sample": False, "use_cache": False},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
}


def tokens(model: Any, prompt: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(5)
    out: torch.Tensor = model.generate(prompt, attention_mask=mask, max_new_tokens=8, pad_token_id=0, **options)
    return out


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("name", DECODERS)
def test_tokens_are_the_originals(name: str, options: dict[str, Any]) -> None:
    model = build(name)
    twin = converted(model)
    prompt = ids(2, 7)
    mask = torch.ones_like(prompt)
    assert torch.equal(tokens(model, prompt, mask, **options), tokens(twin, prompt, mask, **options))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.report("NVIDIA/bionemo-framework:bionemo-recipes/models/llama3/modeling_llama_te.py")
def test_left_padded_batches(name: str) -> None:
    model = build(name)
    twin = converted(model)
    prompt, mask = ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    prompt[1, :3], mask[1, :3] = 0, 0
    assert torch.equal(tokens(model, prompt, mask, do_sample=False), tokens(twin, prompt, mask, do_sample=False))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.report("Lightning-AI/lit-llama#249")
def test_cached_decode_gives_the_logits_of_the_whole_sequence() -> None:
    model = build("llama")
    twin = converted(model)
    prompt = ids(1, 12)
    with torch.no_grad():
        whole = model(prompt).logits
        first = twin(prompt[:, :8], use_cache=True)
        second = twin(prompt[:, 8:], past_key_values=first.past_key_values, use_cache=True)
    both = torch.cat([first.logits, second.logits], 1)
    assert (both - whole).abs().max() <= 2e-5 * whole.abs().max()
