from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from te_convert.emit.weights_file import load_weights
from te_convert.errors import InputError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


class Opaque:
    """A class that a weights-only load refuses."""


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {key: value.clone() for key, value in Tied().state_dict().items()}


def refuse(model: nn.Module, path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        load_weights(model, path)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    return caught.value


def assert_loaded(model: nn.Module, path: Path) -> None:
    load_weights(model, path)
    own, wanted = model.state_dict(), state()
    assert all(torch.equal(own[key], wanted[key]) for key in wanted)
    assert model.head.weight is model.embed.weight  # type: ignore[union-attr]


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".safetensors"])
def test_formats(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"w{suffix}"
    if suffix == ".safetensors":
        save_file(state(), path)
    else:
        torch.save(state(), path)
    assert_loaded(Tied(), path)


def test_sharded(tmp_path: Path) -> None:
    tensors = state()
    names = sorted(tensors)
    save_file({key: tensors[key] for key in names[:3]}, tmp_path / "a.safetensors")
    save_file({key: tensors[key] for key in names[3:]}, tmp_path / "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {key: "a.safetensors" if key in names[:3] else "b.safetensors" for key in names}
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_loaded(Tied(), index)
    (tmp_path / "b.safetensors").unlink()
    assert "b.safetensors, which does not exist" in str(refuse(Tied(), index))
    index.write_text(json.dumps({"weight_map": {"x": "../w.safetensors"}}))
    assert "is not a file beside it" in str(refuse(Tied(), index))
    index.write_text("{}")
    assert "is not an index" in str(refuse(Tied(), index))


@pytest.mark.parametrize("wrap", ["state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "_orig_mod.module."])
@pytest.mark.report("huggingface/accelerate#3554")
def test_wrappers_and_prefixes(tmp_path: Path, wrap: str, prefix: str) -> None:
    path = tmp_path / "w.pt"
    torch.save({wrap: {prefix + key: value for key, value in state().items()}, "epoch": 3}, path)
    assert_loaded(Tied(), path)


def test_a_prefix_that_the_model_has_too_is_kept(tmp_path: Path) -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    save_file({key: value + 1 for key, value in model.state_dict().items()}, tmp_path / "w.safetensors")
    load_weights(model, tmp_path / "w.safetensors")


@pytest.mark.report("THUDM/slime#345", "NVIDIA/TensorRT-LLM#1733")
def test_a_tie_partner_may_be_missing(tmp_path: Path) -> None:
    for missing in ("head.weight", "embed.weight"):
        tensors = state()
        del tensors[missing]
        save_file(tensors, tmp_path / "w.safetensors")
        assert_loaded(Tied(), tmp_path / "w.safetensors")


def test_tied_tensors_with_different_values(tmp_path: Path) -> None:
    tensors = state()
    tensors["head.weight"] = tensors["head.weight"] + 1
    save_file(tensors, tmp_path / "w.safetensors")
    model = Tied()
    before = model.embed.weight.detach().clone()
    assert "different values for embed.weight and head.weight" in str(refuse(model, tmp_path / "w.safetensors"))
    assert torch.equal(before, model.embed.weight)


def test_a_checkpoint_from_before_num_batches_tracked(tmp_path: Path) -> None:
    tensors = state()
    del tensors["norm.num_batches_tracked"]
    save_file(tensors, tmp_path / "w.safetensors")
    load_weights(Tied(), tmp_path / "w.safetensors")


def test_mismatches_are_listed(tmp_path: Path) -> None:
    tensors = {key: value for key, value in state().items() if not key.startswith("norm.running")}
    tensors["norm.weight"] = torch.ones(7)
    tensors.update({f"extra.{index:02d}": torch.ones(1) for index in range(10)})
    save_file(tensors, tmp_path / "w.safetensors")
    text = str(refuse(Tied(), tmp_path / "w.safetensors"))
    assert "2 missing (norm.running_mean, norm.running_var)" in text
    assert "10 unexpected (extra.00, " in text
    assert "extra.07, …)" in text
    assert "extra.08" not in text
    assert "1 wrongly shaped (norm.weight [7] in the file, [4] in the model)" in text


def test_a_foreign_prefix_is_named(tmp_path: Path) -> None:
    save_file({f"net.{key}": value for key, value in state().items() if key != "head.weight"}, tmp_path / "w.safetensors")
    assert "'net.'" in refuse(Tied(), tmp_path / "w.safetensors").hint


@pytest.mark.parametrize("content", [Opaque(), Tied(), {"state_dict": state(), "hparams": Opaque()}])
def test_a_pickle_that_needs_code(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "w.pt")
    error = refuse(Tied(), tmp_path / "w.pt")
    assert "emit.test_weights_file." in str(error)
    assert "refused" in str(error)
    assert "state_dict" in error.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3, "weights": state()}, "other things than tensors: epoch, weights"),
        ([1, 2], "holds a list, not a state_dict"),
        (OrderedDict(), "nothing"),
    ],
)
def test_pickles_without_a_state_dict(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "w.pt")
    assert message in str(refuse(Tied(), tmp_path / "w.pt"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "does not exist" in str(refuse(Tied(), tmp_path / "no.pt"))
    assert "is a directory" in str(refuse(Tied(), tmp_path))
    torch.save(state(), tmp_path / "w.pt")
    whole = (tmp_path / "w.pt").read_bytes()
    for name, data in (
        ("half.pt", whole[: len(whole) // 2]),
        ("empty.pt", b""),
        ("text.pt", b"hello"),
        ("w.safetensors", b"hello"),
    ):
        (tmp_path / name).write_bytes(data)
        assert name in str(refuse(Tied(), tmp_path / name))
    (tmp_path / "w.npz").write_bytes(b"")
    assert "not a weights file that is known" in str(refuse(Tied(), tmp_path / "w.npz"))
