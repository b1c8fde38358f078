"""Pure-PyTorch twins of Transformer Engine modules: same names, state-dict keys, shapes and mathematics."""

from te_convert.reference.activations import ACTIVATION_NAMES, activate, is_gated
from te_convert.reference.attention import DotProductAttention
from te_convert.reference.grouped_linear import GroupedLinear
from te_convert.reference.layer_norm_linear import LayerNormLinear
from te_convert.reference.layer_norm_mlp import LayerNormMLP
from te_convert.reference.linear import Linear
from te_convert.reference.multi_head_attention import MultiheadAttention
from te_convert.reference.norms import LayerNorm, RMSNorm
from te_convert.reference.qk_norm import L2Normalization
from te_convert.reference.rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from te_convert.reference.transformer_layer import TransformerLayer
from te_convert.reference.unsupported import NotSupportedError

__all__ = [
    "ACTIVATION_NAMES",
    "DotProductAttention",
    "GroupedLinear",
    "L2Normalization",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "NotSupportedError",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "activate",
    "apply_rotary_pos_emb",
    "is_gated",
]
