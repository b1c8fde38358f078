from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from te_convert.emit.model_source import ModelSource
from te_convert.emit.sources import open_source, source_of
from te_convert.emit.tensors_file import read_tensors, write_tensors
from te_convert.emit.write import check_out, write_directory
from te_convert.errors import InputError
from te_convert.plan.model import Plan
from tests.emit.emit_samples import PLAIN, convert_file, plan_for, report_for, write_source


def write(model: nn.Module, source: ModelSource | None, out: Path, **options: Any) -> Path:
    plan = Plan(type(model).__name__, ())
    return write_directory(model, plan, report_for(plan), source, out, **options)


def refuse(model: nn.Module, source: ModelSource | None, out: Path, **options: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        write(model, source, out, **options)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    return caught.value


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_is_written(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    model, opened = convert_file(write_source(tmp_path / "in"), out)
    names = {
        "manifest.json",
        "plan.json",
        "model.safetensors",
        "buffers.safetensors",
        "report.json",
        "report.md",
        "report.html",
    }
    assert set(tree(out)) == {*names, "__init__.py", "source/net.py"}
    manifest = json.loads((out / "manifest.json").read_text())
    for name, data in tree(out).items():
        if name != "manifest.json":
            assert manifest["files"][name] == {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    assert manifest["schema"] == 1
    assert manifest["converted"] is True
    assert manifest["parity"]["status"] == "passed"
    assert manifest["versions"]["torch"] == torch.__version__.partition("+")[0] or manifest["versions"]["torch"]
    assert manifest["ties"] == {"head.weight": "embed.weight"}
    state = model.state_dict()
    saved = load_file(out / "model.safetensors")
    assert set(saved) | {"head.weight"} == set(state)
    assert all(torch.equal(saved[key], state[key]) for key in saved)
    assert "random" in load_file(out / "buffers.safetensors")
    assert (out / "source" / "net.py").read_text() == PLAIN
    assert str(tmp_path) not in "".join((out / name).read_text() for name in ("manifest.json", "plan.json"))
    compile((out / "__init__.py").read_text(), "__init__.py", "exec")
    assert opened.source.files == ("net.py",)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_two_writes_are_equal(tmp_path: Path) -> None:
    path = write_source(tmp_path / "in", PLAIN.replace("torch.rand(8)", "torch.ones(8)"))
    convert_file(path, tmp_path / "a")
    convert_file(path, tmp_path / "b")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_shards(tmp_path: Path) -> None:
    model, _ = convert_file(write_source(tmp_path / "in"), tmp_path / "out", shard_bytes=300)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 1
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert not (tmp_path / "out" / "model.safetensors").exists()
    merged = {key: value for shard in shards for key, value in load_file(tmp_path / "out" / shard).items()}
    assert set(merged) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in merged.values())
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in merged.items())


def test_every_dtype_and_layout(tmp_path: Path) -> None:
    names = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "float8_e4m3fn")
    tensors = {name: torch.tensor([[0.0, 1.0, 2.0]]).to(getattr(torch, name)) for name in names}
    tensors |= {
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "expanded": torch.ones(1, 3).expand(2, 3),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "channels_last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "complex": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    }
    record = write_tensors(tmp_path / "t.safetensors", tensors)
    assert record.size == (tmp_path / "t.safetensors").stat().st_size
    read = dict(read_tensors(tmp_path / "t.safetensors"))
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name].to(torch.complex64), tensor.to(torch.complex64))
    assert set(load_file(tmp_path / "t.safetensors")) == set(tensors)


def test_figures_that_are_not_finite(tmp_path: Path) -> None:
    opened = open_source(str(write_source(tmp_path / "in")))
    report = report_for(Plan("Net", ()))
    report.parity.executed["x"] = math.nan  # type: ignore[assignment]
    write_directory(opened.model, Plan("Net", ()), report, opened.source, tmp_path / "out")
    json.loads((tmp_path / "out" / "manifest.json").read_text(), parse_constant=lambda name: pytest.fail(name))


# ---- where it is written -------------------------------------------------------------------------------------------------


def test_an_existing_directory_needs_force(tmp_path: Path) -> None:
    opened = open_source(str(write_source(tmp_path / "in")))
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.txt").write_text("old")
    error = refuse(opened.model, opened.source, out)
    assert "exists" in str(error)
    assert "--force" in error.hint
    assert tree(out) == {"old.txt": b"old"}
    assert write(opened.model, opened.source, out, force=True) == out
    assert "old.txt" not in tree(out)
    assert "manifest.json" in tree(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_places_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_source(str(write_source(tmp_path / "in")))
    for place in (tmp_path / "in", tmp_path):
        assert "holds the model's source" in str(refuse(opened.model, opened.source, place, force=True))
    (tmp_path / "file").write_text("")
    assert "not a directory" in str(refuse(opened.model, opened.source, tmp_path / "file", force=True))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert "symbolic link" in str(refuse(opened.model, opened.source, tmp_path / "link", force=True))
    assert "cannot be written" in str(refuse(opened.model, opened.source, tmp_path / "file" / "out"))
    (tmp_path / "work" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work" / "here")
    assert "working or the home" in str(refuse(opened.model, opened.source, tmp_path / "work", force=True))
    write(opened.model, opened.source, tmp_path / "in" / "out")
    assert (tmp_path / "in" / "net.py").read_text() == PLAIN


def test_the_place_can_be_checked_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_out(tmp_path / "new" / "out")
    check_out(str(tmp_path), force=True)
    with pytest.raises(InputError, match=r"exists$"):
        check_out(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="no permission in"):
        check_out(tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_source(str(write_source(tmp_path / "in")))

    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    assert "cannot be written: Permission denied" in str(refuse(opened.model, opened.source, tmp_path / "out"))


@pytest.mark.parametrize("when", ["fsync", "first rename", "second rename", "report", "interrupt"])
def test_a_failure_leaves_nothing_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    opened = open_source(str(write_source(tmp_path / "in")))
    out = tmp_path / "made" / "out"
    plan = Plan("Net", ())
    calls = {"rename": 0, "fsync": 0}
    rename, fsync = Path.rename, os.fsync

    def failing_rename(path: Path, target: Path) -> Path:
        calls["rename"] += 1
        if (when, calls["rename"]) in (("first rename", 1), ("second rename", 2)):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    def failing_fsync(handle: int) -> None:
        calls["fsync"] += 1
        if calls["fsync"] == 5 and when in ("fsync", "interrupt"):
            raise OSError(28, "No space left on device") if when == "fsync" else KeyboardInterrupt
        fsync(handle)

    def attempt(force: bool) -> None:
        calls.update(rename=0, fsync=0)
        report = report_for(plan)
        if when == "report":
            monkeypatch.setattr(type(report), "to_html", lambda _: 1 / 0)
        expected = {"report": ZeroDivisionError, "interrupt": KeyboardInterrupt}.get(when, InputError)
        with pytest.raises(expected):
            write_directory(opened.model, plan, report, opened.source, out, force=force)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing_rename)
        patch.setattr(os, "fsync", failing_fsync)
        if when != "second rename":
            attempt(force=False)
            assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    out.mkdir(parents=True)
    (out / "old.txt").write_text("old")
    monkeypatch.setattr(Path, "rename", failing_rename)
    monkeypatch.setattr(os, "fsync", failing_fsync)
    attempt(force=True)
    assert tree(out) == {"old.txt": b"old"}
    assert [path.name for path in out.parent.iterdir()] == ["out"]


# ---- what cannot be written ----------------------------------------------------------------------------------------------


class WithExtra(nn.Linear):
    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Renaming(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "kernel"] = destination.pop(prefix + "weight")


class Adding(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "hidden"] = torch.ones(3)


def source() -> ModelSource:
    return ModelSource("file", "model", "m.py", files=("m.py",), content={"m.py": b""})


@pytest.mark.report("NVIDIA/TransformerEngine#1317", "NVIDIA/TransformerEngine#1335")
def test_extra_state(tmp_path: Path) -> None:
    for index, empty in enumerate((torch.empty(0, dtype=torch.uint8), None)):
        write(WithExtra(empty), source(), tmp_path / f"out{index}")
        assert set(load_file(tmp_path / f"out{index}" / "model.safetensors")) == {"weight", "bias"}
    for full in (torch.ones(3, dtype=torch.uint8), {"amax": 1}, torch.empty(0)):
        assert "_extra_state holds state that is not a plain tensor" in str(refuse(WithExtra(full), source(), tmp_path / "no"))
    assert not (tmp_path / "no").exists()


def test_state_that_is_no_slot(tmp_path: Path) -> None:
    write(Renaming(2, 2), source(), tmp_path / "renamed")
    assert "state_dict() holds hidden" in str(refuse(Adding(2, 2), source(), tmp_path / "no"))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2, device="meta"), "weight has no values"),
        (nn.LazyLinear(2), "UninitializedParameter, not a plain tensor"),
    ],
)
def test_tensors_without_values(tmp_path: Path, model: nn.Module, message: str) -> None:
    assert message in str(refuse(model, source(), tmp_path / "no"))


def test_tensors_that_safetensors_cannot_hold(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("b", torch.eye(2).to_sparse())
    assert "b is a sparse or quantised tensor" in str(refuse(model, source(), tmp_path / "no"))
    model.register_buffer("b", torch.zeros(2, dtype=torch.float8_e5m2fnuz))
    assert "which safetensors cannot hold" in str(refuse(model, source(), tmp_path / "no"))


def test_no_source(tmp_path: Path) -> None:
    assert "no source" in str(refuse(nn.Linear(2, 2), None, tmp_path / "no"))
    bare = ModelSource("file", "model", "m.py", files=("m.py",))
    assert "contents of the source file m.py are not known" in str(refuse(nn.Linear(2, 2), bare, tmp_path / "no"))


def test_a_transformers_model_that_left_its_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=20,
        max_position_embeddings=8,
    )
    model = transformers.BertModel(config)
    plan = plan_for(model)
    write_directory(model, plan, report_for(plan), source_of(model), tmp_path / "as-it-was")
    del model.encoder.layer[1]
    assert "differs from its config in 16 tensors" in str(refuse(model, source_of(model), tmp_path / "no"))
