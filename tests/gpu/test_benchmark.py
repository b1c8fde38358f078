"""benchmarks/gpu.py on any machine: its dry mode measures everything on twins, and one row that fails does not stop the rest."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("gpu_benchmark", FOLDER / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("gpu_models", None)


@pytest.fixture
def few(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One recipe, and no compiler."""
    monkeypatch.setattr(gpu, "CONDITIONS", {"fp8-current": None})
    monkeypatch.setattr(gpu.Bench, "compiled", gpu.Bench.original)
    return gpu


@pytest.mark.report(
    "huggingface/accelerate#1647",
    "huggingface/accelerate#2597",
    "NVIDIA/TransformerEngine#445",
    "NVIDIA/TransformerEngine#1119",
    "NVIDIA/TransformerEngine#972",
    "pytorch/ao#2262",
    "pytorch/ao#1297",
    "NVIDIA/TransformerEngine#1429",
)
def test_every_row_is_measured(few: Any, tmp_path: Path) -> None:
    out = tmp_path / "new" / "gpu.json"
    assert few.main(["--dry", "--out", str(out)]) == 0
    answer = json.loads(out.read_text(encoding="utf-8"))
    assert (answer["schema"], answer["dry"], answer["parity"]["status"]) == (1, True, "passed")
    assert {"te.LayerNormLinear", "te.LayerNormMLP", "te.DotProductAttention", "te.Linear"} <= answer["parity"]["sites"].keys()
    assert answer["parity"]["logits_sqnr_db"]["bf16"] > answer["parity"]["logits_sqnr_db"]["fp8-current"] > 15
    rows = [(row["model"], row["recipe"]) for row in answer["results"]]
    assert rows == [
        ("original", None),
        ("converted", None),
        ("te.TransformerLayer by hand", None),
        ("converted", "fp8-current"),
        ("te.TransformerLayer by hand", "fp8-current"),
        ("original, torch.compile", None),
    ]
    assert all(row["step_ms"] > 0 and row["forward_ms"] > 0 and row["tokens_per_s"] > 0 for row in answer["results"])


def test_a_row_that_fails_says_why_and_the_others_go_on(few: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any) -> None:
        raise RuntimeError("CUDA out of memory\nand more")

    monkeypatch.setattr(few.Bench, "hand_written", fails)
    out = tmp_path / "gpu.json"
    assert few.main(["--dry", "--out", str(out)]) == 1
    results = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert [row.get("error") for row in results].count("RuntimeError: CUDA out of memory") == 2
    assert sum("step_ms" in row for row in results) == 4


def test_rows_without_time_are_skipped(few: Any, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert few.main(["--dry", "--budget", "0", "--out", str(out)]) == 0
    assert {row["skipped"] for row in json.loads(out.read_text(encoding="utf-8"))["results"]} == {"no time left"}


def test_the_model_by_hand_is_the_original(gpu: Any) -> None:
    """With the original's weights it gives the original's logits: what is compared is the same work."""
    from te_convert import reference

    shape = gpu.TINY
    torch.manual_seed(0)
    original, hand = gpu.Decoder(shape), gpu.HandWritten(reference, shape, torch.float32, "cpu")
    with torch.no_grad():
        hand.embed.weight.copy_(original.embed.weight)
        hand.head.weight.copy_(original.head.weight)
        hand.norm.weight.fill_(1.0)
        for theirs, ours in zip(hand.blocks, original.blocks, strict=True):
            qkv, mlp, a = theirs.self_attention.layernorm_qkv, theirs.layernorm_mlp, ours.attention
            qkv.weight.copy_(interleaved(shape, a.q_proj.weight, a.k_proj.weight, a.v_proj.weight))
            theirs.self_attention.proj.weight.copy_(a.o_proj.weight)
            mlp.fc1_weight.copy_(torch.cat([ours.mlp.gate.weight, ours.mlp.up.weight]))
            mlp.fc2_weight.copy_(ours.mlp.down.weight)
            qkv.layer_norm_weight.fill_(1.0)
            mlp.layer_norm_weight.fill_(1.0)
        ids = torch.arange(2 * 16).view(2, 16) % shape.vocab
        torch.testing.assert_close(hand(ids), original(ids), rtol=1e-4, atol=1e-4)


def interleaved(shape: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """TE's default layout of a fused projection: for each group its queries, key and value."""
    parts = [w.view(shape.groups, -1, shape.channels, shape.hidden) for w in (q, k, v)]
    return torch.cat(parts, 1).reshape(-1, shape.hidden)


def test_the_script_says_what_it_lacks() -> None:
    script = [str(FOLDER / "gpu.sh")]
    done = subprocess.run([*script, "--wrong"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (2, "gpu: unknown argument --wrong; see the head of benchmarks/gpu.sh")
