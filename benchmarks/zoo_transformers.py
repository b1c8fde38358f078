"""Tiny Transformers models for the zoo: every architecture that AutoModel knows, from a shrunk config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_DEPTH: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_hidden_groups"), 2),
    **dict.fromkeys(("vocab_size", "text_vocab_size"), 99),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
}
_WIDTH: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "encoder_hidden_size", "decoder_hidden_size"), 64),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "index_head_dim", "rotary_dim"), 16),
    **dict.fromkeys(("mamba_n_heads",), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("embedding_size", "d_embed", "emb_dim", "word_embed_proj_dim", "projection_dim"), 64),
}
_SMALL = _DEPTH | _WIDTH
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id")
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")
_TOO_LARGE = 300_000_000  # parameters of a model that is not even built

_EXTRA: dict[str, dict[str, Any]] = {
    **{name: {"prediction_length": 4, "context_length": 8} for name in ("autoformer", "informer", "time_series_transformer")},
    "esm": {"vocab_size": 33},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "lilt": {"channel_shrink_ratio": 4, "hidden_size": 96, "num_attention_heads": 4},
    "mamba2": {"num_heads": 8},
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": 16},
    "granitemoehybrid": {"mamba_d_head": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}
"""What a config needs that its sizes do not tell."""


def architectures() -> list[str]:
    """Config names for which AutoModel knows a class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return [name for name in CONFIG_MAPPING if name in MODEL_MAPPING_NAMES]


def build(name: str) -> nn.Module:
    """A tiny model of an architecture, seeded, in eval mode: the smallest of four kinds that is built and runs.

    The kinds: everything small; without a cache (a cut model may have no layer that fills one); eight layers, so that every
    period of a mixed model is met; depth and vocabulary alone small, for configs whose sizes hang together.

    Raises:
        Exception: What the last kind that could not be built raised.
    """
    from te_convert.capture.inputs import derive_scenario

    kinds: tuple[Callable[[Any], Any], ...] = (shrink, _without_cache, _deeper, _depth_only)
    built: nn.Module | None = None
    failure: Exception | None = None
    for kind in kinds:
        try:
            model = _from_config(name, kind)
        except Exception as error:
            failure = failure or error
            continue
        built = model if built is None else built
        if derive_scenario(model) is not None:
            return model
    if built is None:
        assert failure is not None
        raise failure
    return built


def _from_config(name: str, kind: Callable[[Any], Any]) -> nn.Module:
    from transformers import AutoConfig, AutoModel

    config = kind(AutoConfig.for_model(name))
    for key, value in _EXTRA.get(name, {}).items():
        setattr(config, key, value)
    if kind is _depth_only:
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModel.from_config(config).parameters())
        if size > _TOO_LARGE:
            raise ValueError(f"{size} parameters with two layers")
    torch.manual_seed(0)
    return AutoModel.from_config(config).eval()


def shrink(config: Any, sizes: dict[str, Any] = _SMALL, depth: int = 2) -> Any:
    """Set every size that the config (or a nested one) has to something small."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value, sizes, depth)
        elif name in sizes and isinstance(value, int) and not isinstance(value, bool):
            cut = min(value, depth) if name in ("num_hidden_layers", "n_layer") else sizes[name]
            setattr(config, name, cut)
        elif name in _TOKENS and isinstance(value, int):
            setattr(config, name, min(value, 1))
    if sizes is _SMALL:
        _mend(config)
    _cut_kinds(config, depth)
    return config


def _cut_kinds(config: Any, depth: int) -> None:
    """Layer kinds for the layers that are left: each kind that there was, as far as there is room."""
    for name in _KINDS:
        kinds = vars(config).get(name)
        if not isinstance(kinds, list) or not kinds:
            continue
        distinct = list(dict.fromkeys(kinds))
        complete = len(distinct) > depth or set(kinds[:depth]) == set(distinct)
        setattr(config, name, kinds[:depth] if complete else (distinct + kinds)[: min(depth, len(kinds))])


def _mend(config: Any) -> None:
    """Sizes that follow from others."""
    sizes = vars(config)
    heads = next((sizes[n] for n in _HEADS if isinstance(sizes.get(n), int)), None)
    if "head_dim" in sizes and sizes["head_dim"] is None and heads:
        config.head_dim = 16
    if "num_key_value_heads" in sizes and (sizes["num_key_value_heads"] is None or sizes.get("kv_lora_rank")) and heads:
        config.num_key_value_heads = heads
    if "num_experts_per_tok" in sizes and sizes["num_experts_per_tok"] is None:
        config.num_experts_per_tok = 2
    rope = sizes.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", rope):
        half = int(int(sizes.get("head_dim") or 16) * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [half - half // 3 * 2, half // 3, half // 3]


def _without_cache(config: Any) -> Any:
    shrink(config)
    for part in (config, *(v for v in vars(config).values() if hasattr(v, "model_type"))):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    return config


def _deeper(config: Any) -> Any:
    return shrink(config, depth=8)


def _depth_only(config: Any) -> Any:
    return shrink(config, sizes=_DEPTH)
