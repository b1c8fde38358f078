"""A directory streamed into TE's layout and back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import te_convert
from te_convert.cli.main import main
from te_convert.errors import InputError
from te_convert.stream import convert as convert_module
from te_convert.stream.writer import ShardWriter
from tests.stream.stream_samples import BUILDERS, build, finished, inodes, run_and_kill, tensors, tokens, write

pytest.importorskip("transformers")
SHARD = 30_000


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write("llama", tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize("name", BUILDERS)
def test_streamed_there_and_back(name: str, tmp_path: Path) -> None:
    original = write(name, tmp_path / "hf")
    before = files_of(tmp_path / "hf")
    result = te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te", shard_bytes=SHARD)
    assert result.converted
    assert result.report.parity.status == "slice"
    assert any("the whole model" in line for line in result.report.not_verified)
    assert len(list((tmp_path / "te").glob("model-*.safetensors"))) > 1
    loaded = te_convert.load(tmp_path / "te")
    a, b = original(tokens()).logits.detach(), loaded(tokens()).logits.detach()
    assert float((a - b).abs().max() / a.abs().max()) < (2e-6 if a.dtype is torch.float32 else 2e-2)

    te_convert.export(tmp_path / "te", tmp_path / "back")
    found, expected = tensors(tmp_path / "back"), tensors(tmp_path / "hf")
    assert list(found) == sorted(found)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) and found[key].dtype == expected[key].dtype for key in expected)
    again: Any = type(original)
    assert torch.equal(again.from_pretrained(tmp_path / "back").eval()(tokens()).logits, a)
    assert files_of(tmp_path / "hf") == before


def test_streaming_writes_what_convert_writes(source: Path, tmp_path: Path) -> None:
    te_convert.convert_checkpoint(source, tmp_path / "te")
    opened = te_convert.open_model(str(source))
    te_convert.convert(opened.model, inplace=True).save(tmp_path / "memory", source=opened.source)
    streamed, saved = tensors(tmp_path / "te"), tensors(tmp_path / "memory")
    assert streamed.keys() == saved.keys()
    assert all(torch.equal(streamed[key], saved[key]) for key in saved)
    plans = [json.loads((tmp_path / name / "plan.json").read_text())["fusions"] for name in ("te", "memory")]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("name", ["llama tied", "gpt2"])
def test_export_of_a_directory_without_a_ledger_and_of_a_trained_model(name: str, tmp_path: Path) -> None:
    original: Any = build(name)
    result = te_convert.convert(original)
    result.save(tmp_path / "te")
    te_convert.export(tmp_path / "te", tmp_path / "back")
    again = type(original).from_pretrained(tmp_path / "back").eval()
    assert torch.equal(again(tokens()).logits, original(tokens()).logits)

    optimizer = torch.optim.SGD(result.model.parameters(), lr=0.1)
    result.model(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    te_convert.export(result.model, tmp_path / "trained")
    trained = type(original).from_pretrained(tmp_path / "trained").eval()
    expected = result.model(tokens()).logits.detach()
    assert float((trained(tokens()).logits.detach() - expected).abs().max()) < 1e-5
    assert not torch.equal(trained(tokens()).logits, original(tokens()).logits)


def test_dtype_is_converted(source: Path, tmp_path: Path) -> None:
    te_convert.convert_checkpoint(source, tmp_path / "te", dtype="bfloat16")
    assert {tensor.dtype for tensor in tensors(tmp_path / "te").values() if tensor.numel() > 100} == {torch.bfloat16}
    te_convert.export(tmp_path / "te", tmp_path / "back")
    found, expected = tensors(tmp_path / "back"), tensors(source)
    assert all(torch.equal(found[key], expected[key].bfloat16()) for key in expected)


def test_torch_files_are_read_without_running_code(tmp_path: Path) -> None:
    original: Any = build("gpt2")
    folder = tmp_path / "hf"
    original.config.architectures = ["GPT2LMHeadModel"]
    original.config.save_pretrained(folder)
    torch.save(
        {key: value for key, value in original.state_dict().items() if key != "lm_head.weight"}, folder / "pytorch_model.bin"
    )
    result = te_convert.convert_checkpoint(folder, tmp_path / "te")
    assert result.report.parity.status == "slice"
    expected = original(tokens()).logits.detach()
    assert float((te_convert.load(tmp_path / "te")(tokens()).logits.detach() - expected).abs().max() / expected.abs().max()) < 2e-6
    torch.save({"weight": print}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="pickle"):
        te_convert.convert_checkpoint(folder, tmp_path / "other")


class Interrupted(BaseException):
    pass


def test_resume_keeps_finished_shards(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = te_convert.convert_checkpoint(source, tmp_path / "whole", shard_bytes=SHARD)
    written: list[str] = []
    write_shard, limit = ShardWriter._write, 2

    def counted(self: ShardWriter, file: str, *args: Any) -> Any:
        if len(written) == limit:
            raise Interrupted
        written.append(file)
        return write_shard(self, file, *args)

    monkeypatch.setattr(ShardWriter, "_write", counted)
    with pytest.raises(Interrupted):
        te_convert.convert_checkpoint(source, tmp_path / "te", shard_bytes=SHARD)
    assert not (tmp_path / "te").exists()
    first = [*written]
    written.clear()
    limit = 1000
    te_convert.convert_checkpoint(source, tmp_path / "te", shard_bytes=SHARD, resume=True)
    assert written
    assert not set(first) & set(written)
    assert tensors(tmp_path / "te").keys() == tensors(whole.path).keys()
    assert all(torch.equal(value, tensors(whole.path)[key]) for key, value in tensors(tmp_path / "te").items())
    assert te_convert.load(tmp_path / "te") is not None
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_resume_refuses_other_options(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = convert_module.Job._compare_with_slice
    monkeypatch.setattr(convert_module.Job, "_compare_with_slice", lambda *_: (_ for _ in ()).throw(Interrupted()))
    with pytest.raises(Interrupted):
        te_convert.convert_checkpoint(source, tmp_path / "te", shard_bytes=SHARD)
    monkeypatch.setattr(convert_module.Job, "_compare_with_slice", finish)
    with pytest.raises(InputError, match="other options"):
        te_convert.convert_checkpoint(source, tmp_path / "te", shard_bytes=SHARD, dtype="bfloat16", resume=True)
    assert (tmp_path / ".te.partial").is_dir()
    te_convert.convert_checkpoint(source, tmp_path / "te", shard_bytes=SHARD, dtype="bfloat16")
    assert not (tmp_path / ".te.partial").exists()


def test_a_full_disk_leaves_nothing_that_looks_complete(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("te_convert.stream.writer._write_fully", full)
    with pytest.raises(InputError, match="No space left on device") as caught:
        te_convert.convert_checkpoint(source, tmp_path / "te")
    assert "--resume" in caught.value.hint
    assert not (tmp_path / "te").exists()


def test_killed_while_streaming(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 in the middle of a shard: no directory; --resume keeps the finished shards and makes what was asked for."""
    arguments = [str(source), "--stream", "--no-verify", "--out", str(tmp_path / "te"), "-q"]
    run_and_kill(te_convert.convert_checkpoint, SHARD, arguments)
    assert not (tmp_path / "te").exists()
    before = finished(tmp_path / "te")
    assert before
    defaults: Any = te_convert.convert_checkpoint.__kwdefaults__
    monkeypatch.setitem(defaults, "shard_bytes", SHARD)
    done = CliRunner().invoke(main, [*arguments, "--resume"])
    assert done.exit_code == 0, done.stderr
    assert inodes(tmp_path / "te", before) == before
    te_convert.export(tmp_path / "te", tmp_path / "back")
    assert all(torch.equal(value, tensors(source)[key]) for key, value in tensors(tmp_path / "back").items())


def test_two_processes_do_not_write_the_same_directory(source: Path, tmp_path: Path) -> None:
    from te_convert.stream.staging import Staging

    with (
        Staging(tmp_path / "te", {}, resume=False).locked(),
        pytest.raises(InputError, match="another process"),
    ):
        te_convert.convert_checkpoint(source, tmp_path / "te")


def test_nothing_is_left_after_a_bad_checkpoint(source: Path, tmp_path: Path) -> None:
    index = source / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    lost = next(name for name in data["weight_map"] if "q_proj" in name)
    shard = source / data["weight_map"][lost]
    os.truncate(shard, shard.stat().st_size - 10)
    with pytest.raises(InputError, match=f"{shard.name} is truncated"):
        te_convert.convert_checkpoint(source, tmp_path / "te")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_missing_and_unexpected_keys_are_told(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    write("llama", tmp_path / "hf", shard="1GB")
    file = tmp_path / "hf" / "model.safetensors"
    state = tensors(tmp_path / "hf")
    save_file({**state, "surplus": torch.zeros(2)}, file)
    result = te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te", verify=False)
    assert any("1 tensors of the checkpoint have no place" in note and "surplus" in note for note in result.report.notes)
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, file)
    with pytest.raises(InputError, match=r"missing in the checkpoint: model\.layers\.1\.mlp\.up_proj\.weight"):
        te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "other")


def test_a_wrong_stream_is_caught_by_the_slice(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: gate and up exchanged while streaming, which keeps every shape."""
    from te_convert.errors import ConversionError
    from te_convert.stream.pieces import Layout
    from te_convert.stream.targets import from_checkpoint

    inner = from_checkpoint

    def exchanged(*args: Any) -> dict[str, Layout]:
        found = inner(*args)
        name = next(name for name in found if name.endswith("fc1_weight"))
        found[name] = Layout(found[name].dtype, found[name].shape, found[name].pieces[::-1])
        return found

    monkeypatch.setattr(convert_module, "from_checkpoint", exchanged)
    with pytest.raises(ConversionError, match="streamed otherwise than it was verified"):
        te_convert.convert_checkpoint(source, tmp_path / "te")
    assert not (tmp_path / "te").exists()


def test_large_embeddings_are_cut_in_the_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_convert.stream.slice._LARGE_BYTES", 0)
    monkeypatch.setattr("te_convert.stream.slice._ROWS", 40)
    write("llama", tmp_path / "hf")
    result = te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te")
    assert result.report.parity.status == "slice"
    assert "embeddings cut to 40 rows" in " ".join(result.report.notes)
    assert tensors(tmp_path / "te")["lm_head.weight"].shape[0] == 64


def test_one_large_layer_is_compared_where_two_small_ones_would_be(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of a 70B model has 1.7 GB: one that is compared says more than two that do not fit."""
    two = te_convert.convert_checkpoint(source, tmp_path / "two")
    monkeypatch.setattr("te_convert.stream.slice._TWO_LAYERS_BYTES", 10_000)
    one = te_convert.convert_checkpoint(source, tmp_path / "one")
    assert [result.report.parity.status for result in (one, two)] == ["slice", "slice"]
    assert "a model of one layer with the weights of layer 0 was compared" in " ".join(one.report.notes)
    assert "a model of 2 layers with the weights of layers 0 to 1 was compared" in " ".join(two.report.notes)
    assert tensors(one.path).keys() == tensors(two.path).keys()


def test_a_site_that_fails_in_the_slice_is_left_in_every_layer(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from te_convert.reference.layer_norm_mlp import LayerNormMLP

    forward = LayerNormMLP.forward

    def wrong(self: LayerNormMLP, x: torch.Tensor) -> torch.Tensor:
        y = forward(self, x)
        assert isinstance(y, torch.Tensor)
        return y * 1.01

    monkeypatch.setattr(LayerNormMLP, "forward", wrong)
    result = te_convert.convert_checkpoint(source, tmp_path / "te")
    names = {fusion.spec.name for fusion in result.plan.fusions}
    assert "te.LayerNormMLP" not in names
    assert "te.LayerNormLinear" in names
    left = [site.fqn for site in result.plan if any(why.code == "parity.failed" for why in site.reasons)]
    assert {name.split(".")[2] for name in left} == {"0", "1", "2"}
