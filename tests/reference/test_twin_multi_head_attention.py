"""MultiheadAttention against nn.MultiheadAttention and Transformers' Llama attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from te_convert.reference import L2Normalization, MultiheadAttention, NotSupportedError, RMSNorm, RotaryPositionEmbedding
from te_convert.reference import apply_rotary_pos_emb as rotate
from tests.reference.twin_samples import assert_same, load, perturb, randn, right_padding

D = torch.float64


def as_weights(attention: nn.MultiheadAttention, prefix: str) -> dict[str, Tensor]:
    """Parameters of nn.MultiheadAttention under the names of a twin with separate weights."""
    weights: dict[str, Tensor] = {"proj.weight": attention.out_proj.weight, "proj.bias": attention.out_proj.bias}
    for kind in ("weight", "bias"):
        blocks = attention.get_parameter(f"in_proj_{kind}").detach().chunk(3)
        weights |= {f"{prefix}.{name}_{kind}": block for name, block in zip(("query", "key", "value"), blocks, strict=True)}
    return weights


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_of_torch(causal: bool) -> None:
    oracle = perturb(nn.MultiheadAttention(16, 4, dtype=D))
    twin = MultiheadAttention(16, 4, attention_dropout=0.0, attn_mask_type="causal" if causal else "no_mask", params_dtype=D)
    pairs = load(twin, as_weights(oracle, "qkv"))
    masked = torch.ones(6, 6, dtype=torch.bool).triu(1) if causal else None
    assert_same(twin, lambda x: oracle(x, x, x, attn_mask=masked, need_weights=False)[0], randn(6, 2, 16), pairs)


def test_cross_attention_of_torch_with_padding() -> None:
    oracle, memory = perturb(nn.MultiheadAttention(16, 4, dtype=D)), randn(7, 2, 16, seed=2)
    twin = MultiheadAttention(16, 4, attention_dropout=0.0, attention_type="cross", attn_mask_type="padding", params_dtype=D)
    weights = {name.replace("key_value.query_", "query_layer."): value for name, value in as_weights(oracle, "key_value").items()}
    pairs = load(twin, weights)
    masks = (right_padding(6, 6, 6), right_padding(7, 5, 7))

    def torch_attention(x: Tensor) -> Tensor:
        return torch.as_tensor(oracle(x, memory, memory, key_padding_mask=masks[1].view(2, 7), need_weights=False)[0])

    assert_same(lambda x: twin(x, masks, memory), torch_attention, randn(6, 2, 16), pairs)


@pytest.mark.parametrize("bias", [False, True])
def test_llama_attention(bias: bool) -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=6, attention_bias=bias)
    config._attn_implementation = "sdpa"
    oracle = perturb(LlamaAttention(config, 0).to(D))
    twin = MultiheadAttention(32, 4, 6, 0.0, num_gqa_groups=2, bias=bias, qkv_format="bshd", params_dtype=D)
    names = {"q_proj.": "qkv.query_", "k_proj.": "qkv.key_", "v_proj.": "qkv.value_", "o_proj.": "proj."}
    weights = {names[name[:7]] + name[7:]: parameter for name, parameter in oracle.named_parameters()}
    pairs, angles = load(twin, weights), RotaryPositionEmbedding(6)(5).double()
    rotary = (angles[None, :, 0, 0].cos(), angles[None, :, 0, 0].sin())

    def llama(x: Tensor) -> Tensor:
        return torch.as_tensor(oracle(x, position_embeddings=rotary, attention_mask=None)[0])

    assert_same(lambda x: twin(x, rotary_pos_emb=angles), llama, randn(2, 5, 32), pairs)


def grouped_rows(blocks: tuple[Tensor, ...], groups: int) -> Tensor:
    """[q; k; v] rows rearranged group by group, written out head by head."""
    heads = [list(block.split(4)) for block in blocks]
    rows: list[Tensor] = []
    for group in range(groups):
        for block in heads:
            share = len(block) // groups
            rows += block[group * share : (group + 1) * share]
    return torch.cat(rows)


@pytest.mark.parametrize("attention", ["self", "cross"])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_fused_weights_hold_the_same_rows(attention: str, groups: int, interleaved: bool, norm: bool) -> None:
    common: dict[str, Any] = {"num_gqa_groups": groups, "attention_type": attention, "input_layernorm": norm, "params_dtype": D}
    split = perturb(MultiheadAttention(16, 4, attention_dropout=0.0, **common))
    fused = MultiheadAttention(16, 4, attention_dropout=0.0, fuse_qkv_params=True, qkv_weight_interleaved=interleaved, **common)
    weights = dict(split.state_dict())
    target = "key_value" if attention == "cross" else "layernorm_qkv" if norm else "qkv"
    names = ("key", "value") if attention == "cross" else ("query", "key", "value")
    for kind in ("weight", "bias"):
        blocks = tuple(weights.pop(f"{target}.{name}_{kind}") for name in names)
        weights[f"{target}.{kind}"] = grouped_rows(blocks, groups) if interleaved else torch.cat(blocks)
        if attention == "cross" and norm:
            weights[f"layernorm_query.{kind}"] = weights.pop(f"layernorm_query.query_{kind}")
    fused.load_state_dict(weights)
    x, memory = randn(5, 2, 16), randn(5, 2, 16, seed=2) if attention == "cross" else None
    torch.testing.assert_close(fused(x, None, memory), split(x, None, memory))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "L2Normalization", "LayerNorm"])
def test_norms_of_queries_and_keys(kind: str, before: bool) -> None:
    twin = perturb(MultiheadAttention(16, 4, attention_dropout=0.0, qk_norm_type=kind, qk_norm_before_rope=before, params_dtype=D))
    x, angles = randn(5, 2, 16), RotaryPositionEmbedding(4)(5).double()
    query, key, value = (
        (x @ twin.get_parameter(f"qkv.{name}_weight").T + twin.get_parameter(f"qkv.{name}_bias")).unflatten(-1, (4, 4))
        for name in ("query", "key", "value")
    )
    normed = [
        norm(rotate(t, angles)) if not before else rotate(norm(t), angles)
        for norm, t in ((twin.get_submodule("q_norm"), query), (twin.get_submodule("k_norm"), key))
    ]
    expected = twin.proj(twin.core_attention(*normed, value))
    torch.testing.assert_close(twin(x, rotary_pos_emb=angles), expected)
    assert (twin.q_norm is twin.k_norm) == (kind == "L2Normalization")


def test_l2_norm() -> None:
    x = randn(3, 4)
    torch.testing.assert_close(L2Normalization(eps=0.0)(x), nn.functional.normalize(x, dim=-1))
    root = RMSNorm(4, 0.25, dtype=D)(x)
    torch.testing.assert_close(L2Normalization(eps=1.0)(x), root / 2)


def test_outputs_come_in_the_order_of_te() -> None:
    kwargs: dict[str, Any] = {"attention_dropout": 0.0, "input_layernorm": True, "params_dtype": D}
    plain = perturb(MultiheadAttention(16, 4, **kwargs))
    twin = MultiheadAttention(16, 4, return_bias=True, return_layernorm_output=True, **kwargs)
    twin.load_state_dict(plain.state_dict())
    x = randn(5, 2, 16)
    out, bias, normed = twin(x)
    torch.testing.assert_close(out + bias, plain(x))
    norm = plain.layernorm_qkv
    torch.testing.assert_close(normed, nn.functional.layer_norm(x, (16,), norm.layer_norm_weight, norm.layer_norm_bias))


def test_dropout_is_that_of_te() -> None:
    assert MultiheadAttention(16, 4).core_attention.attention_dropout == 0.1


def test_refusals() -> None:
    x = randn(5, 2, 16)
    with pytest.raises(NotSupportedError, match="encoder_output is not read in self-attention"):
        MultiheadAttention(16, 4, params_dtype=D)(x, encoder_output=x)
    with pytest.raises(NotSupportedError, match="encoder_output is missing in cross-attention"):
        MultiheadAttention(16, 4, params_dtype=D, attention_type="cross")(x)
    with pytest.raises(NotSupportedError, match="return_layernorm_output needs input_layernorm"):
        MultiheadAttention(16, 4, return_layernorm_output=True)
    with pytest.raises(NotSupportedError, match="qk_norm_type 'BatchNorm'"):
        MultiheadAttention(16, 4, qk_norm_type="BatchNorm")
    with pytest.raises(NotSupportedError, match="qkv_format 'thd'"):
        MultiheadAttention(16, 4, qkv_format="thd")
    with pytest.raises(NotSupportedError, match="contradicts 'causal'"):
        MultiheadAttention(16, 4, window_size=(2, 2))
    with pytest.raises(NotSupportedError, match="attention_mask is not read with 'causal'"):
        MultiheadAttention(16, 4, params_dtype=D)(x, right_padding(5, 5, 5))
