"""Reading a checkpoint while the disk fails, and torch files in all the ways in which people saved them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import te_convert
from te_convert.errors import InputError
from te_convert.stream.checkpoint import Checkpoint, open_checkpoint
from te_convert.stream.writer import ShardWriter
from tests.stream.stream_samples import build, failing_reads, finished, inodes, tensors, write

pytest.importorskip("transformers")
SHARD = 30_000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "hf"
    write("llama", folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(source: Path) -> dict[str, bytes]:
    te_convert.convert_checkpoint(source, source.parent / "te", shard_bytes=SHARD, verify=False)
    return weights(source.parent / "te")


def weights(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.startswith(("model", "ledger", "buffers"))}


def convert(source: Path, out: Path, **options: Any) -> None:
    te_convert.convert_checkpoint(source, out, shard_bytes=SHARD, verify=False, **options)


@pytest.mark.parametrize("healthy", [0, 70_500, 110_000])
def test_a_read_error_names_file_and_offset_and_can_be_resumed(
    healthy: int, source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(os, "preadv", failing_reads(healthy, told))
    out = tmp_path / "te"
    with pytest.raises(InputError, match="cannot be read at offset") as caught:
        convert(source, out)
    monkeypatch.undo()
    assert str(caught.value) == told[0]
    assert "--resume" in caught.value.hint
    assert not out.exists()
    if healthy == 0:
        assert [*tmp_path.iterdir()] == []
        return
    before = finished(out)
    assert before
    convert(source, out, resume=True)
    assert inodes(out, before) == before
    assert weights(out) == undisturbed


def test_reads_may_be_short(source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, buffers, offset: read(handle, [buffers[0][:1000]], offset))
    convert(source, tmp_path / "te")
    assert weights(tmp_path / "te") == undisturbed


def during(action: Callable[[], None], after: int) -> Callable[[str, int, int], None]:
    """A progress callback that acts once, when so many bytes were streamed."""
    calls: list[int] = []

    def progress(stage: str, done: int, _: int) -> None:
        if stage == "stream" and done > after and not calls:
            calls.append(done)
            action()

    return progress


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    write("llama", tmp_path / "hf")
    return tmp_path / "hf"


def test_a_file_that_is_truncated_while_it_is_read(copied: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    last = sorted(copied.glob("*.safetensors"))[-1]
    data, stat = last.read_bytes(), last.stat()
    with pytest.raises(InputError, match=rf"{last.name} ends at offset {len(data) - 100}, in the middle of a tensor"):
        convert(copied, tmp_path / "te", progress=during(lambda: os.truncate(last, len(data) - 100), 40_000))
    assert not (tmp_path / "te").exists()
    before = finished(tmp_path / "te")
    assert before
    last.write_bytes(data)
    with pytest.raises(InputError, match="an unfinished conversion of other files"):
        convert(copied, tmp_path / "te", resume=True)
    assert finished(tmp_path / "te") == before
    os.utime(last, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    convert(copied, tmp_path / "te", resume=True)
    assert weights(tmp_path / "te") == undisturbed


def test_a_file_that_is_replaced_while_it_is_read(copied: Path, tmp_path: Path) -> None:
    last = sorted(copied.glob("*.safetensors"))[-1]
    with pytest.raises(InputError, match="changed while they were read"):
        convert(copied, tmp_path / "te", progress=during(lambda: os.utime(last, ns=(1, 1)), 40_000))
    assert not (tmp_path / "te").exists()


# --- torch files


def _plain(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return state


def _views(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each in the middle of a larger storage."""
    return {name: torch.cat([torch.ones(3), t.flatten(), torch.ones(5)])[3:-5].view(t.shape) for name, t in state.items()}


def _one_storage(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    flat = torch.cat([tensor.flatten() for tensor in state.values()])
    parts = flat.split([tensor.numel() for tensor in state.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(state.items(), parts, strict=True)}


def _transposed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Saved as what ``.t()`` shows: not in row-major order."""
    return {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in state.items()}


def _strided(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([tensor, torch.ones_like(tensor)], -1)[..., 0] for name, tensor in state.items()}


def _parameters(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.nn.Parameter(tensor) for name, tensor in state.items()}


SAVED: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "plain": _plain,
    "views": _views,
    "one storage": _one_storage,
    "transposed": _transposed,
    "strided": _strided,
    "parameters": _parameters,
}


def save_shards(folder: Path, state: dict[str, torch.Tensor], count: int, legacy: bool = False) -> None:
    names = list(state)
    files = [f"pytorch_model-{i + 1:05d}-of-{count:05d}.bin" for i in range(count)]
    weight_map: dict[str, str] = {}
    for i, file in enumerate(files):
        own = names[i::count]
        torch.save({name: state[name] for name in own}, folder / file, _use_new_zipfile_serialization=not legacy)
        weight_map |= dict.fromkeys(own, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def torch_folder(source: Path, tmp_path: Path) -> Path:
    """config.json alone."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_bytes((source / "config.json").read_bytes())
    return tmp_path / "hf"


@pytest.mark.parametrize("how", SAVED)
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_every_way_of_saving_is_read(how: str, legacy: bool, torch_folder: Path, source: Path) -> None:
    save_shards(torch_folder, SAVED[how](tensors(source)), 2, legacy)
    with closing(open_checkpoint(torch_folder)) as torch_files, closing(open_checkpoint(source)) as safe:
        assert torch_files.entries.keys() == safe.entries.keys()
        for name in safe.entries:
            assert torch.equal(torch_files.load(name), safe.load(name))
            assert pieces(torch_files, name, 100) == pieces(safe, name, 100)


def pieces(checkpoint: Checkpoint, name: str, step: int) -> bytes:
    """Read in parts that begin at odd places, as the writer does with large tensors."""
    buffer = memoryview(bytearray(24))
    size = checkpoint.entries[name].size
    return b"".join(bytes(c) for i in range(0, size, step) for c in checkpoint.chunks(name, i, min(step, size - i), buffer))


@pytest.mark.parametrize(("how", "legacy"), [("transposed", False), ("one storage", True)])
def test_torch_shards_convert_as_safetensors_do(
    how: str, legacy: bool, torch_folder: Path, source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    save_shards(torch_folder, SAVED[how](tensors(source)), 3, legacy)
    convert(torch_folder, tmp_path / "te")
    found = weights(tmp_path / "te")
    assert {n: d for n, d in found.items() if n != "ledger.json"} == {n: d for n, d in undisturbed.items() if n != "ledger.json"}
    te_convert.export(tmp_path / "te", tmp_path / "back")
    expected = tensors(source)
    assert all(torch.equal(value, expected[name]) for name, value in tensors(tmp_path / "back").items())


def test_torch_shards_are_opened_again_for_resume(
    torch_folder: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(BaseException):
        pass

    save_shards(torch_folder, _transposed(tensors(source)), 3)
    calls: list[str] = []
    write_shard = ShardWriter._write

    def counted(self: ShardWriter, *args: Any) -> Any:
        if len(calls) == 2:
            raise Interrupted
        calls.append(args[0])
        return write_shard(self, *args)

    monkeypatch.setattr(ShardWriter, "_write", counted)
    with pytest.raises(Interrupted):
        convert(torch_folder, tmp_path / "te")
    before = finished(tmp_path / "te")
    assert before
    monkeypatch.undo()
    convert(torch_folder, tmp_path / "te", resume=True)
    assert inodes(tmp_path / "te", before) == before
    te_convert.export(tmp_path / "te", tmp_path / "back")
    expected = tensors(source)
    assert all(torch.equal(value, expected[name]) for name, value in tensors(tmp_path / "back").items())


def test_a_tensor_that_is_not_in_row_major_order_is_copied_once(torch_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each part of it, which would be quadratic in its size."""
    torch.save({"a": torch.randn(64, 64).t(), "b": torch.randn(64, 64).t()}, torch_folder / "pytorch_model.bin")
    copies: list[int] = []
    contiguous = torch.Tensor.contiguous

    def counted(self: torch.Tensor) -> torch.Tensor:
        copies.append(not self.is_contiguous())
        return contiguous(self)

    monkeypatch.setattr(torch.Tensor, "contiguous", counted)
    with closing(open_checkpoint(torch_folder)) as checkpoint:
        for name in "ab":
            pieces(checkpoint, name, 100)
    assert sum(copies) == 2


def test_tied_storages_and_wide_dtypes(torch_folder: Path, tmp_path: Path) -> None:
    """lm_head in the file although config.json ties it, weights in float64, and an integer that the model has no place for."""
    original: Any = build("llama tied")
    original.config.architectures = [type(original).__name__]
    original.config.save_pretrained(torch_folder)
    state = {name: tensor.double() for name, tensor in original.state_dict().items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    state["model.layers.0.self_attn.bias"] = torch.arange(6, dtype=torch.int64)
    torch.save(state, torch_folder / "pytorch_model.bin")
    result = te_convert.convert_checkpoint(torch_folder, tmp_path / "te")
    assert result.report.parity.status == "slice"
    assert any("1 tensors of the checkpoint have no place" in note and "self_attn.bias" in note for note in result.report.notes)
    with closing(open_checkpoint(tmp_path / "te")) as checkpoint:
        stored = checkpoint.entries
    assert {entry.dtype for entry in stored.values()} == {torch.float64}
    assert "lm_head.weight" not in stored
    te_convert.export(tmp_path / "te", tmp_path / "back")
    back = tensors(tmp_path / "back")
    assert back.keys() == state.keys() - {"lm_head.weight", "model.layers.0.self_attn.bias"}
    assert all(torch.equal(value, state[name]) and value.dtype == state[name].dtype for name, value in back.items())
