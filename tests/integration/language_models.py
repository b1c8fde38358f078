"""Tiny language models of several families, and converted copies with norms and biases moved from their defaults."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import te_convert

SMALL: dict[str, Any] = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
DECODERS = ("llama", "mistral", "gpt2", "qwen3", "gemma2", "gpt_neox", "mixtral")


def build(name: str, **changes: Any) -> Any:
    """A causal language model, seeded, in eval mode."""
    torch.manual_seed(0)
    if name == "gpt2":
        sizes: dict[str, Any] = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}
    else:
        sizes = dict(LLAMA)
    if name == "mistral":
        sizes["sliding_window"] = 5
    if name in ("qwen3", "gemma2", "mixtral"):
        sizes["head_dim"] = 16
    if name == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if name == "gpt_neox":
        sizes.pop("num_key_value_heads")
    config = transformers.AutoConfig.for_model(name, **{**SMALL, **sizes, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
            elif parameter.dim() > 1:
                parameter.mul_(3)  # so that greedy decoding does not sit on ties
    return model


def ids(batch: int = 2, length: int = 9) -> torch.Tensor:
    """Token ids that avoid the special ones."""
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(batch * 100 + length))


def converted(model: Any, **options: Any) -> Any:
    """The converted copy; everything has to be converted and verified."""
    result = te_convert.convert(model, {"input_ids": ids()}, strict=True, **options)
    return result.model


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients by original parameter name; a converted model is put back (in place) for it."""
    original = te_convert.revert(model)
    return {name: parameter.grad for name, parameter in original.named_parameters() if parameter.grad is not None}


def assert_same_gradients(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Within 1e-4 of the largest value of each, with a floor for those that are zero in theory (key biases)."""
    assert one.keys() == other.keys()
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in one.values())
    for name, gradient in one.items():
        scale = max(float(gradient.abs().max()), floor)
        assert float((gradient - other[name]).abs().max()) <= 1e-4 * scale, name
