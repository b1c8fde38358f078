"""Tiny random Transformers models, one per way in which attention is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

LENGTH = 12
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 3,
}


def _make(name: str, config: str, implementation: str | None = None, /, **options: Any) -> Any:
    torch.manual_seed(1)
    made = getattr(transformers, config)(**options)
    keywords = {} if implementation is None else {"attn_implementation": implementation}
    model = getattr(transformers, name)._from_config(made, **keywords)
    return model.eval()


def llama(implementation: str | None = None, **options: Any) -> Any:
    """4 heads of queries over 2 of keys."""
    return _make("LlamaForCausalLM", "LlamaConfig", implementation, **{**_SIZES, "num_key_value_heads": 2, **options})


def mistral(implementation: str | None = None) -> Any:
    """A sliding window shorter than the sequence."""
    return _make("MistralForCausalLM", "MistralConfig", implementation, **_SIZES, num_key_value_heads=2, sliding_window=5)


def qwen2() -> Any:
    return _make("Qwen2ForCausalLM", "Qwen2Config", **_SIZES, num_key_value_heads=2)


def gemma2() -> Any:
    """Softcap, a scale of its own, and a sliding window in every other layer."""
    sizes = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0}
    return _make("Gemma2ForCausalLM", "Gemma2Config", **sizes)


def gpt2(implementation: str | None = None) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return _make("GPT2LMHeadModel", "GPT2Config", implementation, **sizes)


def bert(implementation: str | None = None) -> Any:
    return _make("BertModel", "BertConfig", implementation, **_SIZES)


def bart() -> Any:
    return _make("BartForConditionalGeneration", "BartConfig", **_ENCODER_DECODER, max_position_embeddings=64)


def whisper() -> Any:
    sizes = {**_ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32}
    return _make("WhisperForConditionalGeneration", "WhisperConfig", **sizes, suppress_tokens=None, begin_suppress_tokens=None)


def t5(implementation: str | None = None, **options: Any) -> Any:
    """A learnt bias of the scores, and none in cross-attention."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 1,
        "num_heads": 4,
        "pad_token_id": 0,
    }
    sizes |= {"decoder_start_token_id": 0, "eos_token_id": 2, **options}
    return _make("T5ForConditionalGeneration", "T5Config", implementation, **sizes)


def perturbed(model: Any) -> Any:
    """The model with all parameters away from what they were made with, a bias of 0 for one."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def gpt_oss() -> Any:
    """Sinks: a learnt entry of every softmax."""
    sizes = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    return _make("GptOssForCausalLM", "GptOssConfig", **sizes)


def vit() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return _make("ViTModel", "ViTConfig", **sizes, image_size=16, patch_size=4)


def ids(batch: int = 2, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    """Tokens without the special ones."""
    return torch.randint(4, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(side: str, *pads: int, length: int = LENGTH) -> torch.Tensor:
    """An attention mask [len(pads), length] with so many padded positions on one side."""
    mask = torch.ones(len(pads), length, dtype=torch.long)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    return mask if side == "left" else mask.flip(1)


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    """Example inputs of a model above."""
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    if name == "whisper":
        features = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(0))
        return {"input_features": features, "decoder_input_ids": ids(seed=1)}
    if name in ("bart", "t5"):
        return {"input_ids": ids(), "decoder_input_ids": ids(length=9, seed=1)}
    return {"input_ids": ids()}


CONVERTED: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "gemma2": gemma2,
    "gpt2": gpt2,
    "bert": bert,
    "bart": bart,
    "whisper": whisper,
    "t5": t5,
    "vit": vit,
}
