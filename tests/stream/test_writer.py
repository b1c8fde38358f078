"""The folder in which a directory is made: whose it is, what of it a later run takes, and what stands in the way."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_convert.emit.tensors_file import file_record
from te_convert.errors import InputError
from te_convert.stream.checkpoint import Checkpoint, bytes_of, open_checkpoint
from te_convert.stream.pieces import Layout, whole
from te_convert.stream.staging import Staging
from te_convert.stream.writer import ShardWriter

JOB = {"job": "one"}


class Interrupted(BaseException):
    pass


@pytest.fixture
def checkpoint(tmp_path: Path) -> Any:
    from safetensors.torch import save_file

    (tmp_path / "hf").mkdir()
    save_file({name: torch.randn(50) for name in "abc"}, tmp_path / "hf" / "model.safetensors")
    opened = open_checkpoint(tmp_path / "hf")
    yield opened
    opened.close()


def layouts(checkpoint: Checkpoint) -> dict[str, Layout]:
    return {name: whole(name, entry.dtype, entry.shape) for name, entry in checkpoint.entries.items()}


def begin(checkpoint: Checkpoint, target: Path) -> Path:
    """Two shards of three, then an interrupt; the folder that stays."""
    wanted = layouts(checkpoint)
    staging = Staging(target, JOB, resume=False)
    with suppress(Interrupted), staging.locked():
        writer = ShardWriter(staging, checkpoint, lambda *_: None, 600)
        writer.write([(f"{name}.safetensors", [name]) for name in "ab"], wanted)
        raise Interrupted
    return staging.folder


def taken(target: Path) -> set[str]:
    with pytest.raises(Interrupted), Staging(target, JOB, resume=True).locked() as staging:
        raise Interrupted
    return set(staging.finished)


def test_a_shard_of_the_right_size_with_other_bytes_is_written_again(checkpoint: Checkpoint, tmp_path: Path) -> None:
    target = tmp_path / "te"
    folder = begin(checkpoint, target)
    assert taken(target) == {"a.safetensors", "b.safetensors"}
    file = folder / "files" / "a.safetensors"
    good = file_record(file)
    with file.open("r+b") as handle:
        handle.seek(-1, 2)
        handle.write(b"\x7f")
    assert file.stat().st_size == good.size
    with Staging(target, JOB, resume=True).locked() as staging:
        assert set(staging.finished) == {"b.safetensors"}
        ShardWriter(staging, checkpoint, lambda *_: None, 600).write([("a.safetensors", ["a"])], layouts(checkpoint))
        assert file_record(file) == good
    assert not folder.exists()


def test_a_line_that_was_cut_short_loses_that_shard_alone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = begin(checkpoint, tmp_path / "te")
    ledger = folder / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-20])
    assert taken(tmp_path / "te") == {"a.safetensors"}


def test_a_folder_of_someone_else_is_not_touched(tmp_path: Path) -> None:
    other = tmp_path / ".te.partial"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="was not written by te_convert"), Staging(tmp_path / "te", JOB, resume=False).locked():
        pass
    assert (other / "thesis.txt").read_text() == "mine"


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".te.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="was not written by te_convert"), Staging(tmp_path / "te", JOB, resume=False).locked():
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_in_its_place_and_a_disk_that_fails_late(tmp_path: Path) -> None:
    (tmp_path / ".te.partial").write_text("")
    with pytest.raises(InputError, match="cannot be written: File exists"), Staging(tmp_path / "te", JOB, resume=False).locked():
        pass
    with (
        pytest.raises(InputError, match="manifest cannot be written: No space left") as caught,
        Staging(tmp_path / "x", JOB, resume=False).locked(),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "manifest")
    assert "--resume" in caught.value.hint
    assert not (tmp_path / ".x.partial").exists()


def test_a_disk_that_is_too_small_is_told_before_the_work(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=599))
    with pytest.raises(InputError, match=r"needs 0\.0 GB more"), Staging(tmp_path / "te", JOB, resume=False).locked() as staging:
        ShardWriter(staging, checkpoint, lambda *_: None, 600)


def test_a_disk_that_fails_while_it_takes_a_shard(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing runs beside reading: its error is that of the shard, which is not finished, and the one before it is."""

    def failing(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").readlink().name == "b.safetensors.part":
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("te_convert.stream.writer.os.fsync", failing)
    target = tmp_path / "te"
    with pytest.raises(InputError, match=r"b\.safetensors cannot be written: Input/output error"):
        begin(checkpoint, target)
    monkeypatch.undo()
    assert taken(target) == {"a.safetensors"}


def test_many_chunks_keep_their_order_in_file_and_digests(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are used again while digests run on other threads: more chunks than buffers, flushed all the time."""
    import hashlib
    import time

    from te_convert.stream import writer as module

    class Slow:
        def __init__(self, data: bytes = b"") -> None:
            self._inner = hashlib.sha256(data)

        def update(self, data: memoryview) -> None:
            time.sleep(0.001)
            self._inner.update(data)

        def hexdigest(self) -> str:
            return self._inner.hexdigest()

    monkeypatch.setattr(module, "CHUNK_BYTES", 16)
    monkeypatch.setattr(module, "_WRITE_BYTES", 5)
    monkeypatch.setattr(module, "_FLUSH_BYTES", 30)
    monkeypatch.setattr(module, "hashlib", SimpleNamespace(sha256=Slow))
    with Staging(tmp_path / "te", JOB, resume=False).locked() as staging:
        file = staging.path / "a.safetensors"
        (record,) = ShardWriter(staging, checkpoint, lambda *_: None, 600).write([(file.name, list("abc"))], layouts(checkpoint))
        assert file_record(file) == record.record
        for name in "abc":
            data = bytes_of(checkpoint.load(name))
            assert record.tensors[name] == [hashlib.sha256(data).hexdigest()]


def test_a_folder_that_went_while_the_lock_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finished in between: the lock is on a folder that no longer has the name."""
    import fcntl

    def meanwhile(*_: Any) -> None:
        (tmp_path / ".te.partial").rename(tmp_path / "te")

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    with pytest.raises(InputError, match="another process"), Staging(tmp_path / "te", JOB, resume=False).locked():
        pass
