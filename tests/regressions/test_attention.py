"""Masks, rotary embeddings and blocks that peers got wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_convert
from tests.integration.language_models import build, ids
from tests.rewrite.rewrite_samples import perturb


def assert_near(a: Tensor, b: Tensor, relative: float = 2e-5) -> None:
    assert (a - b).abs().max() <= relative * b.abs().max()


@pytest.mark.report(
    "deepspeedai/DeepSpeed#1466", "deepspeedai/DeepSpeed#2229", "deepspeedai/DeepSpeed#2506", "peer:rope-of-the-config"
)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_deepspeed_1466_a_padded_batch_gives_what_each_row_gives_alone(name: str, side: str) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/1466: kernels took Transformers' mask for something else."""
    model = build(name)
    twin = te_convert.convert(model, {"input_ids": ids()}, strict=True).model
    row = ids(1, 6)
    pad, ones = torch.zeros(1, 3, dtype=torch.long), torch.ones_like(row)
    if side == "left":
        padded, mask, valid = torch.cat([pad, row], 1), torch.cat([pad, ones], 1), slice(3, None)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
    else:
        padded, mask, valid = torch.cat([row, pad], 1), torch.cat([ones, pad], 1), slice(0, 6)
        positions = torch.arange(9)[None]
    other = ids(1, 9)
    with torch.no_grad():
        alone = model(row).logits
        batch = torch.cat([padded, other])
        found = twin(
            input_ids=batch,
            attention_mask=torch.cat([mask, torch.ones_like(other)]),
            position_ids=torch.cat([positions, torch.arange(9)[None]]),
        ).logits
        assert_near(found[:1, valid], alone)
        assert_near(found[1:], model(other).logits)


class Polarities(nn.Module):
    """torch's MultiheadAttention leaves out what is True, its function keeps what is True."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, ignored: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, key_padding_mask=ignored, need_weights=False)[0]
        q, k, v = (proj(x).unflatten(-1, (2, 8)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        out: Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=~ignored[:, None, None, :]).transpose(1, 2).flatten(-2)
        return out


@pytest.mark.report("huggingface/transformers#38094", "pytorch/pytorch#170400", "NVIDIA/TransformerEngine#614")
def test_transformers_38094_the_polarity_of_boolean_masks() -> None:
    """https://github.com/huggingface/transformers/pull/38094: True means keep in one function and ignore in the other."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = perturb(Polarities()).eval()
    x = torch.randn(3, 7, 16, generator=generator)
    ignored = torch.zeros(3, 7, dtype=torch.bool)
    ignored[0, 5:] = True
    result = te_convert.convert(model, (x, ignored))
    assert result.report.parity.passed
    assert {site.kind for site in result.report.sites if site.replacement} >= {"MultiheadAttention"}
    for _ in range(10):
        ignored = torch.rand(3, 7, generator=generator) < 0.5
        ignored[:, 0] = False  # a row without keys is not a number in either model
        with torch.no_grad():
            assert_near(result.model(x, ignored), model(x, ignored))


@pytest.mark.report("NVIDIA/TransformerEngine#413", "huggingface/transformers#311")
@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_te_413_a_block_of_gpt_2(activation: str) -> None:
    """https://github.com/NVIDIA/TransformerEngine/issues/413: transposed weights, their order, and which GELU it is."""
    model = build("gpt2", activation_function=activation)
    result = te_convert.convert(model, {"input_ids": ids()}, strict=True)
    assert result.report.parity.passed
    site = result.report.site("transformer.h.0.mlp.c_fc")
    if activation == "gelu_new":
        assert site.replacement == "te.LayerNormMLP"
    else:
        assert "activation.gelu-erf" in {reason.code for reason in site.reasons}
        assert site.replacement == "te.LayerNormLinear"
    with torch.no_grad():
        assert_near(result.model(ids(3, 12)).logits, model(ids(3, 12)).logits)


@pytest.mark.report("NVIDIA/TransformerEngine#432")
def test_te_432_the_norm_stands_before_queries_keys_and_values() -> None:
    """https://github.com/NVIDIA/TransformerEngine/issues/432: with fewer key heads, keys and values saw the input itself."""
    model = build("llama", num_attention_heads=8, num_key_value_heads=2, head_dim=8)
    result = te_convert.convert(model, {"input_ids": ids()}, strict=True)
    for name in ("q_proj", "k_proj", "v_proj"):
        site = result.report.site(f"model.layers.0.self_attn.{name}")
        assert (site.replacement, site.fused_into) == ("te.LayerNormLinear", "model.layers.0.self_attn.layernorm_qkv")
    with torch.no_grad():
        assert_near(result.model(ids(3, 12)).logits, model(ids(3, 12)).logits)


ROTARY: dict[str, tuple[str, dict[str, Any]]] = {
    "interleaved and partial": ("gptj", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4}),
    "halves and partial": (
        "gpt_neox",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    ),
    "another base": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "scaled": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
}


@pytest.mark.report("huggingface/transformers#25199", "onnxruntime/mobius#522", "peer:rope-of-the-config")
@pytest.mark.parametrize("name", ROTARY)
def test_transformers_25199_rotary_embeddings(name: str) -> None:
    """https://github.com/huggingface/transformers/issues/25199: one layout read as the other gives garbage without an error."""
    family, options = ROTARY[name]
    if family == "gptj":
        import transformers

        torch.manual_seed(0)
        sizes: dict[str, Any] = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2}
        model: Any = perturb(transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes, **options))).eval()
    else:
        model = build(family, **options)
    result = te_convert.convert(model, {"input_ids": ids()}, strict=True)
    with torch.no_grad():
        for batch, length in ((1, 1), (2, 40)):
            assert_near(result.model(ids(batch, length)).logits, model(ids(batch, length)).logits)


@pytest.mark.report("NVIDIA-NeMo/Automodel#3027", "NVIDIA/TransformerEngine#1245")
def test_automodel_3027_the_models_own_rotary_function_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/issues/3027: a fused one rounds elsewhere and moves log-probabilities."""
    from transformers.models.llama import modeling_llama

    model = build("llama")
    twin: Any = te_convert.convert(model, {"input_ids": ids()}, strict=True).model
    calls: list[int] = []
    own = modeling_llama.apply_rotary_pos_emb

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", counted)
    with torch.no_grad():
        twin(ids())
    assert len(calls) == model.config.num_hidden_layers
