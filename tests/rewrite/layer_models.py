"""Tiny Transformers models whose layers te.TransformerLayer can be, without dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.rewrite.attention_models import _make, ids, padding, perturbed

_GPT2: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
_BERT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def gpt2(implementation: str | None = None, **options: Any) -> Any:
    """Pre-norm, causal, tanh GELU, weights stored [in, out]."""
    sizes = {**_GPT2, "pad_token_id": 0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, **options}
    return perturbed(_make("GPT2LMHeadModel", "GPT2Config", implementation, **sizes))


def bert(implementation: str | None = None, **options: Any) -> Any:
    """Post-norm, every key visible."""
    return perturbed(_make("BertModel", "BertConfig", implementation, **{**_BERT, "hidden_act": "relu", **options}))


def clip_text() -> Any:
    """Pre-norm, quick GELU, causal by an argument of the layer."""
    sizes = {name: value for name, value in _BERT.items() if "dropout" not in name}
    return perturbed(_make("CLIPTextModel", "CLIPTextConfig", **sizes, eos_token_id=2, bos_token_id=1, pad_token_id=0))


CASES: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "gpt2, eager": lambda: gpt2("eager"),
    "bert, relu": bert,
    "bert, gelu_new": lambda: bert(hidden_act="gelu_new"),
    "clip text": clip_text,
}


def inputs(name: str, side: str = "", **options: Any) -> dict[str, Any]:
    """Tokens, with a padded second sample if a side is named; without a cache."""
    found: dict[str, Any] = {"input_ids": ids(), **options}
    found |= {"use_cache": False} if name.startswith("gpt2") else {}
    return found | ({"attention_mask": padding(side, 0, 4)} if side else {})


def hidden(output: Any) -> torch.Tensor:
    """The first output: logits or hidden states."""
    found: torch.Tensor = output[0]
    return found
