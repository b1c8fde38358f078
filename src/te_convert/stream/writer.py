"""Writing safetensors shards from pieces: bounded memory, digests in the same pass, finished shards kept for a later run."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from te_convert.emit.manifest import FileRecord
from te_convert.emit.tensors_file import make_header
from te_convert.emit.user_code import one_line
from te_convert.errors import InputError
from te_convert.stream.checkpoint import CHUNK_BYTES, Checkpoint, bytes_of
from te_convert.stream.pieces import Layout, Piece

Progress = Callable[[int, int], None]
_LEDGER = "ledger.jsonl"
_JOB = "job.json"


@dataclass(frozen=True)
class ShardRecord:
    """A finished file.

    Attributes:
        tensors: tensor → SHA-256 of the bytes of each of its pieces as they were written.
    """

    file: str
    record: FileRecord
    tensors: dict[str, list[str]]

    def to_json(self) -> str:
        """One line."""
        return json.dumps(
            {"file": self.file, "sha256": self.record.sha256, "size": self.record.size, "tensors": self.tensors},
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, line: str) -> ShardRecord:
        """The inverse of :meth:`to_json`."""
        data = json.loads(line)
        return cls(data["file"], FileRecord(data["sha256"], data["size"]), data["tensors"])


class Staging:
    """The hidden sibling in which a directory is made: its job (what is being written) and the shards that are finished."""

    def __init__(self, target: Path, job: Mapping[str, Any], resume: bool) -> None:
        self.path = target.with_name(f".{target.name}.partial")
        self.finished: dict[str, ShardRecord] = {}
        self._job = json.dumps(job, sort_keys=True, indent=1)
        self._resume = resume

    @contextmanager
    def locked(self) -> Iterator[Staging]:
        """The folder, for this process alone; it stays after an exception when a shard is finished.

        Raises:
            InputError: another process is writing it, or ``resume`` and it belongs to another job.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"another process is writing {self.path}", "wait for it, or choose another --out") from None
            self._start()
            try:
                yield self
            except BaseException:
                if not self.finished:
                    self._clear()
                    self.path.rmdir()
                raise
        finally:
            os.close(lock)

    def _start(self) -> None:
        job = self.path / _JOB
        known = job.read_text(encoding="utf-8") if job.is_file() else None
        if self._resume and known is not None and known != self._job:
            raise InputError(
                f"{self.path} holds an unfinished conversion of other files or with other options",
                "give the same ones, or leave --resume out to start over",
            )
        if self._resume and known is not None:
            self._read_ledger()
        self._clear(keep={*self.finished, _LEDGER, _JOB} if self.finished else set())
        if not self.finished:
            _write_flushed(job, self._job.encode())

    def _read_ledger(self) -> None:
        ledger = self.path / _LEDGER
        lines = ledger.read_text(encoding="utf-8").splitlines() if ledger.is_file() else []
        for line in lines:
            try:
                record = ShardRecord.from_json(line)
            except (ValueError, KeyError, TypeError):
                break  # the line that was being written when the process ended
            file = self.path / record.file
            if file.is_file() and file.stat().st_size == record.record.size:
                self.finished[record.file] = record
        if lines:
            _write_flushed(ledger, "".join(f"{record.to_json()}\n" for record in self.finished.values()).encode())

    def _clear(self, keep: set[str] | None = None) -> None:
        for path in self.path.iterdir():
            if path.name not in (keep or set()):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def finish(self, record: ShardRecord) -> None:
        """Remember a finished shard, on the disk before anything else is written."""
        with (self.path / _LEDGER).open("a", encoding="utf-8") as file:
            file.write(f"{record.to_json()}\n")
            file.flush()
            os.fsync(file.fileno())
        self.finished[record.file] = record

    def drop_notes(self) -> None:
        """Remove what only an unfinished directory needs."""
        (self.path / _LEDGER).unlink(missing_ok=True)
        (self.path / _JOB).unlink(missing_ok=True)


def _write_flushed(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class ShardWriter:
    """Writes shards of one staging folder from one checkpoint."""

    def __init__(self, staging: Staging, checkpoint: Checkpoint, progress: Progress, total: int) -> None:
        self._staging, self._checkpoint = staging, checkpoint
        self._progress, self._total, self._done = progress, total, 0
        self._buffers = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(2)]

    def write(self, file: str, tensors: Mapping[str, Layout]) -> ShardRecord:
        """Write one shard, or take it as it is when an earlier run finished it.

        Raises:
            InputError: reading or writing fails.
        """
        size = sum(layout.size for layout in tensors.values())
        if file not in self._staging.finished:
            try:
                self._staging.finish(self._write(file, tensors))
            except OSError as error:
                message = f"{self._staging.path / file} cannot be written: {one_line(error.strerror or error)}"
                raise InputError(message, "make room or correct the permissions, then run it again with --resume") from error
        else:
            self._done += size
        self._progress(self._done, self._total)
        return self._staging.finished[file]

    def _write(self, file: str, tensors: Mapping[str, Layout]) -> ShardRecord:
        header, order = make_header({name: (t.dtype, t.shape) for name, t in tensors.items()}, {"format": "pt"})
        digest, size, ledger = hashlib.sha256(header), len(header), dict[str, list[str]]()
        temporary = self._staging.path / f"{file}.part"
        with temporary.open("wb", buffering=0) as out, ThreadPoolExecutor(1) as hashing:
            _write_fully(out, memoryview(header))
            for name in order:
                ledger[name] = []
                for piece in tensors[name].pieces:
                    own = hashlib.sha256()
                    hashed: Future[None] | None = None
                    for chunk in self._chunks(piece, tensors[name].dtype):
                        before, hashed = hashed, hashing.submit(_update, (own, digest), chunk)
                        _write_fully(out, chunk)
                        if before is not None:
                            before.result()  # its buffer is the next to be filled
                        size += len(chunk)
                        self._done += len(chunk)
                        self._progress(self._done, self._total)
                    if hashed is not None:
                        hashed.result()
                    ledger[name].append(own.hexdigest())
            os.fsync(out.fileno())
        temporary.rename(self._staging.path / file)
        return ShardRecord(file, FileRecord(digest.hexdigest(), size), ledger)

    def _chunks(self, piece: Piece, dtype: torch.dtype) -> Iterator[memoryview]:
        entry = self._checkpoint.entries[piece.source]
        if piece.columns:
            yield from self._transposed(piece, dtype)
            return
        width = entry.dtype.itemsize
        end = piece.start + piece.count
        step = CHUNK_BYTES // max(width, dtype.itemsize)
        for turn, start in enumerate(range(piece.start, end, step)):
            buffer = self._buffers[turn % 2][: min(step, end - start) * width]
            for chunk in self._checkpoint.chunks(piece.source, start * width, len(buffer), buffer):
                yield chunk if entry.dtype == dtype else _cast(chunk, entry.dtype, dtype)

    def _transposed(self, piece: Piece, dtype: torch.dtype) -> Iterator[memoryview]:
        entry = self._checkpoint.entries[piece.source]
        data = self._checkpoint.load(piece.source).view(-1)[piece.start : piece.start + piece.count]
        matrix = data.view(-1, piece.columns).t().to(dtype).contiguous()
        assert entry.size >= data.numel()
        raw = bytes_of(matrix)
        for place in range(0, len(raw), CHUNK_BYTES):
            yield raw[place : place + CHUNK_BYTES]


def _update(digests: tuple[Any, ...], chunk: memoryview) -> None:
    for digest in digests:
        digest.update(chunk)


def _cast(chunk: memoryview, source: torch.dtype, target: torch.dtype) -> memoryview:
    values = torch.frombuffer(chunk, dtype=source).to(target)
    return bytes_of(values)


def _write_fully(out: Any, data: memoryview) -> None:
    while len(data):
        data = data[out.write(data) :]
