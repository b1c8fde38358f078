"""Twin of te.MultiheadAttention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from te_convert.reference.attention import DotProductAttention, check_format
from te_convert.reference.layer_norm_linear import LayerNormLinear
from te_convert.reference.masks import AttentionMask, resolve_masking
from te_convert.reference.projection import Projection
from te_convert.reference.qk_norm import build_qk_norms
from te_convert.reference.rope import apply_rotary_pos_emb
from te_convert.reference.unsupported import require

RotaryAngles = Tensor | tuple[Tensor, Tensor]


class MultiheadAttention(nn.Module):
    """Projections of queries, keys and values, attention, output projection; an optional norm before the first.

    Child modules and their parameters, with d the size of a head:

    - self-attention: ``layernorm_qkv`` (``input_layernorm``) or ``qkv``, weight rows [q; k; v] of h · d, groups · d, groups · d;
    - cross-attention: ``layernorm_query`` or ``query_layer``, and ``key_value``, rows [k; v];
    - ``q_norm``, ``k_norm`` (``qk_norm_type``), ``core_attention``, ``proj``.

    Rows are separate parameters ``query_weight``, ``key_weight``, ``value_weight`` (and ``_bias``), or with ``fuse_qkv_params`` one
    ``weight``, whose rows go group by group, (its query heads, its key head, its value head), if ``qkv_weight_interleaved``.
    ``query_layer.weight`` is never split.

    Args:
        hidden_size: size of input and output.
        num_attention_heads: h.
        kv_channels: d; ``hidden_size // h`` when None.
        attention_dropout: on the probabilities, in training; 0.1 as in TE.
        layernorm_epsilon: of the input norm.
        attn_mask_type: "causal" as in TE; see :mod:`te_convert.reference.masks`.
        window_size: (left, right), inclusive.
        bottom_right_diagonal: corner of window and ALiBi.
        softcap: of the scores.
        num_gqa_groups: heads of keys and values; h when None.
        params_dtype: dtype of the parameters; torch's default dtype when None.
        return_bias: leave the bias of ``proj`` out and return it.
        return_layernorm_output: return the output of the input norm as well.
        input_layernorm: whether there is an input norm.
        attention_type: "self" or "cross".
        fuse_qkv_params: one weight for queries, keys and values.
        zero_centered_gamma: keep the input norm's weight minus one.
        qkv_weight_interleaved: row order of a fused weight; ignored, as in TE, for separate ones.
        rotary_pos_interleaved: rotate pairs instead of halves.
        bias: one flag for all projections.
        normalization: of the input.
        device: device of the parameters; "meta" allocates nothing.
        qkv_format: "sbhd" or "bshd".
        qk_norm_type: None, "L2Normalization", "RMSNorm" or "LayerNorm".
        qk_norm_eps: of those.
        qk_norm_before_rope: apply them before the rotary embedding instead of after it.
        softmax_type: see :class:`te_convert.reference.attention.DotProductAttention`.

    Source: ``attention/multi_head_attention.py``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        *,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        num_gqa_groups: int | None = None,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        require(input_layernorm or not return_layernorm_output, "return_layernorm_output needs input_layernorm=True")
        resolve_masking(attn_mask_type, window_size, bottom_right_diagonal)
        self.attn_mask_type, self.window_size, self.bottom_right_diagonal = attn_mask_type, window_size, bottom_right_diagonal
        self.softcap, self.attention_type, self.qkv_format = softcap, attention_type, check_format(qkv_format)
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.input_layernorm, self.fuse_qkv_params = input_layernorm, fuse_qkv_params
        self.qkv_weight_interleaved = fuse_qkv_params and qkv_weight_interleaved
        self.rotary_pos_interleaved, self.qk_norm_before_rope = rotary_pos_interleaved, qk_norm_before_rope
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.head_dim = kv_channels or hidden_size // num_attention_heads
        linear: dict[str, Any] = {"bias": bias, "params_dtype": params_dtype, "device": device}
        norm = {"eps": layernorm_epsilon, "normalization": normalization, "zero_centered_gamma": zero_centered_gamma}
        self.q_norm, self.k_norm = build_qk_norms(qk_norm_type, qk_norm_eps, self.head_dim, params_dtype, device)
        self._add_input_projections(hidden_size, linear, norm)
        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.head_dim,
            num_gqa_groups,
            attention_dropout,
            qkv_format,
            softcap=softcap,
            attention_type=attention_type,
            softmax_type=softmax_type,
        ).to(device)
        self.proj = Projection(num_attention_heads * self.head_dim, hidden_size, return_bias=return_bias, **linear)

    def _add_input_projections(self, hidden_size: int, linear: dict[str, Any], norm: dict[str, Any]) -> None:
        """Register what makes queries, keys and values, under TE's names."""
        query_rows, kv_rows = self.num_attention_heads * self.head_dim, self.num_gqa_groups * self.head_dim
        norm = {**norm, "return_layernorm_output": self.return_layernorm_output}
        if self.attention_type == "self":
            rows = {"query": query_rows, "key": kv_rows, "value": kv_rows}
            split = None if self.fuse_qkv_params else rows
            total = sum(rows.values())
            if self.input_layernorm:
                self.layernorm_qkv = LayerNormLinear(hidden_size, total, parameters_split=split, **norm, **linear)
            else:
                self.qkv = Projection(hidden_size, total, parameters_split=split, **linear)
            return
        if self.input_layernorm:
            query_split = None if self.fuse_qkv_params else ("query",)
            self.layernorm_query = LayerNormLinear(hidden_size, query_rows, parameters_split=query_split, **norm, **linear)
        else:
            self.query_layer = Projection(hidden_size, query_rows, **linear)
        kv_split = None if self.fuse_qkv_params else ("key", "value")
        self.key_value = Projection(hidden_size, 2 * kv_rows, parameters_split=kv_split, **linear)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: AttentionMask | None = None,
        encoder_output: Tensor | None = None,
        *,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        rotary_pos_emb: RotaryAngles | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Input [s, b, hidden_size] ("bshd": [b, s, hidden_size]) → output of the same shape.

        ``encoder_output``, of the same layout, makes keys and values in cross-attention; ``rotary_pos_emb`` are angles
        [s, 1, 1, d2], or a pair for queries and keys.  Bias and norm output follow the output in a tuple, as asked for.

        Raises:
            NotSupportedError: an argument that would not be read.
        """
        cross = self.attention_type == "cross"
        stated = "is missing" if cross else "is not read"
        require((encoder_output is not None) == cross, f"encoder_output {stated} in {self.attention_type}-attention")
        query, key, value, normed = self._query_key_value(hidden_states, encoder_output)
        query, key = self._positioned(query, key, rotary_pos_emb)
        context = self.core_attention(
            query,
            key,
            value,
            attention_mask,
            attn_mask_type=self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            window_size=self.window_size if window_size is None else window_size,
            bottom_right_diagonal=self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal,
            softcap=softcap,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
        )
        projected = self.proj(context)
        if not (self.return_bias or self.return_layernorm_output):
            out: Tensor = projected
            return out
        outputs: tuple[Tensor | None, ...] = projected if self.return_bias else (projected,)
        return (*outputs, normed) if self.return_layernorm_output else outputs

    def _query_key_value(self, hidden: Tensor, encoder_output: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries [·, ·, h, d], keys and values [·, ·, groups, d], and the output of the input norm if it is returned."""
        if encoder_output is None:
            mixed, normed = self._maybe_normed(self.layernorm_qkv if self.input_layernorm else self.qkv, hidden)
            ratio = self.num_attention_heads // self.num_gqa_groups
            query, key, value = self._split(mixed, (ratio, 1, 1))
            return query, key, value, normed
        query, normed = self._maybe_normed(self.layernorm_query if self.input_layernorm else self.query_layer, hidden)
        key, value = self._split(self.key_value(encoder_output), (1, 1))
        return query.unflatten(-1, (self.num_attention_heads, self.head_dim)), key, value, normed

    def _maybe_normed(self, module: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        out = module(hidden)
        return out if self.return_layernorm_output else (out, None)

    def _split(self, mixed: Tensor, parts: tuple[int, ...]) -> tuple[Tensor, ...]:
        """[..., rows] → one [..., heads, d] for each part, which is so many heads for each group."""
        groups, total = self.num_gqa_groups, sum(parts)
        if self.qkv_weight_interleaved:
            blocks = mixed.unflatten(-1, (groups, total, self.head_dim)).split(parts, dim=-2)
        else:
            blocks = mixed.unflatten(-1, (total, groups, self.head_dim)).split(parts, dim=-3)
        return tuple(block.flatten(-3, -2) for block in blocks)

    def _positioned(self, query: Tensor, key: Tensor, angles: RotaryAngles | None) -> tuple[Tensor, Tensor]:
        """Queries and keys after their norms and the rotary embedding, in the configured order."""
        if self.qk_norm_before_rope:
            query, key = self._qk_normed(query, key)
        if angles is not None:
            query_angles, key_angles = angles if isinstance(angles, tuple) else (angles, angles)
            interleaved = self.rotary_pos_interleaved
            query = apply_rotary_pos_emb(query, query_angles, self.qkv_format, interleaved=interleaved)
            key = apply_rotary_pos_emb(key, key_angles, self.qkv_format, interleaved=interleaved)
        return (query, key) if self.qk_norm_before_rope else self._qk_normed(query, key)

    def _qk_normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)
