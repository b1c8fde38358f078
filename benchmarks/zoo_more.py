"""Models of other libraries for the zoo: torchvision, x-transformers, LitGPT, OpenCLIP, each cut small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, Any]


def _image(size: int) -> tuple[torch.Tensor]:
    return (torch.randn(2, 3, size, size),)


def _torchvision_vit() -> Built:
    from torchvision.models import VisionTransformer

    return VisionTransformer(image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128), _image(32)


def _torchvision_swin(version: int) -> Built:
    from torchvision.models import swin_transformer as swin

    block = {1: swin.SwinTransformerBlock, 2: swin.SwinTransformerBlockV2}[version]
    merge = {1: swin.PatchMerging, 2: swin.PatchMergingV2}[version]
    model = swin.SwinTransformer(
        [4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=5, stochastic_depth_prob=0.0, block=block, downsample_layer=merge
    )
    return model, _image(64)


def _torchvision_maxvit() -> Built:
    from torchvision.models import MaxVit

    return MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=5), _image(64)


TORCHVISION: dict[str, Callable[[], Built]] = {
    "VisionTransformer": _torchvision_vit,
    "SwinTransformer": lambda: _torchvision_swin(1),
    "SwinTransformerV2": lambda: _torchvision_swin(2),
    "MaxVit": _torchvision_maxvit,
}

X_STYLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rmsnorm": {"use_rmsnorm": True},
    "rotary": {"rotary_pos_emb": True},
    "swiglu": {"ff_glu": True, "ff_swish": True},
    "relu-squared": {"ff_relu_squared": True},
    "no-bias": {"ff_no_bias": True},
    "flash": {"attn_flash": True},
    "grouped-queries": {"attn_kv_heads": 2},
    "one-kv-head": {"attn_one_kv_head": True},
    "qk-norm": {"attn_qk_norm": True},
    "alibi": {"alibi_pos_bias": True},
    "t5-bias": {"rel_pos_bias": True},
    "sandwich": {"sandwich_norm": True},
    "post-norm": {"pre_norm": False},
    "macaron": {"macaron": True},
    "talking-heads": {"attn_pre_talking_heads": True},
    "memory": {"attn_num_mem_kv": 4},
    "scalenorm": {"use_scalenorm": True},
    "gated-values": {"attn_gate_values": True},
    "llama": {
        "use_rmsnorm": True,
        "rotary_pos_emb": True,
        "ff_glu": True,
        "ff_swish": True,
        "ff_no_bias": True,
        "attn_flash": True,
    },
}
"""Features of x-transformers' README, one decoder each."""


def build_x(name: str) -> Built:
    """A decoder of x-transformers (needs `pip install x-transformers`)."""
    from x_transformers import Decoder, Encoder, TransformerWrapper

    layers = Encoder if name == "encoder" else Decoder
    style = X_STYLES.get(name, {})
    model = TransformerWrapper(num_tokens=97, max_seq_len=64, attn_layers=layers(dim=64, depth=2, heads=4, **style))
    return model, (torch.randint(0, 97, (2, 9)),)


LITGPT = (
    "pythia-14m", "Llama-3-8B", "Llama-3.2-1B", "Mistral-7B-v0.1", "Mixtral-8x7B-v0.1", "Gemma-2b", "Gemma-2-2b", "Gemma-3-1b-it",
    "CodeGemma-7b-it", "falcon-7b", "falcon-40b", "phi-1_5", "phi-2", "Phi-3-mini-4k-instruct", "phi-4", "OLMo-1B-hf",
    "OLMo-2-1124-7B", "Qwen2.5-0.5B", "Qwen3-0.6B", "Qwen3-30B-A3B", "stablelm-3b-4e1t", "SmolLM2-135M", "open_llama_3b",
    "tiny-llama-1.1b", "salamandra-2b", "Falcon3-1B-Base", "QwQ-32B",
)  # fmt: skip
"""One of each family of LitGPT's configs."""


def build_litgpt(name: str) -> Built:
    """A LitGPT model, its published config cut to two layers of width 64 (needs `pip install litgpt`)."""
    from litgpt import GPT, Config

    full = Config.from_name(name)
    groups = {full.n_head: 4, 1: 1}.get(full.n_query_groups, 2)
    cut: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 4, "head_size": 16, "n_query_groups": groups}
    cut |= {"intermediate_size": 128, "block_size": 64, "vocab_size": 97, "padded_vocab_size": 128}
    if getattr(full, "n_expert", 0):
        cut |= {"n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 32}
    if getattr(full, "rope_indices", None):
        cut["rope_indices"] = full.rope_indices[:2]
    if getattr(full, "sliding_window_indices", None):
        cut["sliding_window_indices"] = full.sliding_window_indices[:2]
    return GPT(Config.from_name(name, **cut)), (torch.randint(0, 97, (2, 9)),)


OPEN_CLIP = (
    "ViT-B-32", "ViT-B-32-quickgelu", "coca_ViT-B-32", "ViT-B-16-SigLIP", "EVA02-B-16", "MobileCLIP-S1", "RN50", "PE-Core-B-16",
    "convnext_base", "ViT-B-32-256",
)  # fmt: skip


def build_open_clip(name: str) -> Built:
    """An OpenCLIP model, both towers cut to two layers where its config has a depth (needs `pip install open_clip_torch`)."""
    import open_clip

    config = open_clip.get_model_config(name)
    text, vision = config["text_cfg"], config["vision_cfg"]
    text.pop("hf_tokenizer_name", None)
    text |= {"layers": 2, "vocab_size": 99, "eos_id": 98}
    if isinstance(vision.get("layers"), int):
        vision["layers"] = 2
    vision.pop("timm_model_pretrained", None)
    if "multimodal_cfg" in config:
        config["multimodal_cfg"] |= {"layers": 2, "vocab_size": 99}
    custom = bool(config.pop("custom_text", False)) or "timm_model_name" in vision
    kind = open_clip.CoCa if "multimodal_cfg" in config else open_clip.CustomTextCLIP if custom else open_clip.CLIP
    config = {key: value for key, value in config.items() if key in ("embed_dim", "text_cfg", "vision_cfg", "multimodal_cfg")}
    size = vision.get("image_size", 224)
    ids = torch.randint(1, 98, (1, text.get("context_length", 77)))
    ids[:, -1] = 98
    return kind(**config), (torch.randn(1, 3, size, size), ids)


MORE: dict[str, tuple[tuple[str, ...], Callable[[str], Built]]] = {
    "torchvision": (tuple(TORCHVISION), lambda name: TORCHVISION[name]()),
    "x-transformers": ((*X_STYLES, "encoder"), build_x),
    "litgpt": (LITGPT, build_litgpt),
    "open_clip": (OPEN_CLIP, build_open_clip),
}
"""For each library its models' names and their builder."""


def build_more(source: str, name: str) -> Built:
    """A seeded model in eval mode and the arguments for it."""
    torch.manual_seed(0)
    model, inputs = MORE[source][1](name)
    return model.eval(), inputs
