"""The header of a safetensors file, checked as strictly as for a file from a stranger, and its tensors' places in the file."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from te_convert.emit.tensors_file import DTYPES
from te_convert.emit.user_code import one_line
from te_convert.errors import InputError

MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit."""
_AGAIN = "download or save it again"
_DTYPE = "save it in float32, bfloat16 or float16"
_MOST = 2**63 - 1
_MOST_DIMS = 64  # torch's own limit


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: dtype, shape, and where its bytes are.

    Attributes:
        start: offset of its first byte in the file.
        size: bytes.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


def read_header(path: Path) -> dict[str, Entry]:
    """Names and places of the tensors of a safetensors file; nothing but the header is read.

    Raises:
        InputError: not a regular file, a length or offsets that do not fit the file, overlapping tensors, gaps, a header that is
            no JSON object or not UTF-8, an unknown dtype.  The message names the file and, where there is one, the offset.
    """
    if not path.is_file():
        state = "is not a file" if path.exists() else "does not exist"
        raise InputError(f"{path} {state}", "download every shard")
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            length = _header_length(path, file.read(8), total)
            text = file.read(length)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {one_line(error.strerror or error)}", "check the disk and permissions") from error
    entries = {name: _entry(path, name, value, 8 + length) for name, value in _parse(path, text).items()}
    _check_places(path, entries, 8 + length, total)
    return entries


def _header_length(path: Path, first: bytes, total: int) -> int:
    if len(first) < 8:
        raise InputError(f"{path} has {total} bytes, too few for a safetensors file", _AGAIN)
    (length,) = struct.unpack("<Q", first)
    if length > min(total - 8, MAX_HEADER_BYTES):
        raise InputError(f"{path} says that its header has {length} bytes (at offset 0), and the file has {total}", _AGAIN)
    return int(length)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands twice")
        return found

    try:
        data = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} has a header that is not UTF-8 at offset {8 + error.start}", _AGAIN) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} has a header that is not readable JSON: {one_line(error)}", _AGAIN) from None
    if not isinstance(data, dict):
        raise InputError(f"{path} has a header that is no JSON object", _AGAIN)
    data.pop("__metadata__", None)
    for name in data:
        if any("\ud800" <= char <= "\udfff" for char in name):
            raise InputError(f"{path} names a tensor {name!r}, which is no Unicode text", _AGAIN)
    return data


def _entry(path: Path, name: str, value: Any, data_start: int) -> Entry:
    code = value.get("dtype") if isinstance(value, dict) else None
    if isinstance(code, str) and code not in DTYPES:
        raise InputError(f"{path}: {one_line(name, 100)} has the dtype {one_line(code, 20)}, which is not known", _DTYPE)
    try:
        dtype, shape, (start, end) = DTYPES[value["dtype"]], value["shape"], value["data_offsets"]
        numbers = [*shape, start, end]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: the header's entry for {one_line(name, 100)} is damaged: {error!r}", _AGAIN) from None
    if not all(type(number) is int and 0 <= number <= _MOST for number in numbers) or len(numbers) > _MOST_DIMS + 2:
        raise InputError(f"{path}: the header's entry for {one_line(name, 100)} has sizes that are no counts", _AGAIN)
    expected = math.prod(shape) * dtype.itemsize
    if end - start != expected:
        what = f"{name} should have {expected} bytes and has {end - start}"
        raise InputError(f"{path}: {one_line(what)} (at offset {data_start + start})", _AGAIN)
    return Entry(path, dtype, tuple(shape), data_start + start, end - start)


def _check_places(path: Path, entries: dict[str, Entry], start: int, total: int) -> None:
    place = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start != place:
            what = "overlaps the tensor before it" if entry.start < place else "leaves a gap before it"
            raise InputError(f"{path}: {one_line(name, 100)} {what} (at offset {entry.start})", _AGAIN)
        place += entry.size
    if place != total:
        what = "is truncated" if place > total else "has bytes after its last tensor"
        raise InputError(f"{path} {what}: {total} bytes, and its header describes {place}", _AGAIN)
