"""Small Transformers directories, sharded, with norms and biases away from their defaults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn


def _llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        pad_token_id=0,
        **options,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    special = {"bos_token_id": 1, "eos_token_id": 2}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, n_positions=32, **special))
    return model


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        num_local_experts=3,
        dtype="bfloat16",
    )
    model: nn.Module = MixtralForCausalLM._from_config(config, dtype=torch.bfloat16)  # buffers stay float32
    return model


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "llama tied": lambda: _llama(tie_word_embeddings=True),
    "gpt2": _gpt2,
    "mixtral": _mixtral,
}


def build(name: str) -> nn.Module:
    """The model in eval mode."""
    torch.manual_seed(3)
    model = BUILDERS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def write(name: str, folder: Path, shard: str = "20KB") -> nn.Module:
    """Save the model as a sharded directory."""
    model: Any = build(name)
    model.save_pretrained(folder, max_shard_size=shard)
    return model  # type: ignore[no-any-return]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in the safetensors files of a directory."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def tokens() -> torch.Tensor:
    """int64 [2, 12]."""
    return torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
