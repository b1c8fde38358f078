"""Writing safetensors shards from pieces: bounded memory, digests in the same pass, finished shards kept for a later run."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from te_convert.emit.manifest import FileRecord
from te_convert.emit.tensors_file import make_header
from te_convert.emit.user_code import one_line
from te_convert.errors import InputError
from te_convert.replacements.specs import dtype_name
from te_convert.stream.checkpoint import CHUNK_BYTES, Checkpoint, bytes_of
from te_convert.stream.pieces import Layout, Piece
from te_convert.stream.staging import MAKE_ROOM, Progress, ShardRecord, Staging

_BUFFERS = 4
_WRITE_BYTES = CHUNK_BYTES // 4
"""Writes of 8 MB and more were measured to take several times as long on Linux: the page cache then looks for large folios."""
_FLUSH_BYTES = 64 << 20
"""So many bytes are handed to the disk at a time while the next are read, instead of all of them at the end."""
_flush = getattr(os, "fdatasync", os.fsync)


class ShardWriter:
    """Writes shards of one staging folder from one checkpoint."""

    def __init__(self, staging: Staging, checkpoint: Checkpoint, progress: Progress, total: int) -> None:
        self._staging, self._checkpoint = staging, checkpoint
        self._progress, self._total, self._done = progress, total, 0
        staging.check_room(total)
        self._buffers = cycle([memoryview(bytearray(CHUNK_BYTES)) for _ in range(_BUFFERS)])

    def write(self, shards: Sequence[tuple[str, list[str]]], tensors: Mapping[str, Layout]) -> list[ShardRecord]:
        """Write shards in their order; those that an earlier run finished are taken as they are.

        While a shard is read, the disk takes the one before it.

        Args:
            shards: (file, names of its tensors).
            tensors: how each tensor is made.

        Raises:
            InputError: reading or writing fails.
        """
        sealed: Future[None] | None = None
        with ThreadPoolExecutor(1) as disk:
            for file, names in shards:
                wanted = {name: tensors[name] for name in names}
                if file in self._staging.finished:
                    self._advance(sum(layout.size for layout in wanted.values()))
                    continue
                before, sealed = sealed, disk.submit(self._seal, self._write(file, wanted, disk))
                if before is not None:
                    before.result()
            if sealed is not None:
                sealed.result()
        return [self._staging.finished[file] for file, _ in shards]

    def _write(self, file: str, tensors: Mapping[str, Layout], disk: ThreadPoolExecutor) -> _Written:
        header, order = make_header({name: (t.dtype, t.shape) for name, t in tensors.items()}, {"format": "pt"})
        size = len(header) + sum(layout.size for layout in tensors.values())
        path = self._staging.path / f"{file}.part"
        digests: dict[str, list[Future[str]]] = {}
        with self._named(file), path.open("wb", buffering=0) as out, ExitStack() as stack:
            hashing = stack.enter_context(closing(_Hashing(header)))
            flushing = stack.enter_context(closing(_Flushing(out.fileno(), disk)))
            _write_fully(out, memoryview(header))
            for name in order:
                digests[name] = []
                for piece in tensors[name].pieces:
                    own = hashlib.sha256()
                    for chunk in self._chunks(piece, tensors[name].dtype):
                        hashing.add(own, chunk)
                        _write_fully(out, chunk)
                        flushing.add(len(chunk))
                        self._advance(len(chunk))
                    digests[name].append(hashing.result(own))
            flushing.check()
            ledger = {name: [digest.result() for digest in each] for name, each in digests.items()}
            # The same open file is flushed at last: an error of the disk in between is told to those who had it open.
            return _Written(path, os.dup(out.fileno()), ShardRecord(file, FileRecord(hashing.whole(), size), ledger))

    def _seal(self, written: _Written) -> None:
        """A shard gets its name when its bytes are on the disk, and is remembered as finished when it has it."""
        with self._named(written.record.file):
            try:
                os.fsync(written.handle)
            finally:
                os.close(written.handle)
            written.path.rename(written.path.with_suffix(""))
            self._staging.finish(written.record)

    @contextmanager
    def _named(self, file: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"{self._staging.path / file} cannot be written: {one_line(error.strerror or error)}"
            raise InputError(message, MAKE_ROOM) from error

    def _advance(self, size: int) -> None:
        self._done += size
        self._progress(self._done, self._total)

    def _chunks(self, piece: Piece, dtype: torch.dtype) -> Iterator[memoryview]:
        """The piece's bytes in ``dtype``; each part is valid until _BUFFERS more were asked for."""
        entry = self._checkpoint.entries[piece.source]
        if piece.columns:
            yield from self._transposed(piece, dtype)
            return
        width = entry.dtype.itemsize
        end = piece.start + piece.count
        step = CHUNK_BYTES // max(width, dtype.itemsize)
        for start in range(piece.start, end, step):
            buffer = next(self._buffers)[: min(step, end - start) * width]
            for chunk in self._checkpoint.chunks(piece.source, start * width, len(buffer), buffer):
                yield chunk if entry.dtype == dtype else self._cast(piece, chunk, dtype)

    def _cast(self, piece: Piece, chunk: memoryview, dtype: torch.dtype) -> memoryview:
        return bytes_of(cast(torch.frombuffer(chunk, dtype=self._checkpoint.entries[piece.source].dtype), dtype, piece.source))

    def _transposed(self, piece: Piece, dtype: torch.dtype) -> Iterator[memoryview]:
        entry = self._checkpoint.entries[piece.source]
        run = piece.arranged(self._checkpoint.load(piece.source).view(-1)[piece.start : piece.start + piece.count])
        raw = bytes_of(run if entry.dtype == dtype else cast(run, dtype, piece.source))
        for place in range(0, len(raw), CHUNK_BYTES):
            yield raw[place : place + CHUNK_BYTES]


@dataclass(frozen=True)
class _Written:
    """A shard whose bytes were handed to the system; ``handle`` is its open file."""

    path: Path
    handle: int
    record: ShardRecord


class _Hashing:
    """SHA-256 of a shard and of each of its pieces, each on a thread: digests take longer than everything else here."""

    def __init__(self, header: bytes) -> None:
        self._whole = hashlib.sha256(header)
        self._threads = (ThreadPoolExecutor(1), ThreadPoolExecutor(1))
        self._pending: deque[tuple[Future[None], Future[None]]] = deque()

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.shutdown()

    def add(self, own: Any, chunk: memoryview) -> None:
        """Take a chunk into the shard's digest and into ``own``; its memory is free when _BUFFERS - 1 more were added."""
        while len(self._pending) >= _BUFFERS - 1:
            self._wait()
        whole, piece = self._threads
        self._pending.append((whole.submit(self._whole.update, chunk), piece.submit(own.update, chunk)))

    def result(self, own: Any) -> Future[str]:
        """The digest of a piece all of whose chunks were added."""
        return self._threads[1].submit(own.hexdigest)

    def whole(self) -> str:
        """The shard's digest."""
        while self._pending:
            self._wait()
        return str(self._whole.hexdigest())

    def _wait(self) -> None:
        for future in self._pending.popleft():
            future.result()


class _Flushing:
    """Keeps the disk at work while a file is written."""

    def __init__(self, handle: int, disk: ThreadPoolExecutor) -> None:
        self._handle, self._disk = handle, disk
        self._size = 0
        self._running: list[Future[None]] = []

    def add(self, size: int) -> None:
        """So many bytes more were written."""
        self._size += size
        if self._size >= _FLUSH_BYTES and all(each.done() for each in self._running):
            self.check()
            self._size, self._running = 0, [self._disk.submit(_flush, self._handle)]

    def check(self) -> None:
        """Wait until the disk has what it was given.

        Raises:
            OSError: it failed.
        """
        for each in self._running:
            each.result()

    def close(self) -> None:
        """The file can be closed."""
        wait(self._running)


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
        data = data[out.write(data[:_WRITE_BYTES]) :]
