"""Two gloo processes: converted models that are divided among them compute, learn and load as the whole original does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import spawn

from tests.distributed.parallel_ranks import CASES, DIVIDED, work

MODES = {
    "llama": {"row": 2, "column": 2, "heads": 2, "pair": 2},
    "bert": {"row": 4, "column": 4, "heads": 2},
    "separate": {"row": 2, "column": 2, "heads": 2, "pair": 2},
    "packed": {"row": 2, "column": 2, "heads": 2, "pair": 2},
    "erf": {"row": 2, "column": 2, "heads": 1},
    "mlp": {"pair": 2},
}
"""How many modules of each kind are divided."""
WHOLE: dict[str, tuple[dict[str, int], str, str]] = {
    "llama-tied": ({"row": 2, "column": 2, "heads": 2, "pair": 2}, "lm_head", "its weight is shared"),
    "llama-bf16": ({"row": 2, "column": 2, "heads": 2, "pair": 2}, "lm_head", "it closes no region"),
    "packed-fixed": ({"pair": 1}, "blocks.0.attn.c_proj", "does not take a part of the features"),
    "fixed": ({"pair": 1}, "blocks.0.attn.out", "view does not take a part of the features"),
    "lone": ({}, "blocks.0.attn", "it opens and closes no region"),
    "odd": ({"pair": 2}, "model.layers.0.self_attn.o_proj", "3 heads and 3 groups cannot be divided by 2"),
    "shared": ({"row": 1, "column": 1, "heads": 1}, "blocks.1.mlp.fc2", "its weight is shared"),
    "scaled": ({}, "blocks.0.attn.fc2", "whose gradient would be that of one part"),
    "gpt2": ({"pair": 2}, "transformer.h.0.attn.c_attn", "it opens and closes no region"),
    "qwen3": ({"pair": 2}, "model.layers.0.self_attn.o_proj", "q_norm before it has parameters"),
}
"""Case: what is divided, a Linear that is not, why."""
SAID = {
    "no mesh": "takes a DeviceMesh, got int",
    "two dimensions": "mesh['tp']",
    "other weights": "weights on rank 1 are not those on rank 0",
    "other inputs": "inputs on rank 1 are not those on rank 0",
    "again": "divided among tensor-parallel ranks already",
    "dtensor": "is a DTensor",
    "save": "each rank has a part of it",
    "verify": "does not compare a model that is divided",
    "revert": "state of one rank's part",
    "remap": "one rank's part",
}


@pytest.mark.slow
def test_all_cases_on_two_ranks(tmp_path: Path) -> None:
    """One test, so that a parallel run starts the two processes once."""
    spawn(work, (tmp_path,), nprocs=2)
    for rank in range(2):
        found = {name: json.loads((tmp_path / f"{name}.{rank}.json").read_text()) for name in CASES}
        for name, figures in found.items():
            assert "error" not in figures, (name, figures["trace"])
        for name in DIVIDED:
            _computes_the_same(name, found[name])
        assert found["llama"]["tokens"][0] == found["llama"]["tokens"][1]
        for name, (modes, fqn, why) in WHOLE.items():
            assert _counts(found[name]["modes"]) == modes, name
            assert why in found[name]["replicated"][fqn], name
            assert found[name]["output"] < (0.05 if name == "llama-bf16" else 1e-5), name
        assert found["llama-bf16"]["scenarios"] == [["inputs[2 ranks]", True], ["inputs[2 ranks][gradients]", True]]
        assert "nothing could be divided among 2 ranks" in found["lone"]["notes"][-1]
        assert "was not compared with the whole one" in found["fixed"]["notes"][-1]
        for name, words in SAID.items():
            assert words in found["refusals"]["said"][name], name
        assert found["refusals"]["named dimension"]
        assert found["refusals"]["copy"]
        assert found["caught"]["modes"] == 0
        assert found["caught"]["output"] < 1e-5
        assert "the divided model is not the whole one" in found["caught"]["notes"][-1]
        assert "the divided model is not the whole one" in found["caught"]["strict"]
        assert found["bias"]["output"] < 1e-5


def _counts(modes: dict[str, str]) -> dict[str, int]:
    return {mode: list(modes.values()).count(mode) for mode in set(modes.values())}


def _computes_the_same(name: str, found: dict[str, Any]) -> None:
    assert _counts(found["modes"]) == MODES[name], name
    assert found["scenarios"] == [["inputs[2 ranks]", True], ["inputs[2 ranks][gradients]", True]], name
    assert found["share"] < 0.75, name
    assert found["output"] < 1e-5, name
    assert found["gradients"] < 1e-5, name
    assert found["fallbacks"] == 0, name
    assert max(found["off"]) < 1e-5, name
    assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-5), name
    assert found["trained"] < 2e-5, name
    assert found["same keys"], name
    assert found["loaded"] < 1e-5, name
    assert found["part loaded"], name
    assert found["whole te loaded"], name
    assert found["reverted"], name
