"""Twin of te.TransformerLayer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_convert.reference.layer_norm_mlp import LayerNormMLP
from te_convert.reference.masks import AttentionMask, resolve_masking
from te_convert.reference.multi_head_attention import MultiheadAttention, RotaryAngles
from te_convert.reference.norms import LayerNorm, RMSNorm
from te_convert.reference.precision import autocast_dtype
from te_convert.reference.unsupported import require

_MaskingArguments = tuple[str, tuple[int, int] | None, bool | None]
"""Mask type, window and ``bottom_right_diagonal``."""


class TransformerLayer(nn.Module):
    """Attention and MLP with residuals, by default pre-norm: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    - ``output_layernorm``: no norm before attention, one (``layernorm``) after everything.
    - ``apply_residual_connection_post_layernorm``: residuals are taken after the norms.  Both together make the post-norm layer of
      BERT, whose first norm is ``layernorm_mlp.layer_norm_*`` and whose second is ``layernorm``.
    - ``parallel_attention_mlp``: ``x + attention(norm(x)) + mlp(norm'(x))``.
    - ``layer_type="decoder"``: cross-attention ``inter_attention`` in between, with the same rotary angles, softcap and bias.

    Args:
        hidden_size: size of input and output.
        ffn_hidden_size: see :class:`te_convert.reference.layer_norm_mlp.LayerNormMLP`.
        num_attention_heads: h.
        num_gqa_groups: heads of keys and values; h when None.
        layernorm_epsilon: of all norms.
        hidden_dropout: on each branch before its residual, in training; 0.1 as in TE.
        attention_dropout: on the probabilities, in training; 0.1 as in TE.
        kv_channels: size of a head; ``hidden_size // h`` when None.
        self_attn_mask_type: "causal" as in TE.
        window_size: of self-attention.
        bottom_right_diagonal: of self-attention.
        softcap: of all attention.
        enc_dec_attn_mask_type: of cross-attention; "no_mask".
        enc_dec_bottom_right_diagonal: of cross-attention.
        enc_dec_window_size: of cross-attention.
        drop_path_rate: only 0.0 is supported.
        bias: one flag for all Linears.
        attn_input_format: "sbhd" or "bshd".

    The other arguments are those of :class:`te_convert.reference.multi_head_attention.MultiheadAttention` and LayerNormMLP.

    Source: ``transformer.py``.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        *,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        params_dtype: torch.dtype | None = None,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        require(layer_type in ("encoder", "decoder"), f"layer_type {layer_type!r} is neither 'encoder' nor 'decoder'")
        require(drop_path_rate == 0.0, "drop_path_rate is not supported")
        post = apply_residual_connection_post_layernorm
        alone = not (post or output_layernorm or layer_type == "decoder")
        require(alone or not parallel_attention_mlp, "parallel_attention_mlp goes only with a plain pre-norm encoder layer")
        self.layer_type, self.parallel_attention_mlp, self.hidden_dropout = layer_type, parallel_attention_mlp, hidden_dropout
        self.output_layernorm, self.apply_residual_connection_post_layernorm = output_layernorm, post
        common: dict[str, Any] = {
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "bias": bias,
            "params_dtype": params_dtype,
            "device": device,
        }
        attention = {
            **common,
            "num_attention_heads": num_attention_heads,
            "kv_channels": kv_channels,
            "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon,
            "num_gqa_groups": num_gqa_groups,
            "softcap": softcap,
            "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved,
            "rotary_pos_interleaved": rotary_pos_interleaved,
            "qkv_format": attn_input_format,
            "qk_norm_type": qk_norm_type,
            "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope,
            "softmax_type": softmax_type,
        }
        self_masking = (self_attn_mask_type, window_size, bottom_right_diagonal)
        self._add_self_attention(hidden_size, self_masking, attention)
        cross_masking = (enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal)
        resolve_masking(*cross_masking)
        if layer_type == "decoder":
            self._add_inter_attention(hidden_size, cross_masking, attention)
        mlp = {"activation": activation, "activation_params": activation_params, **common}
        self._add_mlp_and_norm(hidden_size, ffn_hidden_size, layernorm_epsilon, mlp)

    def _add_self_attention(self, hidden_size: int, masking: _MaskingArguments, arguments: dict[str, Any]) -> None:
        mask_type, window, bottom_right = masking
        self.self_attention = MultiheadAttention(
            hidden_size,
            attn_mask_type=mask_type,
            window_size=window,
            bottom_right_diagonal=bottom_right,
            input_layernorm=not self.output_layernorm,
            return_layernorm_output=self.apply_residual_connection_post_layernorm and not self.output_layernorm,
            return_bias=not self.parallel_attention_mlp,
            **arguments,
        )

    def _add_inter_attention(self, hidden_size: int, masking: _MaskingArguments, arguments: dict[str, Any]) -> None:
        mask_type, window, bottom_right = masking
        self.inter_attention = MultiheadAttention(
            hidden_size,
            attn_mask_type=mask_type,
            window_size=window,
            bottom_right_diagonal=bottom_right,
            attention_type="cross",
            input_layernorm=True,
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            return_bias=True,
            **arguments,
        )

    def _add_mlp_and_norm(self, hidden_size: int, ffn_hidden_size: int, eps: float, arguments: dict[str, Any]) -> None:
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            eps,
            return_bias=not self.parallel_attention_mlp,
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            **arguments,
        )
        if self.output_layernorm:
            kind = RMSNorm if arguments["normalization"] == "RMSNorm" else LayerNorm
            self.layernorm = kind(
                hidden_size,
                eps,
                zero_centered_gamma=arguments["zero_centered_gamma"],
                dtype=arguments["params_dtype"],
                device=arguments["device"],
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: AttentionMask | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: AttentionMask | None = None,
        enc_dec_attn_mask_type: str | None = None,
        *,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        rotary_pos_emb: RotaryAngles | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Input [s, b, hidden_size] ("bshd": [b, s, hidden_size]) → output of the same shape.

        Raises:
            NotSupportedError: an argument that would not be read.
        """
        decoder = self.layer_type == "decoder"
        given = (encoder_output, enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal)
        require(decoder or all(value is None for value in given), "arguments of cross-attention are not read by an encoder layer")
        hidden = hidden_states.to(autocast_dtype(hidden_states) or hidden_states.dtype)
        shared: dict[str, Any] = {
            "rotary_pos_emb": rotary_pos_emb,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "softcap": softcap,
        }
        attended = self.self_attention(
            hidden,
            attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            **shared,
        )
        if self.parallel_attention_mlp:
            return hidden + self._dropped(attended + self.layernorm_mlp(hidden))
        hidden = self._added(attended, hidden)
        if decoder:
            crossed = self.inter_attention(
                hidden,
                enc_dec_attn_mask,
                encoder_output,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                **shared,
            )
            hidden = self._added(crossed, hidden)
        hidden = self._added(self.layernorm_mlp(hidden), hidden)
        return self.layernorm(hidden) if self.output_layernorm else hidden

    def _added(self, branch: tuple[Tensor | None, ...], hidden: Tensor) -> Tensor:
        """``residual + dropout(output + bias)``; the residual is the branch's norm output where the branch returns it."""
        out, bias, *normed = branch
        assert out is not None
        residual = normed[0] if normed else hidden
        assert residual is not None
        return residual + self._dropped(out if bias is None else out + bias)

    def _dropped(self, out: Tensor) -> Tensor:
        return F.dropout(out, self.hidden_dropout, self.training)
