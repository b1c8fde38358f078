"""Writing safetensors files tensor by tensor, with digest and fsync in the same pass.

The layout is that of the safetensors format: eight bytes with the header's length, a JSON header, the tensors' bytes.  It is
written here because a file's digest is needed anyway, and so that no tensor is copied unless its memory is not contiguous.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from te_convert.emit.manifest import FileRecord
from te_convert.errors import InputError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
BUFFERS = "buffers.safetensors"  # what state_dict() leaves out: non-persistent buffers, constants of replacements
_COMPLEX = {torch.complex64: "complex64", torch.complex128: "complex128"}
_OPTIONAL = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
}
_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    **{getattr(torch, name): code for code, name in _OPTIONAL.items() if hasattr(torch, name)},
}
DTYPES: dict[str, torch.dtype] = {code: dtype for dtype, code in _CODES.items()}
"""The format's name of a dtype → the dtype."""


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Write a small file and flush it to the disk."""
    return _write(path, [data])


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    """Write tensors as a safetensors file; complex ones as pairs of reals, named in the file's metadata.

    Raises:
        InputError: a dtype that safetensors does not have.
    """
    marks = {name: _COMPLEX[tensor.dtype] for name, tensor in tensors.items() if tensor.dtype in _COMPLEX}
    views = {name: torch.view_as_real(tensor.resolve_conj()) if name in marks else tensor for name, tensor in tensors.items()}
    metadata = {"format": "pt", **({"complex": json.dumps(marks)} if marks else {})}
    header, order = make_header({name: (view.dtype, tuple(view.shape)) for name, view in views.items()}, metadata)
    return _write(path, _chunks(header, (views[name] for name in order)))


def make_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """The first bytes of a file with these tensors, and the order in which the tensors' bytes follow.

    Raises:
        InputError: a dtype that safetensors does not have.
    """
    # Widest elements first, so that each tensor starts at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in order:
        dtype, shape = tensors[name]
        end = offset + math.prod(shape) * dtype.itemsize
        if dtype not in _CODES:
            raise InputError(f"{name} has dtype {dtype}, which safetensors cannot hold", "convert it to another dtype")
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, order


def read_tensors(path: Path) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the tensors of a file one by one, on the CPU."""
    with safe_open(path, framework="pt", device="cpu") as file:
        marks = json.loads((file.metadata() or {}).get("complex", "{}"))
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            yield name, torch.view_as_complex(tensor) if name in marks else tensor


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Size of a tensor's elements in bytes."""
    return tensor.numel() * tensor.element_size()


def plan_shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Names per file, in order: a file is closed when the next tensor would make it larger than ``shard_bytes``.

    Args:
        sizes: tensor → bytes.
        shard_bytes: most bytes of a file; a larger tensor has one of its own.
    """
    shards: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if shards[-1] and total + size > shard_bytes:
            shards.append([])
            total = 0
        shards[-1].append(name)
        total += size
    return shards


def name_shards(shards: list[list[str]]) -> list[tuple[str, list[str]]]:
    """(file, its tensors), with the names that Transformers gives to shards."""
    if len(shards) == 1:
        return [(WEIGHTS, shards[0])]
    return [(f"model-{number:05d}-of-{len(shards):05d}.safetensors", names) for number, names in enumerate(shards, start=1)]


def _chunks(header: bytes, tensors: Iterable[torch.Tensor]) -> Iterable[bytes | memoryview]:
    yield header
    for tensor in tensors:
        plain = tensor.detach().cpu().resolve_neg().contiguous()
        if plain.numel():
            yield plain.reshape(-1).view(torch.uint8).numpy().data


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(digest.hexdigest(), size)


def file_record(path: Path) -> FileRecord:
    """Digest and size of a file on disk."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(digest.hexdigest(), size)
