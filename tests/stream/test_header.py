"""Headers and indexes as a stranger might write them: one clear line with the file, never a crash or a large allocation."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from te_convert.errors import InputError
from te_convert.stream.checkpoint import open_checkpoint
from te_convert.stream.header import read_header


def raw(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def entry(start: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [1] if shape is None else shape, "data_offsets": [start, end]}


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    values = {
        "b": torch.randn(3, 2),
        "a": torch.ones(5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.0),
    }
    save_file(values, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    try:
        assert all(torch.equal(checkpoint.load(name), value) for name, value in values.items())
        part = b"".join(map(bytes, checkpoint.chunks("b", 4, 8, memoryview(bytearray(3)))))
        assert part == values["b"].numpy().tobytes()[4:12]
    finally:
        checkpoint.close()


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        (b"{}", b"", 2**62, "says that its header has 4611686018427387904 bytes"),
        (b"{}", b"", 50, "says that its header has 50 bytes"),
        (b"\xff\xfe{}", b"", None, "not UTF-8 at offset 8"),
        (b"[1, 2]", b"", None, "no JSON object"),
        (b"{", b"", None, "not readable JSON"),
        (b"[" * 100_000, b"", None, "not readable JSON"),
        (b'{"a": 1, "a": 2}', b"", None, "a key stands twice"),
        (json.dumps({"a": entry(0, 8)}).encode(), b"x" * 8, None, "a should have 4 bytes and has 8"),
        (json.dumps({"a": entry(0, 4), "b": entry(2, 6)}).encode(), b"x" * 6, None, "b overlaps"),
        (json.dumps({"a": entry(0, 4), "b": entry(6, 10)}).encode(), b"x" * 10, None, "b leaves a gap"),
        (json.dumps({"a": entry(0, 4)}).encode(), b"xx", None, "is truncated"),
        (json.dumps({"a": entry(0, 4)}).encode(), b"x" * 9, None, "bytes after its last tensor"),
        (json.dumps({"a": entry(-4, 0)}).encode(), b"", None, "sizes that are no counts"),
        (json.dumps({"a": entry(0, 4, [True])}).encode(), b"x" * 4, None, "sizes that are no counts"),
        (json.dumps({"a": entry(0, 4, [2**40, 2**40])}).encode(), b"x" * 4, None, "a should have"),
        (json.dumps({"a": entry(0, 4, dtype="F7")}).encode(), b"x" * 4, None, "a has the dtype F7, which is not known"),
        (b'{"\\ud800": 1}', b"", None, "no Unicode text"),
        (json.dumps({"a": entry(0, 4, [1] * 70)}).encode(), b"x" * 4, None, "sizes that are no counts"),
        (json.dumps({"a": [0, 4]}).encode(), b"x" * 4, None, "entry for a is damaged"),
    ],
)
def test_hostile_headers(header: bytes, data: bytes, length: int | None, message: str, tmp_path: Path) -> None:
    path = raw(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(InputError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("size", [0, 3, 8])
def test_files_that_are_too_short(size: int, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\x01" * size)
    with pytest.raises(InputError):
        read_header(tmp_path / "f")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=60) | _JSON.map(lambda value: json.dumps({"a": value}).encode()),
    length=st.none() | st.integers(0, 2**64 - 1),
)
def test_any_bytes_are_a_header_or_an_input_error(data: bytes, length: int | None, tmp_path: Path) -> None:
    path = raw(tmp_path / "f", data, length=length)
    problem, found = "", {}
    try:
        found = read_header(path)
    except InputError as error:
        problem = str(error)
    assert problem or isinstance(found, dict)
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../model.safetensors"}, "not a file beside it"),
        ({"a": "/etc/passwd"}, "not a file beside it"),
        ({"a": "sub/model.safetensors"}, "not a file beside it"),
        ({"a": 3}, "not a file beside it"),
        ({"a": "none.safetensors"}, "does not exist"),
        ({"b": "one.safetensors"}, "has no tensor b"),
        ({}, "no model"),
        ([1], "not an index"),
    ],
)
def test_indexes_that_point_elsewhere(weight_map: Any, message: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if weight_map == {}:
        checkpoint = open_checkpoint(tmp_path)
        assert checkpoint.entries == {}
        return
    with pytest.raises(InputError, match=message):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_files_and_a_tensor_that_the_index_lacks(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.ones(2), name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "two": "two.safetensors"}}))
    with pytest.raises(InputError, match=r"a stands in one\.safetensors and in two\.safetensors"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(InputError, match="holds one, which the index does not list"):
        open_checkpoint(tmp_path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(200)
    try:
        with pytest.raises(InputError, match=r"ends at offset 200, in the middle of a tensor"):
            checkpoint.load("a")
    finally:
        checkpoint.close()
