"""nn.TransformerEncoderLayer and nn.TransformerDecoderLayer  ->  te.TransformerLayer, in their place.

    pre-norm (norm_first):  x + attention(norm1(x)), then x + mlp(norm2(x))
    post-norm:              norm1(x + attention(x)), then norm2(x + mlp(x))

Only without dropout: TE has none between the MLP's Linears, so a layer with dropout would not train as before; its parts are
converted instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from te_convert.match.blocks import Block
from te_convert.match.fusion import Fusion
from te_convert.match.groups import Found
from te_convert.match.torch_layers import (
    LAYER_CHILDREN,
    TE_ACTIVATIONS,
    activation_name,
    approximated,
    attention_obstacles,
    attention_ops,
    block_members,
    layer_norm_ops,
    linear_ops,
    part_obstacles,
    site_obstacles,
    sizes_of,
    weight_obstacles,
)
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.replacements.specs import TransformerLayerSpec, dtype_name
from te_convert.rules.base import BlockRule
from te_convert.weights.ops import WeightMap, WeightOp

_APPROXIMATION = "gelu-tanh"


class TorchEncoderLayerRule(BlockRule):
    """torch's encoder layer."""

    id = "torch-encoder-layer"
    layer_type = "encoder"
    cls: type[nn.Module] = nn.TransformerEncoderLayer

    def looks_like(self, block: Block) -> bool:
        """torch's own forward, and its own methods behind it."""
        module = block.site.module
        names = ("forward", *(name for name in vars(self.cls) if name.endswith("_block")))
        return isinstance(module, self.cls) and all(getattr(type(module), n) is getattr(self.cls, n) for n in names)

    def propose(self, block: Block) -> Found:
        """A fusion, or every reason why the layer stays in parts."""
        layer: Any = block.site.module
        obstacles = [*site_obstacles(block), *part_obstacles(layer, LAYER_CHILDREN), *_obstacles(layer, self.layer_type)]
        activation, approximation = _activation(layer, block.allow)
        if isinstance(activation, Reason):
            obstacles.append(activation)
        if obstacles or isinstance(activation, Reason):
            return Found(advices={block.site.fqn: tuple(obstacles)})
        weights = WeightMap(_ops(layer, self.layer_type == "decoder"))
        obstacles = list(weight_obstacles(block, weights))
        if obstacles:
            return Found(advices={block.site.fqn: tuple(obstacles)})
        spec = TransformerLayerSpec(
            hidden_size=layer.self_attn.embed_dim,
            ffn_hidden_size=layer.linear1.out_features,
            num_attention_heads=layer.self_attn.num_heads,
            eps=layer.norm1.eps,
            bias=layer.linear1.bias is not None,
            activation=activation,
            normalization="LayerNorm",
            zero_centered_gamma=False,
            post_layernorm=not layer.norm_first,
            parallel_attention_mlp=False,
            layer_type=self.layer_type,
            attn_input_format="bshd" if layer.self_attn.batch_first else "sbhd",
            self_attn_mask_type="no_mask",
            dtype=dtype_name(layer.linear1.weight.dtype),
        )
        fqn = block.site.fqn
        precision = block.precision(*sizes_of(layer.self_attn, layer.linear1))
        fusion = Fusion(fqn, fqn, self.id, block_members(block), spec, weights, precision, approximation=approximation)
        return Found((fusion,), approximated(fqn, approximation))


class TorchDecoderLayerRule(TorchEncoderLayerRule):
    """torch's decoder layer, with cross-attention."""

    id = "torch-decoder-layer"
    layer_type = "decoder"
    cls = nn.TransformerDecoderLayer


def _obstacles(layer: Any, layer_type: str) -> Iterator[Reason]:
    decoder = layer_type == "decoder"
    attentions = [layer.self_attn, *((layer.multihead_attn,) if decoder else ())]
    norms = [layer.norm1, layer.norm2, *((layer.norm3,) if decoder else ())]
    for attention in attentions:
        yield from attention_obstacles(attention)
    if any(type(attention).forward is not nn.MultiheadAttention.forward for attention in attentions):
        return  # it may have nothing of what is looked at below
    if len({(a.embed_dim, a.num_heads, a.batch_first) for a in attentions}) > 1:
        yield reason(ReasonCode.BLOCK_FORM, "its attentions differ in width, heads or layout")
    dropouts = [layer.dropout, layer.dropout1, layer.dropout2, *((layer.dropout3,) if decoder else ())]
    if any(type(dropout) not in (nn.Dropout, nn.Identity) for dropout in dropouts):
        yield reason(ReasonCode.BLOCK_FORM, "something stands where its dropouts were")
    active = [name for name, child in layer.named_modules() if isinstance(child, nn.Dropout) and child.p > 0]
    if active or any(attention.dropout > 0 for attention in attentions):
        yield reason(ReasonCode.BLOCK_DROPOUT, f"p > 0 in {', '.join(active) or 'the attention'}")
    plain = all(type(norm) is nn.LayerNorm and norm.elementwise_affine and len(norm.normalized_shape) == 1 for norm in norms)
    if not plain or len({norm.eps for norm in norms}) > 1:
        yield reason(ReasonCode.BLOCK_FORM, "its norms are not LayerNorms of one eps with a weight")
    linears = [layer.linear1, layer.linear2]
    if any(type(linear) is not nn.Linear for linear in linears):
        yield reason(ReasonCode.BLOCK_FORM, "its Linears are not nn.Linear")
    biases = {linear.bias is not None for linear in linears} | {a.in_proj_bias is not None for a in attentions}
    if len(biases) > 1:
        yield reason(ReasonCode.BLOCK_FORM, "only some of its projections have a bias")


def _activation(layer: Any, allow: tuple[str, ...]) -> tuple[str | Reason, str]:
    """TE's name (or why there is none), and the approximation in use."""
    name = activation_name(layer.activation)
    if name == "gelu":
        if _APPROXIMATION in allow:
            return "gelu", _APPROXIMATION
        return reason(ReasonCode.ACTIVATION_GELU_ERF, "the activation is GELU by erf; TE's gelu is tanh GELU"), ""
    if name not in TE_ACTIVATIONS:
        return reason(ReasonCode.BLOCK_FORM, f"its activation ({name or 'unknown'}) is none of TE's"), ""
    return TE_ACTIVATIONS[name], ""


def _ops(layer: Any, decoder: bool) -> tuple[WeightOp, ...]:
    """Each norm goes to the Linear that follows it: the next one in a pre-norm layer, the one after in a post-norm layer."""
    pre = bool(layer.norm_first)
    places = ["self_attention.layernorm_qkv.layer_norm_"] if pre else []
    places += ["inter_attention.layernorm_query.layer_norm_"] if decoder else []
    places += ["layernorm_mlp.layer_norm_"] if pre else ["layernorm_mlp.layer_norm_", "layernorm."]
    norms = ["norm1", "norm2", "norm3"] if decoder else ["norm1", "norm2"]
    projection = "layernorm_qkv" if pre else "qkv"
    ops = [op for name, dest in zip(norms, places, strict=True) for op in layer_norm_ops(getattr(layer, name), name, dest)]
    ops += attention_ops(layer.self_attn, "self_attn.", "self_attention.", projection)
    if decoder:
        cross = ("layernorm_query", "key_value")
        ops += attention_ops(layer.multihead_attn, "multihead_attn.", "inter_attention.", cross)
    ops += linear_ops(layer.linear1, "linear1", "layernorm_mlp.fc1")
    ops += linear_ops(layer.linear2, "linear2", "layernorm_mlp.fc2")
    return tuple(ops)
