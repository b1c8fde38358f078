"""ledger.json: where every tensor of a streamed conversion came from, with digests; enough to go back without the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from te_convert.errors import LoadError
from te_convert.replacements.specs import dtype_name, torch_dtype
from te_convert.stream.checkpoint import Checkpoint
from te_convert.stream.header import Entry
from te_convert.stream.pieces import Layout, Piece
from te_convert.stream.staging import ShardRecord

LEDGER = "ledger.json"
LEDGER_SCHEMA = 2  # 1 had no roll


def write_ledger(weights: Mapping[str, Layout], sources: Mapping[str, Entry], records: Sequence[ShardRecord]) -> str:
    """The ledger as JSON text: each tensor with its pieces and the SHA-256 of their bytes, each source with dtype and shape."""
    digests = {name: digest for record in records for name, digest in record.tensors.items()}
    tensors = {
        name: [{**vars(p), "sha256": sha256} for p, sha256 in zip(layout.pieces, digests[name], strict=True)]
        for name, layout in weights.items()
    }
    origins = {
        key: {"dtype": dtype_name(entry.dtype), "shape": list(entry.shape), "file": entry.path.name}
        for key, entry in sources.items()
    }
    return json.dumps({"schema": LEDGER_SCHEMA, "sources": origins, "tensors": tensors}, indent=0)


def read_ledger(path: Path, checkpoint: Checkpoint) -> tuple[dict[str, Layout], dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """The directory's tensors as pieces of the original checkpoint's, and dtype and shape of each of those in their order.

    Raises:
        LoadError: not a ledger, or not of this directory.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] not in (1, LEDGER_SCHEMA):
            raise LoadError(f"{LEDGER} has schema {data['schema']!r}; this version reads {LEDGER_SCHEMA}", "use the newer version")
        sources = {key: (torch_dtype(each["dtype"]), tuple(each["shape"])) for key, each in data["sources"].items()}
        made = {
            name: Layout(
                checkpoint.entries[name].dtype,
                checkpoint.entries[name].shape,
                tuple(Piece(p["source"], p["start"], p["count"], p["columns"], p.get("roll", 0)) for p in pieces),
            )
            for name, pieces in data["tensors"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{LEDGER} is damaged: {type(error).__name__}: {error}", "convert the model again") from None
    return made, sources
