"""Tiny models of real architectures, with random weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = {"vocab_size": 100}
SMALL = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
NO_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IDS = torch.tensor([[5, 17, 42, 3, 99, 8, 61, 20], [7, 7, 30, 55, 2, 71, 14, 9]])
MASK = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])


def image(size: int) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def hugging_face(config: str, model: str, **options: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")
    built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return built.eval()


def timm(name: str, **options: Any) -> nn.Module:
    built: nn.Module = importlib.import_module("timm").create_model(name, num_classes=4, **options)
    return built.eval()


def llama() -> nn.Module:
    return hugging_face("LlamaConfig", "LlamaForCausalLM", **SMALL, num_key_value_heads=2)


def bert() -> nn.Module:
    return hugging_face("BertConfig", "BertModel", **SMALL)


def gpt2() -> nn.Module:
    return hugging_face(
        "GPT2Config", "GPT2LMHeadModel", vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=32, **NO_TOKENS
    )


def t5() -> nn.Module:
    return hugging_face(
        "T5Config", "T5ForConditionalGeneration", vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )


def bart() -> nn.Module:
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (("layers", 2), ("attention_heads", 4))}
    widths = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    return hugging_face("BartConfig", "BartModel", vocab_size=100, max_position_embeddings=32, **sizes, **widths)


def whisper() -> nn.Module:
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (("layers", 1), ("attention_heads", 4))}
    widths = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8, "max_source_positions": 8}
    tokens = {**NO_TOKENS, "decoder_start_token_id": 1}
    return hugging_face("WhisperConfig", "WhisperModel", vocab_size=100, max_target_positions=16, **sizes, **widths, **tokens)


def clip() -> nn.Module:
    text = {**SMALL, "max_position_embeddings": 16, **NO_TOKENS}
    vision = {**{k: v for k, v in SMALL.items() if k != "vocab_size"}, "image_size": 32, "patch_size": 16}
    return hugging_face("CLIPConfig", "CLIPModel", text_config=text, vision_config=vision, projection_dim=16)


Inputs = Any
ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "bert": (bert, {"input_ids": IDS, "attention_mask": MASK}),
    "gpt2": (gpt2, {"input_ids": IDS}),
    "llama": (llama, {"input_ids": IDS, "attention_mask": MASK}),
    "t5": (t5, {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}),
    "bart": (bart, {"input_ids": IDS, "attention_mask": MASK}),
    "mixtral": (
        lambda: hugging_face("MixtralConfig", "MixtralModel", **SMALL, num_key_value_heads=2, num_local_experts=4),
        {"input_ids": IDS},
    ),
    "falcon": (
        lambda: hugging_face(
            "FalconConfig", "FalconModel", vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
        ),
        {"input_ids": IDS},
    ),
    "gptj": (
        lambda: hugging_face("GPTJConfig", "GPTJModel", vocab_size=100, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, **NO_TOKENS),
        {"input_ids": IDS},
    ),
    "opt": (
        lambda: hugging_face(
            "OPTConfig", "OPTModel", **{**SMALL, "ffn_dim": 64}, word_embed_proj_dim=32, max_position_embeddings=32
        ),
        {"input_ids": IDS, "attention_mask": MASK},
    ),
    "bloom": (
        lambda: hugging_face("BloomConfig", "BloomModel", **VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
        {"input_ids": IDS},
    ),
    "gemma2": (
        lambda: hugging_face("Gemma2Config", "Gemma2Model", **SMALL, num_key_value_heads=2, head_dim=8),
        {"input_ids": IDS},
    ),
    "mamba": (
        lambda: hugging_face("MambaConfig", "MambaModel", vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=4),
        {"input_ids": IDS},
    ),
    "whisper": (
        whisper,
        {"input_features": torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0)), "decoder_input_ids": IDS},
    ),
    "clip": (clip, {"input_ids": IDS, "pixel_values": image(32)}),
    "vit": (lambda: timm("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=4), image(32)),
    "swin": (
        lambda: timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(1, 2), num_heads=(2, 4)),
        image(32),
    ),
    "convnext": (lambda: timm("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 16, 16, 16)), image(32)),
    "beit": (lambda: timm("beit_base_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=4), image(32)),
}
