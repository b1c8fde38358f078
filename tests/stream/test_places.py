"""Where a checkpoint lies and where the result goes: links, one inside the other, folders that cannot be written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import te_convert
from te_convert.cli.main import main
from te_convert.errors import InputError
from tests.stream.stream_samples import tensors, write

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint "hf" and its conversion "te"; tests only read it."""
    folder = tmp_path_factory.mktemp("made")
    write("llama", folder / "hf")
    te_convert.convert_checkpoint(folder / "hf", folder / "te", verify=False)
    return folder


def cached(made: Path, root: Path) -> Path:
    """The checkpoint as Hugging Face's cache holds it: every file of the snapshot is a link to a blob in another folder."""
    snapshot, blobs = root / "snapshots" / "abc123", root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted((made / "hf").iterdir())):
        (blobs / f"{number:064x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{number:064x}"))
    return snapshot


def same(folder: Path, other: Path) -> bool:
    found, expected = tensors(folder), tensors(other)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def convert(source: Path, out: Path, **options: Any) -> None:
    te_convert.convert_checkpoint(source, out, verify=False, **options)


def test_a_snapshot_of_the_cache(made: Path, tmp_path: Path) -> None:
    snapshot = cached(made, tmp_path / "models--a--b")
    before = listing(tmp_path)
    convert(snapshot, tmp_path / "te")
    assert same(tmp_path / "te", made / "te")
    assert not any(path.is_symlink() for path in (tmp_path / "te").rglob("*"))
    te_convert.export(tmp_path / "te", tmp_path / "back")
    assert same(tmp_path / "back", made / "hf")
    after = listing(tmp_path)
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("place", ["blobs", "."])
def test_the_blobs_of_a_snapshot_are_not_replaced(place: str, made: Path, tmp_path: Path) -> None:
    snapshot = cached(made, tmp_path / "models--a--b")
    before = listing(tmp_path)
    with pytest.raises(InputError, match="holds the model's source"):
        convert(snapshot, tmp_path / "models--a--b" / place, force=True)
    assert listing(tmp_path) == before


def test_a_download_that_was_cut_short(made: Path, tmp_path: Path) -> None:
    snapshot = cached(made, tmp_path / "models--a--b")
    shard = sorted(snapshot.glob("*.safetensors"))[1]
    shard.resolve().unlink()
    result = CliRunner().invoke(main, [str(snapshot), "--out", str(tmp_path / "te"), "--stream"])
    assert result.exit_code == 2
    assert f"{shard.name} does not exist" in "".join(result.stderr.split("\n"))
    assert CliRunner().invoke(main, [str(snapshot), "--out", str(tmp_path / "te")]).exit_code == 2
    assert not (tmp_path / "te").exists()


def test_a_link_to_the_checkpoint_is_followed_and_one_in_place_of_out_is_not(made: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").symlink_to(made / "hf")
    convert(tmp_path / "hf", tmp_path / "te")
    assert same(tmp_path / "te", made / "te")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    for force in (False, True):
        with pytest.raises(InputError, match="is a symbolic link"):
            convert(made / "hf", tmp_path / "out", force=force)
        with pytest.raises(InputError, match="is a symbolic link"):
            te_convert.export(made / "te", tmp_path / "out", force=force)
    (tmp_path / "dead").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is a symbolic link"):
        convert(made / "hf", tmp_path / "dead")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_link_to_a_device_is_no_checkpoint(made: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_bytes((made / "hf" / "config.json").read_bytes())
    (tmp_path / "hf" / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(InputError, match=r"has no model\.safetensors"):
        convert(tmp_path / "hf", tmp_path / "te")


def test_out_inside_the_checkpoint(made: Path, tmp_path: Path) -> None:
    write("llama", tmp_path / "hf")
    before = listing(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "hf" / "te")
    assert same(tmp_path / "hf" / "te", made / "te")
    te_convert.export(tmp_path / "hf" / "te", tmp_path / "hf" / "te" / "back")
    assert same(tmp_path / "hf" / "te" / "back", made / "hf")
    after = listing(tmp_path / "hf")
    assert {name: after[name] for name in before} == before
    assert te_convert.load(tmp_path / "hf" / "te") is not None


@pytest.mark.parametrize("inside", ["hf", "models/hf"])
def test_the_checkpoint_inside_out(inside: str, tmp_path: Path) -> None:
    write("llama", tmp_path / "all" / inside)
    before = listing(tmp_path)
    for out in (tmp_path / "all", tmp_path / "all" / inside):
        with pytest.raises(InputError, match="holds the model's source"):
            convert(tmp_path / "all" / inside, out, force=True)
    assert listing(tmp_path) == before


def test_the_converted_directory_inside_out(tmp_path: Path) -> None:
    """--force would remove what is exported once the export has its name."""
    write("llama", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "all" / "te")
    (tmp_path / "link").symlink_to(tmp_path / "all" / "te")
    before = listing(tmp_path / "all")
    for directory in (tmp_path / "all" / "te", tmp_path / "link"):
        with pytest.raises(InputError, match="all holds the converted directory itself"):
            te_convert.export(directory, tmp_path / "all", force=True)
        with pytest.raises(InputError, match="te is the converted directory itself"):
            te_convert.export(directory, tmp_path / "all" / "te", force=True)
    assert listing(tmp_path / "all") == before


def test_a_parent_that_cannot_be_written(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda place, _: Path(place) != tmp_path)
    with pytest.raises(InputError, match=f"cannot be written: no permission in {tmp_path}"):
        convert(made / "hf", tmp_path / "te")
    with pytest.raises(InputError, match=f"cannot be written: no permission in {tmp_path}"):
        te_convert.export(made / "te", tmp_path / "back")
    assert [*tmp_path.iterdir()] == []


def test_a_parent_that_only_claims_to_be_writable(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only mount: the system says so when the folder is made."""
    mkdir = Path.mkdir

    def read_only(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.is_relative_to(tmp_path):
            raise OSError(30, "Read-only file system", str(self))
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(InputError, match=r"\.te\.partial cannot be written: Read-only file system"):
        convert(made / "hf", tmp_path / "te")
    with pytest.raises(InputError, match=r"\.back\.partial cannot be written: Read-only file system"):
        te_convert.export(made / "te", tmp_path / "back")
    assert [*tmp_path.iterdir()] == []
