from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from te_convert.emit.model_source import ModelSource
from te_convert.emit.sources import open_source, rebuild, source_of
from te_convert.errors import InputError, LoadError
from tests.emit.emit_samples import write_source

HEAD = "import torch\nfrom torch import nn\n"
FUNCTION_AND_CLASSES = "def make(dim): pass\nclass B(nn.Module):\n  def __init__(self, dim): pass\nclass C(B): pass"
NEEDS_ARGUMENTS = "class A(nn.Module):\n  def __init__(self, dim, *, heads, k=1): pass"


def width(model: nn.Module) -> int:
    assert isinstance(model, nn.Linear)
    return model.in_features


def refuse(spec: str | Path) -> InputError:
    with pytest.raises(InputError) as caught:
        open_source(str(spec))
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    assert "\n" not in caught.value.hint
    return caught.value


# ---- what opens ----------------------------------------------------------------------------------------------------------


def test_build_model_and_example_inputs(tmp_path: Path) -> None:
    opened = open_source(str(write_source(tmp_path)))
    assert type(opened.model).__name__ == "Net"
    assert isinstance(opened.example_inputs, tuple)
    assert (opened.source.kind, opened.source.entry, opened.source.files) == ("file", "build_model", ("net.py",))


@pytest.mark.parametrize(
    ("text", "name", "entry"),
    [
        ("model = nn.Linear(2, 2)\ndef build_model(): return nn.Linear(3, 3)", None, "model"),
        ("def model(): return nn.Linear(2, 2)", None, "model"),
        ("net = nn.Linear(2, 2)\nloss = nn.MSELoss()", None, "net"),
        ("class Block(nn.Linear):\n  def __init__(self, dim): pass\nclass Net(nn.Module): pass", None, "Net"),
        ("a = nn.Linear(2, 2)\nb = nn.Linear(3, 2)", "b", "b"),
        ("def tiny(dim=2): return nn.Linear(dim, 2)", "tiny", "tiny"),
        ("class A(nn.Module):\n  @classmethod\n  def make(cls): return cls()", "A.make", "A.make"),
        ("model = None\nmodel_name = 'x'\nnet = nn.Linear(1, 1)", None, "net"),
    ],
)
def test_entries(tmp_path: Path, text: str, name: str | None, entry: str) -> None:
    path = write_source(tmp_path, HEAD + text)
    opened = open_source(f"{path}:{name}" if name else str(path))
    assert isinstance(opened.model, nn.Module)
    assert opened.source.entry == entry
    assert opened.example_inputs is None


def test_prints_go_to_stderr_and_the_process_is_left_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = HEAD + "import sys\nprint('importing', sys.argv)\ndef build_model():\n  print('building')\n  return nn.Linear(2, 2)\n"
    before = (list(sys.path), list(sys.argv), list(sys.meta_path))
    open_source(str(write_source(tmp_path, text)))
    out, err = capsys.readouterr()
    assert out == ""
    assert "importing" in err
    assert "building" in err
    assert (sys.path, sys.argv, sys.meta_path) == before
    assert not (tmp_path / "__pycache__").exists()


def test_dataclasses_and_pickle_work_inside(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nimport dataclasses\nfrom torch import nn\n@dataclasses.dataclass\nclass Config:\n"
        "  dim: int = 2\nclass Net(nn.Module):\n  def __init__(self):\n    super().__init__()\n    self.config = Config()\n"
        "  def forward(self, x): return x\nmodel = Net()\n"
    )
    model = open_source(str(write_source(tmp_path, text))).model
    assert isinstance(pickle.loads(pickle.dumps(model)), nn.Module)


def test_siblings_are_copied_and_names_do_not_clash(tmp_path: Path) -> None:
    for folder, size in (("one", 3), ("two", 5)):
        write_source(
            tmp_path / folder / "parts",
            "from . import sizes\nfrom torch import nn\ndef make(): return nn.Linear(sizes.N, 2)",
            "make.py",
        )
        write_source(tmp_path / folder / "parts", f"N = {size}", "sizes.py")
        write_source(tmp_path / folder / "parts", "", "__init__.py")
        write_source(tmp_path / folder, "ALSO = 1", "late.py")
        write_source(tmp_path / folder, "", "unused.py")
        write_source(tmp_path / folder, "from parts.make import make\ndef build_model():\n  import late\n  return make()")
    first, second = (open_source(str(tmp_path / folder / "net.py")) for folder in ("one", "two"))
    assert [width(opened.model) for opened in (first, second)] == [3, 5]
    assert set(first.source.files) == {"net.py", "late.py", "parts/__init__.py", "parts/make.py", "parts/sizes.py"}
    # An edited sibling is seen again, although it is still imported.
    write_source(tmp_path / "one" / "parts", "N = 7", "sizes.py")
    third = open_source(str(tmp_path / "one" / "net.py"))
    assert width(third.model) == 7
    assert third.source.files == first.source.files


def test_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = f"pkg_{tmp_path.name.replace('-', '_')}"
    write_source(tmp_path / package, HEAD + "net = nn.Linear(2, 2)\ndef make(): return nn.Linear(3, 3)", "mod.py")
    monkeypatch.chdir(tmp_path)
    opened = open_source(f"{package}.mod")
    assert opened.source.to_dict()["main"] == f"{package}.mod"
    module = sys.modules[f"{package}.mod"]
    assert opened.model is not module.net
    open_source(f"{package}.mod:make")
    assert sys.modules[f"{package}.mod"] is module
    assert str(tmp_path) not in sys.path
    assert open_source(f"{package}.mod:make").model.in_features == 3
    assert opened.source.files == ()
    assert isinstance(rebuild(opened.source, tmp_path), nn.Linear)
    (tmp_path / package / "mod.py").write_text("# changed")
    with pytest.raises(LoadError, match="the source changed since conversion"):
        rebuild(opened.source, tmp_path)


def test_rebuild_from_copies(tmp_path: Path) -> None:
    write_source(tmp_path / "in", "N = 4", "sizes.py")
    source = open_source(str(write_source(tmp_path / "in", HEAD + "import sizes\nmodel = nn.Linear(sizes.N, 2)"))).source
    again = ModelSource.from_dict(json.loads(json.dumps(source.to_dict())))
    assert again == source
    for name, data in source.content.items():
        write_source(tmp_path / "out" / "source", data.decode(), name)
    write_source(tmp_path / "in", "N = 9", "sizes.py")
    model = rebuild(again, tmp_path / "out")
    assert isinstance(model, nn.Linear)
    assert model.in_features == 4
    (tmp_path / "out" / "source" / "net.py").write_text("model = 3")
    with pytest.raises(LoadError, match=r"cannot be built again: .*is an int"):
        rebuild(again, tmp_path / "out")


@pytest.mark.parametrize("name", ["../x.py", "/etc/x.py", "a\\b.py", "C:x.py", "a//b.py", "", "./a.py"])
def test_a_source_cannot_point_elsewhere(name: str) -> None:
    with pytest.raises(LoadError):
        ModelSource.from_dict(ModelSource("file", "model", "m.py", files=(name,)).to_dict())


def test_a_source_of_unknown_kind_or_shape() -> None:
    with pytest.raises(LoadError, match="unknown kind"):
        ModelSource.from_dict(ModelSource("pickle", "model", "m.py").to_dict())
    with pytest.raises(LoadError, match="no model source"):
        ModelSource.from_dict({"kind": "file"})


# ---- what does not -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("def f(:\n", "net.py:3: syntax error", "correct"),
        ("import no_such_thing_at_all", "No module named 'no_such_thing_at_all' (net.py:3)", "install"),
        ("from . import x", "relative import", "package.module:name"),
        ("open('no-such-file')", "FileNotFoundError", "only Python files"),
        ("1 / 0", "ZeroDivisionError: division by zero (net.py:3)", "traceback"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines", "traceback"),
        ("raise SystemExit(3)", "called sys.exit() (net.py:3)", "__main__"),
        ("x = 1", "has no model", "build_model()"),
        (FUNCTION_AND_CLASSES, "classes B(dim), C(dim), functions make(dim)", "offer"),
        ("model = 'bert'", "`model` is a str", "offer"),
        ("a = nn.Linear(1, 1)\nb = nn.Linear(1, 1)", "several models: a, b", "net.py:a"),
        ("class A(nn.Module): pass\nclass B(nn.Module): pass", "several models: A, B", "net.py:A"),
        (NEEDS_ARGUMENTS, "A in .*needs arguments: dim, heads", "build_model()"),
        ("def build_model(dim): pass", "build_model in .*needs arguments: dim", "default"),
        ("def build_model(): return {}", "build_model() returned a dict", "return the model"),
        ("def build_model(): 1 / 0", "build_model() of .*ZeroDivisionError", "traceback"),
        ("model = nn.Linear(1, 1)\ndef example_inputs(): 1 / 0", "example_inputs() of .*ZeroDivisionError", "traceback"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, text: str, message: str, hint: str) -> None:
    error = refuse(write_source(tmp_path, HEAD + text))
    for part in message.split(".*"):
        assert part in str(error)
    assert hint in error.hint


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "has no 'nothing'; it has instances net"),
        ("size", "size in .*is an int"),
        ("Plain", "not a torch.nn.Module"),
        ("Net", "needs arguments: dim"),
        ("make", "needs arguments: dim"),
        ("nn", "nn in .*is the module torch.nn"),
    ],
)
def test_bad_names(tmp_path: Path, name: str, message: str) -> None:
    text = HEAD + "size = 3\nnet = nn.Linear(1, 1)\nclass Plain: pass\ndef make(dim): pass\n"
    text += "class Net(nn.Module):\n  def __init__(self, dim): pass\n"
    error = refuse(f"{write_source(tmp_path, text)}:{name}")
    for part in message.split(".*"):
        assert part in str(error)


def test_bad_paths(tmp_path: Path) -> None:
    assert "does not exist" in str(refuse(tmp_path / "no.py"))
    assert "does not exist" in str(refuse(f"{tmp_path / 'no.py'}:model"))
    assert "does not exist" in str(refuse(tmp_path / "no" / "such"))
    assert "no file, directory or importable module" in str(refuse("no_such_module_at_all"))
    assert "no file, directory or importable module" in str(refuse("torch.no_such:thing"))
    assert "has no source file" in str(refuse("builtins"))
    (tmp_path / "notes.txt").write_text("")
    assert "is not a .py file" in str(refuse(tmp_path / "notes.txt"))
    for suffix in (".pt", ".pth", ".bin", ".safetensors"):
        error = refuse(tmp_path / f"w{suffix}")
        assert "holds weights, not a model" in str(error)
        assert "--weights" in error.hint
    assert "is empty" in str(refuse(""))
    assert "without config.json" in str(refuse(tmp_path))
    write_source(tmp_path)
    assert "net.py" in refuse(tmp_path).hint
    (tmp_path / "manifest.json").write_text("{}")
    assert "converted directory already" in str(refuse(tmp_path))
    (tmp_path / "folder.py").mkdir()
    assert "without config.json" in str(refuse(tmp_path / "folder.py"))


def test_a_failed_import_leaves_no_module_behind(tmp_path: Path) -> None:
    refuse(write_source(tmp_path, "1 / 0", "failing_source.py"))
    assert not any(name.startswith("te_convert_source_failing_source") for name in sys.modules)


# ---- Transformers --------------------------------------------------------------------------------------------------------


def save_bert(folder: Path, **options: object) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=20,
        max_position_embeddings=8,
    )
    model: nn.Module = transformers.BertForMaskedLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder, **options)  # type: ignore[operator]
    return model


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def test_a_transformers_directory(tmp_path: Path) -> None:
    saved = save_bert(tmp_path / "bert")
    (tmp_path / "bert" / "vocab.txt").write_text("a\n")
    (tmp_path / "bert" / "extra.py").write_text("1 / 0")
    opened = open_source(str(tmp_path / "bert"))
    assert type(opened.model).__name__ == "BertForMaskedLM"
    assert not opened.model.training
    assert opened.source.dtype == "bfloat16"
    assert {"config.json", "vocab.txt"} <= set(opened.source.files)
    assert not any(name.endswith((".py", ".safetensors")) for name in opened.source.files)
    state = opened.model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in saved.state_dict().items())
    for name, data in opened.source.content.items():
        write_source(tmp_path / "out" / "source", data.decode(), name)
    again = rebuild(opened.source, tmp_path / "out")
    assert type(again) is type(opened.model)
    assert {k: (v.shape, v.dtype) for k, v in again.state_dict().items()} == {k: (v.shape, v.dtype) for k, v in state.items()}


def test_a_sharded_directory_without_architectures(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(save_bert(tmp_path / "whole").config)
    model.save_pretrained(tmp_path / "base", max_shard_size=500)
    edit_config(tmp_path / "base", architectures=None)
    assert (tmp_path / "base" / "model.safetensors.index.json").is_file()
    assert type(open_source(str(tmp_path / "base")).model) is transformers.BertModel


def test_bad_transformers_directories(tmp_path: Path) -> None:
    save_bert(tmp_path)
    edit_config(tmp_path, architectures=["NoSuchModel"])
    assert "no model class 'NoSuchModel'" in str(refuse(tmp_path))
    edit_config(tmp_path, auto_map={"AutoModel": "modeling.NoSuchModel"})
    error = refuse(tmp_path)
    assert "Python code from the directory" in str(error)
    assert "build_model()" in error.hint
    edit_config(tmp_path, auto_map=None, architectures=["BertForQuestionAnswering"])
    assert "missing: qa_outputs" in str(refuse(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert "cannot be loaded" in str(refuse(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "in a pickle (pytorch_model.bin)" in str(refuse(tmp_path))
    (tmp_path / "pytorch_model.bin").unlink()
    assert "no model.safetensors" in str(refuse(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    assert "no JSON object" in str(refuse(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in str(refuse(tmp_path))


def test_source_of_a_live_model(tmp_path: Path) -> None:
    model = save_bert(tmp_path)
    source = source_of(model)
    assert source is not None
    assert (source.kind, source.entry, source.dtype) == ("transformers", "BertForMaskedLM", "bfloat16")
    assert json.loads(source.content["config.json"])["architectures"] == ["BertForMaskedLM"]
    assert source_of(nn.Linear(2, 2)) is None
    assert source_of(type("Own", (type(model),), {})(model.config)) is None
