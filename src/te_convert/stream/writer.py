"""Writing safetensors shards from pieces: bounded memory, digests in the same pass, finished shards kept for a later run."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from te_convert.emit.manifest import FileRecord
from te_convert.emit.tensors_file import file_record, make_header
from te_convert.emit.user_code import one_line
from te_convert.errors import InputError
from te_convert.replacements.specs import dtype_name
from te_convert.stream.checkpoint import CHUNK_BYTES, Checkpoint, bytes_of
from te_convert.stream.pieces import Layout, Piece

Progress = Callable[[int, int], None]
_LEDGER = "ledger.jsonl"
_JOB = "job.json"
_FILES = "files"
_NEW = ".new"
MAKE_ROOM = "make room or correct the permissions, then run it again with --resume"


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
    """The hidden sibling ``.NAME.partial`` in which a directory is made: its files, and notes about the job and finished shards.

    The notes lie beside the files, so that the files can get their name in one step and a crash at any moment loses no shard.

    Attributes:
        path: the folder that becomes the target.
        finished: shards that are on the disk as they were recorded.
    """

    def __init__(self, target: Path, job: Mapping[str, Any], resume: bool) -> None:
        self.target = target
        self.folder = target.with_name(f".{target.name}.partial")
        self.path = self.folder / _FILES
        self.finished: dict[str, ShardRecord] = {}
        self._job = json.dumps(job, sort_keys=True, indent=1)
        self._resume = resume

    @contextmanager
    def locked(self) -> Iterator[Staging]:
        """The folder, for this process alone; it stays after an exception when a shard is finished, and goes on success.

        Raises:
            InputError: another process is writing it, it is not te_convert's, it cannot be written, or ``resume`` and it belongs
                to another job.
        """
        try:
            with self._lock():
                self._start()
                try:
                    yield self
                except BaseException:
                    if not self.finished:
                        self._remove()
                    raise
                self._remove()
        except OSError as error:
            where = error.filename if isinstance(error.filename, str) else self.target
            raise InputError(f"{where} cannot be written: {one_line(error.strerror or error)}", MAKE_ROOM) from error

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        known = {_FILES, *(name + end for name in (_JOB, _LEDGER) for end in ("", _NEW))}
        if self.folder.is_symlink() or any(path.name not in known for path in self.folder.iterdir()):
            raise InputError(f"{self.folder} is in the way and was not written by te_convert", "move it, or choose another --out")
        busy = InputError(f"another process is writing {self.folder}", "wait for it, or choose another --out")
        lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process that held it may have removed the folder in the meantime.
            if not self.folder.is_dir() or not os.path.samestat(os.fstat(lock), self.folder.stat()):
                raise busy
            yield
        except BlockingIOError:
            raise busy from None
        finally:
            os.close(lock)

    def _start(self) -> None:
        job = self.folder / _JOB
        known = job.read_text(encoding="utf-8") if job.is_file() else None
        if self._resume and known is not None and known != self._job:
            raise InputError(
                f"{self.folder} holds an unfinished conversion of other files or with other options",
                "give the same ones, or leave --resume out to start over",
            )
        if self._resume and known is not None:
            self._read_ledger()
        if not self.finished:
            (self.folder / _LEDGER).unlink(missing_ok=True)
        self.path.mkdir(exist_ok=True)
        _clear(self.path, self.finished)
        _write_flushed(job, self._job.encode())

    def _read_ledger(self) -> None:
        """The shards of an earlier run whose bytes are still those that it wrote."""
        ledger = self.folder / _LEDGER
        for line in ledger.read_text(encoding="utf-8", errors="replace").splitlines() if ledger.is_file() else []:
            try:
                record = ShardRecord.from_json(line)
            except (ValueError, KeyError, TypeError):
                break  # the line that was being written when the process ended
            file = self.path / record.file
            if file.is_file() and file.stat().st_size == record.record.size and file_record(file) == record.record:
                self.finished[record.file] = record
        _write_flushed(ledger, "".join(f"{record.to_json()}\n" for record in self.finished.values()).encode())

    def _remove(self) -> None:
        _clear(self.folder, ())
        self.folder.rmdir()

    def check_room(self, size: int) -> None:
        """Whether the disk can hold ``size`` bytes, less the finished shards: better before hours of work than after.

        Raises:
            InputError: it cannot.
        """
        needed = size - sum(record.record.size for record in self.finished.values())
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            message = f"{self.target} needs {needed / 1e9:.1f} GB more, and the disk has {free / 1e9:.1f} GB free"
            raise InputError(message, MAKE_ROOM)

    def finish(self, record: ShardRecord) -> None:
        """Remember a finished shard, on the disk before anything else is written."""
        with (self.folder / _LEDGER).open("a", encoding="utf-8") as file:
            file.write(f"{record.to_json()}\n")
            file.flush()
            os.fsync(file.fileno())
        self.finished[record.file] = record


def _clear(folder: Path, keep: Collection[str]) -> None:
    for path in folder.iterdir():
        if path.name not in keep:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _write_flushed(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + _NEW)
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
        staging.check_room(total)
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
                raise InputError(message, MAKE_ROOM) from error
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
                yield chunk if entry.dtype == dtype else self._cast(piece, chunk, dtype)

    def _cast(self, piece: Piece, chunk: memoryview, dtype: torch.dtype) -> memoryview:
        return bytes_of(cast(torch.frombuffer(chunk, dtype=self._checkpoint.entries[piece.source].dtype), dtype, piece.source))

    def _transposed(self, piece: Piece, dtype: torch.dtype) -> Iterator[memoryview]:
        entry = self._checkpoint.entries[piece.source]
        data = self._checkpoint.load(piece.source).view(-1)[piece.start : piece.start + piece.count]
        matrix = data.view(-1, piece.columns).t()
        matrix = (matrix if entry.dtype == dtype else cast(matrix, dtype, piece.source)).contiguous()
        assert entry.size >= data.numel()
        raw = bytes_of(matrix)
        for place in range(0, len(raw), CHUNK_BYTES):
            yield raw[place : place + CHUNK_BYTES]


def _update(digests: tuple[Any, ...], chunk: memoryview) -> None:
    for digest in digests:
        digest.update(chunk)


def cast(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Values in another dtype.

    Raises:
        InputError: a finite value has no finite one there.
    """
    found = values.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(values.dtype).max and bool((found.isfinite() != values.isfinite()).any()):
        raise InputError(f"{one_line(name, 100)} has values too large for {dtype_name(dtype)}", "use --dtype bfloat16, or none")
    return found


def _write_fully(out: Any, data: memoryview) -> None:
    while len(data):
        data = data[out.write(data) :]
