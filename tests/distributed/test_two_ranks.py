"""Two gloo processes: converted models train as the originals do under DDP and FSDP2, and resume from distributed checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import spawn

from tests.distributed.ranks import CASES, work

TRAINED = ("llama-ddp", "llama-layers", "llama-whole", "mixtral-layers")


@pytest.mark.report("huggingface/accelerate#3870", "huggingface/accelerate#3154")
def test_all_cases_on_two_ranks(tmp_path: Path) -> None:
    """One test, so that a parallel run starts the two processes once."""
    spawn(work, (tmp_path,), nprocs=2)
    found = {name: [json.loads((tmp_path / f"{name}.{rank}.json").read_text()) for rank in range(2)] for name in CASES}
    for name in TRAINED:
        _same_steps(name, found[name])
    for rank in range(2):
        _resumes_exactly(found["resume"][rank])
        _fusion_across_units_says_so(found["llama-parts"][rank])
        _wrapped_is_converted_first(found["wrapped"][rank])


def _same_steps(name: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "error" not in found, found["trace"]
        original, converted = found["losses"]
        assert converted == pytest.approx(original, rel=1e-5), name
        assert found["difference"] < 2e-5, name
        assert found["same keys"], name
        assert not found["untrained"], name
        assert found["ran"] > 0, name
    assert ranks[0]["losses"] != ranks[1]["losses"], name  # each rank has rows of its own


def _resumes_exactly(found: dict[str, Any]) -> None:
    assert "error" not in found, found["trace"]
    assert found["losses"][0] == found["losses"][1]


def _fusion_across_units_says_so(found: dict[str, Any]) -> None:
    assert "in another fully_shard unit" in found["error"]
    assert "fully_shard each block" in found["error"]


def _wrapped_is_converted_first(found: dict[str, Any]) -> None:
    assert "DistributedDataParallel" in found["ddp"]
    assert "convert model.module" in found["ddp"]
    assert "is a DTensor" in found["fsdp2"]
    assert "before fully_shard" in found["fsdp2"]
