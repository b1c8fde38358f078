"""A checkpoint on disk as named tensors of which any part can be read: safetensors (one file or an index), or torch pickles."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from te_convert.emit.model_source import is_safe_name
from te_convert.emit.user_code import one_line
from te_convert.emit.weights_file import read_pickle
from te_convert.errors import InputError
from te_convert.stream.header import Entry, read_header

SAFE = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
CHUNK_BYTES = 2 << 20


@dataclass
class Checkpoint:
    """Tensors by name.

    Attributes:
        entries: what each is, and for safetensors where.
        pickled: the memory-mapped tensors of torch files.
        files: every file that belongs to it.
    """

    entries: dict[str, Entry]
    files: tuple[Path, ...]
    pickled: dict[str, torch.Tensor] = field(default_factory=dict)
    _open: dict[Path, BinaryIO] = field(default_factory=dict)
    _rows: tuple[str, memoryview] = ("", memoryview(b""))
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.size for entry in self.entries.values())

    def close(self) -> None:
        """Close its files."""
        self._stack.close()
        self._open.clear()
        self._rows = ("", memoryview(b""))

    def chunks(self, name: str, start: int, count: int, buffer: memoryview) -> Iterator[memoryview]:
        """Bytes [start, start + count) of a tensor, a part at a time; each is valid until the next is asked for.

        Raises:
            InputError: the disk fails, or the file has become shorter; with file and offset.
        """
        if name in self.pickled:
            data = self._pickled(name)
            for place in range(start, start + count, len(buffer)):
                yield data[place : min(place + len(buffer), start + count)]
            return
        entry = self.entries[name]
        file = self._file(entry.path)
        place, end = entry.start + start, entry.start + start + count
        while place < end:
            part = buffer[: min(len(buffer), end - place)]
            _fill(file, place, part, entry.path)
            yield part
            place += len(part)

    def load(self, name: str) -> torch.Tensor:
        """A whole tensor in memory."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        fill(bytes_of(tensor), self.chunks(name, 0, entry.size, memoryview(bytearray(CHUNK_BYTES))))
        return tensor

    def _pickled(self, name: str) -> memoryview:
        """The bytes of a torch file's tensor in row-major order; one that was saved otherwise is copied once, not for each part."""
        if self.pickled[name].is_contiguous():
            return bytes_of(self.pickled[name])
        if self._rows[0] != name:
            self._rows = (name, bytes_of(self.pickled[name]))
        return self._rows[1]

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._open:
            try:
                self._open[path] = self._stack.enter_context(path.open("rb", buffering=0))
            except OSError as error:
                raise InputError(f"{path} cannot be read: {one_line(error.strerror or error)}", "check its permissions") from error
        return self._open[path]


def _fill(file: BinaryIO, place: int, part: memoryview, path: Path) -> None:
    done = 0
    try:
        while done < len(part):
            got = os.preadv(file.fileno(), [part[done:]], place + done)
            if not got:
                raise InputError(f"{path} ends at offset {place + done}, in the middle of a tensor", "download or save it again")
            done += got
    except OSError as error:
        raise InputError(f"{path} cannot be read at offset {place + done}: {one_line(error.strerror or error)}", _DISK) from error


_DISK = "check the disk; --resume goes on from the last finished shard"


def fill(target: memoryview, parts: Iterable[memoryview]) -> None:
    """Copy parts one after the other into ``target``; what it has no more room for is left out."""
    place = 0
    for part in parts:
        part = part[: len(target) - place]
        target[place : place + len(part)] = part
        place += len(part)
        if place == len(target):
            return


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor in row-major order, without a copy when it is laid out so."""
    raw: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return memoryview(raw)


def open_checkpoint(directory: Path) -> Checkpoint:
    """The tensors of a Transformers directory; headers are read and checked, tensors are not.

    Raises:
        InputError: no weights, an index that names files elsewhere or that do not exist, keys of the index and the files that
            differ, a tensor in two files, a damaged file, or a pickle that holds more than tensors.
    """
    for name, read in ((SAFE, _read_safe), (PICKLED, _read_pickled)):
        if (directory / name[0]).is_file():
            return read([directory / name[0]], None)
        if (directory / name[1]).is_file():
            weight_map = _read_index(directory / name[1])
            return read([directory / file for file in dict.fromkeys(weight_map.values())], weight_map)
    raise InputError(f"{directory} has no {SAFE[0]}, no {SAFE[1]} and no {PICKLED[0]}", "download the weights")


def _read_safe(paths: list[Path], weight_map: Mapping[str, str] | None) -> Checkpoint:
    entries: dict[str, Entry] = {}
    for path in paths:
        for name, entry in read_header(path).items():
            if name in entries:
                raise InputError(
                    f"{one_line(name, 100)} stands in {entries[name].path.name} and in {path.name}", "download both again"
                )
            entries[name] = entry
    _check_index(entries, weight_map)
    return Checkpoint(entries, tuple(paths))


def _read_pickled(paths: list[Path], weight_map: Mapping[str, str] | None) -> Checkpoint:
    entries: dict[str, Entry] = {}
    pickled: dict[str, torch.Tensor] = {}
    for path in paths:
        if not path.is_file():
            raise InputError(f"{path} does not exist", "download every shard")
        for name, tensor in read_pickle(path, mmap=True).items():
            pickled[name] = tensor
            entries[name] = Entry(path, tensor.dtype, tuple(tensor.shape), 0, tensor.numel() * tensor.element_size())
    _check_index(entries, weight_map)
    return Checkpoint(entries, tuple(paths), pickled)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = dict(weight_map)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is not an index of shards: {one_line(error)}", 'it needs {"weight_map": {key: file}}') from None
    for name in names.values():
        if not is_safe_name(name) or "/" in name:
            raise InputError(f"{path} names {name!r}, which is not a file beside it", "do not use it, or correct the index")
    return names


def _check_index(entries: Mapping[str, Entry], weight_map: Mapping[str, str] | None) -> None:
    if weight_map is None:
        return
    for key, file in weight_map.items():
        if key not in entries:
            raise InputError(f"{file} has no tensor {one_line(key, 100)}, which the index says it has", "download it again")
        if entries[key].path.name != file:
            raise InputError(f"{one_line(key, 100)} is in {entries[key].path.name}; the index says {file}", "download both again")
    for key in entries:
        if key not in weight_map:
            raise InputError(
                f"{entries[key].path.name} holds {one_line(key, 100)}, which the index does not list", "correct the index"
            )
