"""The way back while things go wrong: killed half-way, damaged shards, a disk that fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import te_convert
from te_convert.cli.main import main
from te_convert.errors import InputError
from te_convert.stream.export import export_directory
from tests.stream.stream_samples import failing_reads, finished, inodes, run_and_kill, tokens, write

pytest.importorskip("transformers")
SHARD = 30_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a conversion "te" in several shards, and its export "whole"; tests only read it."""
    folder = tmp_path_factory.mktemp("made")
    write("llama", folder / "hf")
    te_convert.convert_checkpoint(folder / "hf", folder / "te", shard_bytes=SHARD, verify=False)
    export_directory(folder / "te", folder / "whole", shard_bytes=SHARD)
    return folder


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    write("llama", tmp_path / "hf")
    te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te", shard_bytes=SHARD, verify=False)
    return tmp_path / "te"


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_killed_while_exporting(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 in the middle of a shard: no directory; --resume makes the same bytes as an undisturbed run."""
    out = tmp_path / "back"
    arguments = ["export", str(made / "te"), "--out", str(out), "-q"]
    run_and_kill(export_directory, SHARD, arguments)
    assert not out.exists()
    before = finished(out)
    assert before
    defaults: Any = export_directory.__kwdefaults__
    monkeypatch.setitem(defaults, "shard_bytes", SHARD)
    done = CliRunner().invoke(main, [*arguments, "--resume"])
    assert done.exit_code == 0, done.stderr
    assert inodes(out, before) == before
    assert files_of(out) == files_of(made / "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["back"]


@pytest.mark.parametrize("size", [-1, 0, 1])
def test_a_damaged_shard_is_named(size: int, copied: Path, tmp_path: Path) -> None:
    shard = sorted(copied.glob("model-*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] if size < 0 else data + b"x" if size else data[:-1] + bytes([data[-1] ^ 1]))
    done = CliRunner().invoke(main, ["export", str(copied), "--out", str(tmp_path / "back")])
    assert done.exit_code == 2
    assert f"{shard.name} was changed or truncated" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "te"}


def test_a_read_error_names_file_and_offset_and_can_be_resumed(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(os, "preadv", failing_reads(70_500, told))
    out = tmp_path / "back"
    with pytest.raises(InputError) as caught:
        export_directory(made / "te", out, shard_bytes=SHARD)
    monkeypatch.undo()
    assert str(caught.value) == told[0]
    assert not out.exists()
    before = finished(out)
    assert before
    export_directory(made / "te", out, shard_bytes=SHARD, resume=True)
    assert inodes(out, before) == before
    assert files_of(out) == files_of(made / "whole")


def test_training_goes_on_from_a_streamed_directory(made: Path, tmp_path: Path) -> None:
    """Steps after a checkpoint of model and optimizer are the same to the last bit, also where the weights went out and back."""

    def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> float:
        batch = tokens() + seed
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    model = te_convert.load(made / "te", backend="reference")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for seed in (-3, -2, -1):
        step(model, optimizer, seed)
    te_convert.export(model, tmp_path / "weights")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")

    te_convert.convert_checkpoint(tmp_path / "weights", tmp_path / "te", verify=False)
    fresh = te_convert.load(tmp_path / "te", backend="reference")
    again = torch.optim.AdamW(fresh.parameters(), lr=1.0)
    again.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert [step(fresh, again, seed) for seed in (0, -1)] == [step(model, optimizer, seed) for seed in (0, -1)]
    assert [name for name, _ in fresh.named_parameters()] == [name for name, _ in model.named_parameters()]
    for ours, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
