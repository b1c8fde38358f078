"""TransformerLayer against nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, and Llama, GPT-2 and GPT-NeoX blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from te_convert.reference import NotSupportedError, RotaryPositionEmbedding, TransformerLayer
from tests.reference.twin_samples import assert_same, load, perturb, randn, right_padding

D = torch.float64
NO_DROPOUT: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
tanh_gelu = partial(nn.functional.gelu, approximate="tanh")


def renamed(module: nn.Module, names: dict[str, str]) -> dict[str, Tensor]:
    """Parameters with the first matching prefix replaced; packed projections of nn.MultiheadAttention come apart."""
    weights: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        old = next(prefix for prefix in names if name.startswith(prefix))
        new, kind = names[old], name[len(old) :]
        if "in_proj" not in old:
            weights[new + kind] = parameter
            continue
        query, key, value = parameter.detach().chunk(3)
        cross = new.replace("layernorm_query", "key_value")
        weights |= {f"{new}query_{kind}": query, f"{cross}key_{kind}": key, f"{cross}value_{kind}": value}
    return weights


ENCODER = {
    "self_attn.in_proj_": "self_attention.layernorm_qkv.",
    "self_attn.out_proj.": "self_attention.proj.",
    "linear1.": "layernorm_mlp.fc1_",
    "linear2.": "layernorm_mlp.fc2_",
    "norm1.": "self_attention.layernorm_qkv.layer_norm_",
    "norm2.": "layernorm_mlp.layer_norm_",
}
POST_NORM = {**ENCODER, "self_attn.in_proj_": "self_attention.qkv.", "norm1.": "layernorm_mlp.layer_norm_", "norm2.": "layernorm."}
DECODER = {
    **ENCODER,
    "multihead_attn.in_proj_": "inter_attention.layernorm_query.",
    "multihead_attn.out_proj.": "inter_attention.proj.",
    "norm2.": "inter_attention.layernorm_query.layer_norm_",
    "norm3.": "layernorm_mlp.layer_norm_",
}


@pytest.mark.parametrize("pre", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("padded", [False, True])
def test_encoder_layer_of_torch(pre: bool, padded: bool) -> None:
    oracle = perturb(nn.TransformerEncoderLayer(16, 4, 24, 0.0, tanh_gelu, norm_first=pre, dtype=D))
    post: dict[str, Any] = {} if pre else {"output_layernorm": True, "apply_residual_connection_post_layernorm": True}
    kind = "padding" if padded else "no_mask"
    twin = TransformerLayer(16, 24, 4, self_attn_mask_type=kind, params_dtype=D, **NO_DROPOUT, **post)
    pairs = load(twin, renamed(oracle, ENCODER if pre else POST_NORM))
    mask = right_padding(6, 4, 6) if padded else None
    # Torch attends from padded positions too: only valid rows are the same.
    valid = torch.ones(6, 2, 1, dtype=torch.bool) if mask is None else ~mask.view(2, 6, 1).transpose(0, 1)

    def torch_layer(x: Tensor) -> Tensor:
        return torch.as_tensor(oracle(x, src_key_padding_mask=None if mask is None else mask.view(2, 6))) * valid

    assert_same(lambda x: twin(x, mask) * valid, torch_layer, randn(6, 2, 16), pairs)


def test_decoder_layer_of_torch() -> None:
    oracle = perturb(nn.TransformerDecoderLayer(16, 4, 24, 0.0, tanh_gelu, norm_first=True, dtype=D))
    twin = TransformerLayer(16, 24, 4, layer_type="decoder", params_dtype=D, **NO_DROPOUT)
    pairs, memory = load(twin, renamed(oracle, DECODER)), randn(7, 2, 16, seed=2)
    masked = torch.ones(6, 6, dtype=torch.bool).triu(1)
    assert_same(
        lambda x: twin(x, encoder_output=memory), lambda x: torch.as_tensor(oracle(x, memory, masked)), randn(6, 2, 16), pairs
    )


def test_llama_block() -> None:
    """In float32: Transformers' RMSNorm computes in it whatever the dtype."""
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6)
    config._attn_implementation = "sdpa"
    oracle = perturb(LlamaDecoderLayer(config, 0))
    llama: dict[str, Any] = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "attn_input_format": "bshd"}
    twin = TransformerLayer(32, 48, 4, 2, 1e-6, **NO_DROPOUT, **llama)
    names = {
        "self_attn.q_proj.": "self_attention.layernorm_qkv.query_",
        "self_attn.k_proj.": "self_attention.layernorm_qkv.key_",
        "self_attn.v_proj.": "self_attention.layernorm_qkv.value_",
        "self_attn.o_proj.": "self_attention.proj.",
        "mlp.down_proj.": "layernorm_mlp.fc2_",
        "input_layernorm.": "self_attention.layernorm_qkv.layer_norm_",
        "post_attention_layernorm.": "layernorm_mlp.layer_norm_",
        "mlp.": "",
    }
    weights = renamed(oracle, names)
    gate_up = (weights.pop("gate_proj.weight"), weights.pop("up_proj.weight"))
    pairs = load(twin, {**weights, "layernorm_mlp.fc1_weight": torch.cat(gate_up).detach()})
    angles = RotaryPositionEmbedding(8)(5)
    rotary = (angles[None, :, 0, 0].cos(), angles[None, :, 0, 0].sin())
    x = randn(2, 5, 32, dtype=torch.float32)
    assert_same(lambda x: twin(x, rotary_pos_emb=angles), lambda x: oracle(x, position_embeddings=rotary), x, pairs)


def test_gpt2_block() -> None:
    config = GPT2Config(n_embd=16, n_head=4, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    config._attn_implementation = "sdpa"
    oracle = perturb(GPT2Block(config, 0).to(D))
    fused: dict[str, Any] = {"fuse_qkv_params": True, "qkv_weight_interleaved": False, "attn_input_format": "bshd"}
    twin = TransformerLayer(16, 64, 4, params_dtype=D, **NO_DROPOUT, **fused)
    names = {
        "ln_1.": "self_attention.layernorm_qkv.layer_norm_",
        "attn.c_attn.": "self_attention.layernorm_qkv.",
        "attn.c_proj.": "self_attention.proj.",
        "ln_2.": "layernorm_mlp.layer_norm_",
        "mlp.c_fc.": "layernorm_mlp.fc1_",
        "mlp.c_proj.": "layernorm_mlp.fc2_",
    }
    weights = {name: value.detach().T if value.dim() == 2 else value for name, value in renamed(oracle, names).items()}
    assert_same(twin, lambda x: torch.as_tensor(oracle(x)), randn(2, 5, 16), load(twin, weights))


@pytest.mark.parametrize("parallel", [True, False])
def test_gpt_neox_block(parallel: bool) -> None:
    """Its packed rows go head by head, which is TE's interleaved order; a quarter of each head is rotated."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "hidden_act": "gelu_new"}
    config = GPTNeoXConfig(**sizes, use_parallel_residual=parallel)
    config._attn_implementation = "sdpa"
    oracle = perturb(GPTNeoXLayer(config, 0).to(D))
    layout: dict[str, Any] = {"fuse_qkv_params": True, "parallel_attention_mlp": parallel, "attn_input_format": "bshd"}
    twin = TransformerLayer(32, 48, 2, params_dtype=D, **NO_DROPOUT, **layout)
    names = {
        "input_layernorm.": "self_attention.layernorm_qkv.layer_norm_",
        "attention.query_key_value.": "self_attention.layernorm_qkv.",
        "attention.dense.": "self_attention.proj.",
        "post_attention_layernorm.": "layernorm_mlp.layer_norm_",
        "mlp.dense_h_to_4h.": "layernorm_mlp.fc1_",
        "mlp.dense_4h_to_h.": "layernorm_mlp.fc2_",
    }
    pairs, angles = load(twin, renamed(oracle, names)), RotaryPositionEmbedding(16, rotary_percent=0.25)(5).double()
    rotary = (angles[None, :, 0, 0].cos(), angles[None, :, 0, 0].sin())

    def neox(x: Tensor) -> Tensor:
        return torch.as_tensor(oracle(x, attention_mask=None, position_embeddings=rotary))

    assert_same(lambda x: twin(x, rotary_pos_emb=angles), neox, randn(2, 5, 32), pairs)


def test_post_norm_residual_without_output_norm() -> None:
    """The residual is the norm's output, then the norm's output of the MLP."""
    twin = perturb(TransformerLayer(16, 24, 4, apply_residual_connection_post_layernorm=True, params_dtype=D, **NO_DROPOUT))
    x = randn(5, 2, 16)
    attended, bias, normed = twin.self_attention(x)
    out, mlp_bias, mlp_normed = twin.layernorm_mlp(normed + attended + bias)
    torch.testing.assert_close(twin(x), mlp_normed + out + mlp_bias)


def test_decoder_passes_rotation_and_softcap_to_cross_attention() -> None:
    twin = perturb(TransformerLayer(16, 24, 4, layer_type="decoder", params_dtype=D, **NO_DROPOUT))
    x, memory, angles = randn(5, 2, 16), randn(5, 2, 16, seed=2), RotaryPositionEmbedding(4)(5).double()
    shared: dict[str, Any] = {"rotary_pos_emb": angles, "softcap": 1.5}
    attended, bias = twin.self_attention(x, **shared)
    hidden = x + attended + bias
    crossed, cross_bias = twin.inter_attention(hidden, None, memory, **shared)
    hidden = hidden + crossed + cross_bias
    out, mlp_bias = twin.layernorm_mlp(hidden)
    torch.testing.assert_close(twin(x, encoder_output=memory, **shared), hidden + out + mlp_bias)


def test_dropout_defaults_are_those_of_te() -> None:
    twin = TransformerLayer(16, 24, 4, params_dtype=D)
    assert twin.hidden_dropout == twin.self_attention.core_attention.attention_dropout == 0.1
    x = randn(5, 2, 16)
    torch.manual_seed(0)
    assert not torch.equal(twin(x), twin(x))
    assert torch.equal(twin.eval()(x), twin(x))


def test_autocast_returns_its_dtype() -> None:
    twin = perturb(TransformerLayer(16, 24, 4, **NO_DROPOUT))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert twin(randn(5, 2, 16, dtype=torch.float32)).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer_type": "both"}, "neither 'encoder' nor 'decoder'"),
        ({"drop_path_rate": 0.1}, "drop_path_rate is not supported"),
        ({"parallel_attention_mlp": True, "output_layernorm": True}, "goes only with a plain pre-norm encoder layer"),
        ({"parallel_attention_mlp": True, "layer_type": "decoder"}, "goes only with a plain pre-norm encoder layer"),
        ({"attn_input_format": "thd"}, "qkv_format 'thd'"),
        ({"enc_dec_window_size": (-1, 0)}, r"must be \(-1, -1\) or not negative"),
        ({"activation": "erf_gelu"}, "activation 'erf_gelu'"),
    ],
)
def test_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(NotSupportedError, match=message):
        TransformerLayer(16, 24, 4, **arguments)


def test_refused_calls() -> None:
    x = randn(5, 2, 16)
    with pytest.raises(NotSupportedError, match="not read by an encoder layer"):
        TransformerLayer(16, 24, 4, params_dtype=D)(x, encoder_output=x)
    with pytest.raises(NotSupportedError, match="encoder_output is missing"):
        TransformerLayer(16, 24, 4, params_dtype=D, layer_type="decoder")(x)
    with pytest.raises(NotSupportedError, match="attention_mask is not read"):
        TransformerLayer(16, 24, 4, params_dtype=D)(x, right_padding(5, 5, 5))
