"""Convert many architectures, built tiny from their configs, and count what happened.

    python benchmarks/zoo.py                      # every Transformers architecture that can be shrunk and run
    python benchmarks/zoo.py --only bert,llama --json zoo.json

One line per architecture: sites, outcomes, parity, seconds; then totals.  No weights are downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import te_convert

_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "encoder_hidden_size", "decoder_hidden_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_hidden_groups"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("vocab_size", "text_vocab_size"), 99),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok",), 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim"), 16),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("embedding_size", "d_embed", "emb_dim", "word_embed_proj_dim", "projection_dim"), 64),
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id")


def shrink(config: Any) -> Any:
    """Set every size that the config (or a nested one) has to something small."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value)
        elif name in _SMALL and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, min(value, _SMALL[name]) if name in ("num_hidden_layers", "n_layer") else _SMALL[name])
        elif name in _TOKENS and isinstance(value, int):
            setattr(config, name, min(value, 1))
        elif name == "layer_types" and isinstance(value, list):
            setattr(config, name, value[:2])
    return config


def architectures() -> list[str]:
    """Config names for which AutoModel knows a class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return [name for name in CONFIG_MAPPING if name in MODEL_MAPPING_NAMES]


def build(name: str) -> torch.nn.Module:
    """A tiny model of an architecture, seeded, in eval mode."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    return AutoModel.from_config(shrink(AutoConfig.for_model(name))).eval()


def convert_one(name: str, limit_params: int) -> dict[str, Any]:
    """Build, convert, count."""
    try:
        model = build(name)
        size = sum(p.numel() for p in model.parameters())
        if size > limit_params:
            return {"name": name, "status": "too-large", "params": size}
    except Exception as error:
        return {"name": name, "status": "not-built", "error": f"{type(error).__name__}: {error}"[:200]}
    start = time.perf_counter()
    try:
        result = te_convert.convert(model)
    except Exception as error:
        return {"name": name, "status": "CRASH", "error": f"{error!r}"[:300], "traceback": traceback.format_exc()[-1500:]}
    report = result.report
    return {
        "name": name,
        "status": "ok" if report.scenarios else "no-run",
        "seconds": round(time.perf_counter() - start, 2),
        "parity": report.parity.status,
        "converted": len(result.plan.converting),
        "outcomes": Counter(str(d.outcome) for d in result.plan),
        "reasons": Counter(r.code for d in result.plan for r in d.reasons),
        "reverted": [site.to_dict() for site in report.parity.reverted],
        "min_sqnr": min((s.figures.sqnr_db for s in report.parity.scenarios), default=None),
        "notes": list(report.notes),
    }


def main() -> None:
    """Run, print, sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="comma-separated config names")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th architecture, starting with the i-th")
    parser.add_argument("--limit-params", type=int, default=30_000_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    index, count = map(int, args.shard.split("/"))
    names = [n for n in args.only.split(",") if n] or architectures()[index::count]
    rows = []
    for name in names:
        row = convert_one(name, args.limit_params)
        rows.append(row)
        print(json.dumps(row, default=str), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1, default=str))
    print("status", dict(Counter(row["status"] for row in rows)), "parity", dict(Counter(row.get("parity", "-") for row in rows)))


if __name__ == "__main__":
    main()
