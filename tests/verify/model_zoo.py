"""Tiny models with random weights from many families, built without the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Build = Callable[[], tuple[nn.Module, Any]]

_TEXT: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
_ENCODER_DECODER = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
_WAV = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 2,
}


def tokens() -> torch.Tensor:
    return torch.randint(3, 90, (2, 8), generator=torch.Generator().manual_seed(6))


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def _padded() -> dict[str, Any]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 6:] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


def _seq2seq() -> dict[str, Any]:
    return {"input_ids": tokens(), "decoder_input_ids": tokens()}


_TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], Callable[[], Any]]] = {
    "bert": ("BertModel", "BertConfig", _TEXT, _padded),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 100, "dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 64},
        lambda: {"input_ids": tokens()},
    ),
    "albert": ("AlbertModel", "AlbertConfig", {**_TEXT, "embedding_size": 16}, lambda: {"input_ids": tokens()}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_TEXT, "tie_word_embeddings": True}, lambda: {"input_ids": tokens()}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _GROUPED, lambda: {"input_ids": tokens()}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _GROUPED, lambda: {"input_ids": tokens()}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _GROUPED, lambda: {"input_ids": tokens()}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 100,
            "n_embd": 32,
            "n_layer": 1,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        lambda: {"input_ids": tokens()},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _TEXT, lambda: {"input_ids": tokens()}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": 100,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "word_embed_proj_dim": 32,
        },
        lambda: {"input_ids": tokens()},
    ),
    "t5": (
        "T5Model",
        "T5Config",
        {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4},
        _seq2seq,
    ),
    "bart": ("BartModel", "BartConfig", {**_ENCODER_DECODER, "max_position_embeddings": 64}, _seq2seq),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
        lambda: {"input_ids": tokens()},
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 100, "hidden_size": 32, "n_layer": 1, "n_head": 4},
        lambda: {"input_ids": tokens()},
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 8, "time_step_rank": 4},
        lambda: {"input_ids": tokens()},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_TEXT, "num_key_value_heads": 2, "num_local_experts": 4},
        lambda: {"input_ids": tokens()},
    ),
    "vit": ("ViTModel", "ViTConfig", _VISION, lambda: {"pixel_values": values(2, 3, 32, 32)}),
    "clip_vision": ("CLIPVisionModel", "CLIPVisionConfig", _VISION, lambda: {"pixel_values": values(2, 3, 32, 32)}),
    "siglip_vision": ("SiglipVisionModel", "SiglipVisionConfig", _VISION, lambda: {"pixel_values": values(2, 3, 32, 32)}),
    "dinov2": (
        "Dinov2Model",
        "Dinov2Config",
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "patch_size": 8},
        lambda: {"pixel_values": values(2, 3, 32, 32)},
    ),
    "wav2vec2": ("Wav2Vec2Model", "Wav2Vec2Config", _WAV, lambda: {"input_values": values(2, 1000)}),
    "whisper": (
        "WhisperModel",
        "WhisperConfig",
        {
            **_ENCODER_DECODER,
            "num_mel_bins": 8,
            "max_source_positions": 32,
            "max_target_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        lambda: {"input_features": values(2, 8, 64), "decoder_input_ids": tokens()},
    ),
}
_TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 4},
    "swin_tiny_patch4_window7_224": {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2)},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
}


def _encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.RMSNorm(32), nn.Linear(32, 5, bias=False))


_HAND_WRITTEN: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "post_norm_encoder": lambda: (_encoder(norm_first=False), (values(2, 8, 32),)),
    "pre_norm_encoder": lambda: (_encoder(norm_first=True), (values(2, 8, 32),)),
    "sequential": lambda: (_sequential(), (values(4, 8),)),
}

NAMES = (*_TRANSFORMERS, *_TIMM, *_HAND_WRITTEN)


def build(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """(model in eval mode, example inputs), seeded."""
    torch.manual_seed(0)
    if name in _TRANSFORMERS:
        import transformers

        cls, config, options, inputs = _TRANSFORMERS[name]
        model: nn.Module = getattr(transformers, cls)(getattr(transformers, config)(**options))
        example = inputs()
    elif name in _TIMM:
        import timm

        model, example = timm.create_model(name, **_TIMM[name]), (values(2, 3, 32, 32),)
    else:
        model, example = _HAND_WRITTEN[name]()
    return model.eval().to(dtype), cast(example, dtype)


def cast(inputs: Any, dtype: torch.dtype) -> Any:
    """Floating inputs in ``dtype``."""

    def one(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return {k: one(v) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(map(one, inputs))


def call(model: nn.Module, inputs: Any) -> torch.Tensor:
    """The first output tensor."""
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    first: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return first


def perturb(model: nn.Module) -> nn.Module:
    """Move 1-D parameters as training would."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter.dtype))
    return model
