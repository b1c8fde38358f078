"""Ten thousand tensors: the work for each stays the same.  Growth is asserted, in processor time, not seconds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import te_convert
from te_convert.emit.manifest import FileRecord
from te_convert.stream.checkpoint import open_checkpoint
from te_convert.stream.header import Entry
from te_convert.stream.ledger import write_ledger
from te_convert.stream.pieces import Layout, Piece, invert
from te_convert.stream.staging import ShardRecord
from te_convert.stream.targets import from_checkpoint
from tests.stream.stream_samples import tensors

SHARD = 2_000_000
LARGEST_GROWTH = 3.0
"""Four times as many tensors would take four times as long for each where the work is quadratic."""


def seconds_each(work: Callable[[], object], count: int) -> float:
    gc.collect()
    start = time.process_time()
    work()
    return (time.process_time() - start) / count


def _mixture(layers: int, folder: Path) -> int:
    """A Mixtral of 60 experts: 187 tensors a layer, as checkpoints with so many have; returns how many there are."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
        num_local_experts=60,
    )
    MixtralForCausalLM(config).save_pretrained(folder, max_shard_size="2MB")
    checkpoint = open_checkpoint(folder)
    checkpoint.close()
    return len(checkpoint.entries)


@pytest.mark.slow
def test_a_checkpoint_of_ten_thousand_tensors(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    each = []
    for layers, least in ((2, 300), (14, 2_500), (55, 10_000)):  # the first for what is done once in a process
        folder = tmp_path / str(layers)
        count = _mixture(layers, folder / "hf")
        assert count > least
        each.append(seconds_each(partial(there_and_back, folder), count))
    assert each[2] < LARGEST_GROWTH * each[1]
    found, expected = tensors(tmp_path / "55" / "back"), tensors(tmp_path / "55" / "hf")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def there_and_back(folder: Path) -> None:
    te_convert.convert_checkpoint(folder / "hf", folder / "te", shard_bytes=SHARD, verify=False)
    te_convert.export(folder / "te", folder / "back")


def _experts(count: int) -> tuple[dict[str, Layout], dict[str, Entry], list[ShardRecord]]:
    """Every three tensors joined in one, in shards of a hundred."""
    made = {
        f"t{i}": Layout(torch.float32, (3, 4), tuple(Piece(f"s{3 * i + k}", 0, 4) for k in range(3))) for i in range(count // 3)
    }
    sources = {f"s{i}": Entry(Path("f"), torch.float32, (4,), 16 * i, 16) for i in range(count // 3 * 3)}
    names = list(made)
    records = [
        ShardRecord(f"{start}", FileRecord("", 1), {name: ["0" * 64] * 3 for name in names[start : start + 100]})
        for start in range(0, len(names), 100)
    ]
    return made, sources, records


def test_the_parts_are_linear() -> None:
    growth: dict[str, list[float]] = {}
    for count in (2_500, 10_000):
        made, sources, records = _experts(count)
        kinds = {name: (entry.dtype, entry.shape) for name, entry in sources.items()}
        stored = {name: Layout(dtype, shape, (Piece(f"k{name}", 0, 4),)) for name, (dtype, shape) in kinds.items()}
        parts: dict[str, Callable[[], object]] = {
            "invert": partial(invert, made, kinds),
            "compose": partial(from_checkpoint, made, stored),
            "ledger": partial(write_ledger, made, sources, records),
        }
        for name, part in parts.items():
            growth.setdefault(name, []).append(min(seconds_each(part, count) for _ in range(3)))
    assert {name: large < LARGEST_GROWTH * small for name, (small, large) in growth.items()} == dict.fromkeys(growth, True)
