"""The hidden folder in which a directory is made: whose it is, which of its shards are finished, what a later run takes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_convert.emit.manifest import FileRecord
from te_convert.emit.tensors_file import file_record
from te_convert.emit.user_code import one_line
from te_convert.errors import InputError

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
