from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert import api
from te_convert.emit.load import load_directory
from te_convert.emit.slots import find_slots
from te_convert.emit.sources import open_source, source_of
from te_convert.emit.tensors_file import file_record
from te_convert.emit.write import write_directory
from te_convert.errors import EnvironmentLacksError, InputError, LoadError
from te_convert.plan.model import Plan
from te_convert.rewrite.apply import apply_plan
from te_convert.rewrite.fused import get_fused
from te_convert.rewrite.site import is_converted
from te_convert.rewrite.state import revert
from tests.emit.emit_samples import PLAIN, convert_file, convert_opened, plan_for, report_for, write_source
from tests.rewrite.rewrite_samples import FUSE, plan_of

IDS = torch.arange(11).reshape(1, 11)


@pytest.fixture
def written(tmp_path: Path) -> tuple[nn.Module, Path]:
    model, _ = convert_file(write_source(tmp_path / "in"), tmp_path / "out")
    return model, tmp_path / "out"


def assert_same(loaded: nn.Module, model: nn.Module) -> None:
    here, there = find_slots(model), find_slots(loaded)
    assert set(here) == set(there)
    for name, slot in here.items():
        tensor, again = slot.tensor, there[name].tensor
        assert (tensor.dtype, tensor.shape, tensor.requires_grad) == (again.dtype, again.shape, again.requires_grad), name
        assert torch.equal(tensor, again), name
    assert {n: m.training for n, m in model.named_modules()} == {n: m.training for n, m in loaded.named_modules()}
    assert [n for n, m in model.named_modules() if is_converted(m)] == [n for n, m in loaded.named_modules() if is_converted(m)]


def refuse(directory: Path, **options: Any) -> LoadError:
    with pytest.raises(LoadError) as caught:
        load_directory(directory, **options)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    return caught.value


# ---- round trips ---------------------------------------------------------------------------------------------------------


def test_a_gpu_that_is_not_there(written: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentLacksError, match="no CUDA device") as caught:
        load_directory(written[1], device="cuda:0")
    assert "CPU" in caught.value.hint


def test_round_trip(written: tuple[nn.Module, Path]) -> None:
    model, out = written
    before = torch.random.get_rng_state()
    loaded: Any = load_directory(out, backend="reference")
    assert torch.equal(before, torch.random.get_rng_state())
    assert_same(loaded, model)
    assert loaded.head.weight is loaded.embed.weight
    assert sum(map(is_converted, loaded.modules())) == 3
    with torch.no_grad():
        assert torch.equal(loaded(IDS), model(IDS))
    assert not list(out.rglob("*.pyc"))
    # A second load is another model.
    another: Any = load_directory(out)
    assert another.embed.weight is not loaded.embed.weight


def test_a_loaded_model_knows_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_source(str(write_source(tmp_path / "in")))
    result = te_convert.convert(opened.model, (IDS,), recipe="fp8-current", backend="reference")
    api.save(result, tmp_path / "out", source=opened.source)
    asked: list[str | None] = []
    monkeypatch.setattr(api, "in_recipe", lambda model, recipe: asked.append(recipe))
    te_convert.autocast(te_convert.load(tmp_path / "out", backend="reference"))
    assert asked == ["fp8-current"]


def test_round_trip_of_fusions(tmp_path: Path) -> None:
    opened = open_source(str(write_source(tmp_path / "in")))
    before = {key: value.clone() for key, value in opened.model.state_dict().items()}
    plan = plan_of(opened.model, (IDS,))
    assert [fusion.fqn for fusion in plan.fusions] == ["layernorm_fc"]
    model = apply_plan(opened.model, plan, "reference").model
    write_directory(model, plan, report_for(plan), opened.source, tmp_path / "out")
    loaded: Any = load_directory(tmp_path / "out", backend="reference")
    assert_same(loaded, model)
    assert loaded.head.weight is loaded.embed.weight
    assert list(loaded.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        assert torch.equal(loaded(IDS), model(IDS))
    assert get_fused(loaded.layernorm_fc).executed == 1
    back = revert(loaded)
    assert not any(map(is_converted, back.modules()))
    assert list(back.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in back.state_dict().items())


def test_round_trip_in_another_process(written: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, out = written
    (tmp_path / "in" / "net.py").unlink()
    code = (
        "import sys, torch\nfrom te_convert.emit.load import load_directory\n"
        "model = load_directory(sys.argv[1])\n"
        "with torch.no_grad(): torch.save(model(torch.arange(11).reshape(1, 11)), sys.argv[2])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(out), str(tmp_path / "y.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "y.pt", weights_only=True), model(IDS))


def test_frozen_bf16_and_modes(tmp_path: Path) -> None:
    opened = open_source(str(write_source(tmp_path / "in")))
    plan = plan_for(opened.model)
    model: Any = apply_plan(opened.model, plan, "reference").model
    model.bfloat16().eval()
    model.norm.train()
    model.embed.weight.requires_grad_(False)
    write_directory(model, plan, report_for(plan), opened.source, tmp_path / "out")
    loaded: Any = load_directory(tmp_path / "out")
    assert_same(loaded, model)
    assert loaded.norm.bias.dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["frozen"] == ["embed.weight", "norm.bias"]


def test_an_unchanged_model(tmp_path: Path) -> None:
    opened = open_source(str(write_source(tmp_path / "in")))
    plan = Plan("Net", ())
    write_directory(opened.model, plan, report_for(plan), opened.source, tmp_path / "out", shard_bytes=200)
    assert_same(load_directory(tmp_path / "out"), opened.model)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["converted"] is False


def test_a_root_that_is_a_site(tmp_path: Path) -> None:
    path = write_source(tmp_path / "in", "from torch import nn\nmodel = nn.Linear(4, 2)")
    model, _ = convert_file(path, tmp_path / "out")
    loaded = load_directory(tmp_path / "out")
    assert is_converted(loaded)
    assert_same(loaded, model)


def test_ties_made_or_cut_after_the_constructor(tmp_path: Path) -> None:
    text = (
        "from torch import nn\ndef build_model():\n  m = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))\n"
        "  m[1].weight = m[0].weight\n  return m\n"
    )
    opened = open_source(str(write_source(tmp_path / "in", text)))
    model: Any = opened.model
    model[1].weight = nn.Parameter(torch.ones(2, 2))
    model[2].weight = model[0].weight
    converted = convert_opened(opened, tmp_path / "out")
    loaded: Any = load_directory(tmp_path / "out")
    assert_same(loaded, converted)
    assert loaded[2].weight is loaded[0].weight
    assert loaded[1].weight is not loaded[0].weight


def test_shared_modules(tmp_path: Path) -> None:
    text = "from torch import nn\ndef build_model():\n  block = nn.Linear(2, 2)\n  return nn.Sequential(block, block)\n"
    model, _ = convert_file(write_source(tmp_path / "in", text), tmp_path / "out")
    loaded: Any = load_directory(tmp_path / "out")
    assert loaded[0] is loaded[1]
    assert_same(loaded, model)


def test_buffers_made_while_running_and_complex_and_expanded_ones(tmp_path: Path) -> None:
    text = (
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n  def __init__(self):\n    super().__init__()\n"
        "    self.register_buffer('late', None, persistent=False)\n"
        "    self.register_buffer('turns', torch.polar(torch.ones(3), torch.rand(3)), persistent=False)\n"
        "    self.register_buffer('ids', torch.zeros(1, 1, dtype=torch.long).expand(2, 3))\n"
        "  def forward(self, x):\n    self.late = x * 2\n    self.register_buffer('new', x, persistent=False)\n    return x\n"
    )
    opened = open_source(str(write_source(tmp_path / "in", text)))
    opened.model(torch.ones(4))
    model = convert_opened(opened, tmp_path / "out")
    loaded = load_directory(tmp_path / "out")
    assert_same(loaded, model)
    assert set(loaded.state_dict()) == {"ids"}


def test_renamed_state_dict_keys(tmp_path: Path) -> None:
    text = (
        "from torch import nn\nclass Net(nn.Linear):\n  def __init__(self): super().__init__(2, 2)\n"
        "  def _save_to_state_dict(self, d, p, k):\n    super()._save_to_state_dict(d, p, k)\n"
        "    d[p + 'kernel'] = d.pop(p + 'weight')\n"
    )
    model, _ = convert_file(write_source(tmp_path / "in", text), tmp_path / "out")
    assert_same(load_directory(tmp_path / "out"), model)


def test_device(written: tuple[nn.Module, Path]) -> None:
    _, out = written
    assert {p.device.type for p in load_directory(out, device="cpu").parameters()} == {"cpu"}
    assert {p.device.type for p in load_directory(out, device=torch.device("meta")).parameters()} == {"meta"}
    with pytest.raises(InputError, match="unknown device 'gpu9'"):
        load_directory(out, device="gpu9")
    if not torch.cuda.is_available():
        with pytest.raises(EnvironmentLacksError):
            load_directory(out, backend="te")


@FUSE
def test_transformers(fuse: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=16, bos_token_id=0, eos_token_id=1)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.generation_config.max_new_tokens = 3
    model.set_attn_implementation("eager")
    source, plan = source_of(model), plan_of(model, (IDS,)) if fuse else plan_for(model)
    assert [fusion.fqn for fusion in plan.fusions] == ["transformer.h.0.attn.layernorm_qkv", "transformer.h.0.mlp"] * fuse
    converted: Any = apply_plan(model, plan, "reference").model
    write_directory(converted, plan, report_for(plan), source, tmp_path / "out")
    loaded: Any = load_directory(tmp_path / "out")
    assert_same(loaded, converted)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert loaded.config._attn_implementation == "eager"
    assert loaded.generation_config.max_new_tokens == 3
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, converted(IDS).logits)


# ---- damage --------------------------------------------------------------------------------------------------------------

FILES = [
    "plan.json",
    "model.safetensors",
    "buffers.safetensors",
    "report.json",
    "report.md",
    "report.html",
    "__init__.py",
    "source/net.py",
]


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_guarded(written: tuple[nn.Module, Path], name: str) -> None:
    _, out = written
    whole = (out / name).read_bytes()
    for damaged in (whole[:-1], whole + b" ", bytes([whole[0] ^ 1]) + whole[1:], b""):
        (out / name).write_bytes(damaged)
        assert str(refuse(out)) == f"{name} was changed or truncated"
    (out / name).unlink()
    assert str(refuse(out)) == f"{name} is missing"
    (out.parent / "elsewhere").write_bytes(whole)
    (out / name).symlink_to(out.parent / "elsewhere")
    assert str(refuse(out)) == f"{name} is a symbolic link"
    (out / name).unlink()
    (out / name).write_bytes(whole)
    load_directory(out)


def test_no_manifest(written: tuple[nn.Module, Path], tmp_path: Path) -> None:
    _, out = written
    assert "does not exist" in str(refuse(tmp_path / "no"))
    assert "is not a directory" in str(refuse(tmp_path / "in" / "net.py"))
    assert "has no manifest.json" in str(refuse(tmp_path / "in"))
    for text in ("", "{", "[]", "\x00", '{"a": NaN'):
        (out / "manifest.json").write_text(text)
        assert "is not readable JSON" in str(refuse(out))


Edit = Callable[[dict[str, Any]], object]


def edit(change: Edit) -> Edit:
    """Gives a lambda its type."""
    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit(lambda m: m.update(schema=99)), "manifest.json has schema 99; this version reads 1"),
        (edit(lambda m: m.pop("schema")), "schema None"),
        (edit(lambda m: m.pop("frozen")), "is damaged: KeyError"),
        (edit(lambda m: m.update(frozen=3)), "is damaged: TypeError"),
        (edit(lambda m: m.update(files=[])), "is damaged"),
        (edit(lambda m: m.update(ties=[])), "is damaged"),
        (edit(lambda m: m["files"].update({"../x": {"sha256": "", "size": 0}})), "'../x', which is not inside the directory"),
        (edit(lambda m: m["files"].update({"/etc/passwd": {"sha256": "", "size": 0}})), "which is not inside the directory"),
        (edit(lambda m: m["source"].update(files=["../net.py"])), "which is not inside the directory"),
        (edit(lambda m: m["source"].update(main="../net.py")), "which is not inside the directory"),
        (edit(lambda m: m["source"].update(kind="url")), "unknown kind of model source"),
        (edit(lambda m: m["files"].pop("source/net.py")), "does not list source/net.py"),
        (edit(lambda m: m["files"].pop("plan.json")), "does not list plan.json"),
        (edit(lambda m: m["files"].pop("model.safetensors")), "lists no weights"),
        (edit(lambda m: m["source"].update(entry="other")), "cannot be built again: net.py has no 'other'"),
        (edit(lambda m: m["ties"].update({"a": "b"})), "the rebuilt model has no a"),
        (edit(lambda m: m["ties"].update({"fc.weight": "embed.weight"})), "1 unexpected (fc.weight)"),
    ],
)
def test_an_edited_manifest(written: tuple[nn.Module, Path], change: Edit, message: str) -> None:
    _, out = written
    data = json.loads((out / "manifest.json").read_text())
    change(data)
    (out / "manifest.json").write_text(json.dumps(data))
    assert message in str(refuse(out))


@pytest.mark.parametrize("name", ["torch.py", "helper.py", "sub/more.py", "net.pyc", "helper.so"])
def test_files_added_to_the_source(written: tuple[nn.Module, Path], name: str) -> None:
    _, out = written
    write_source((out / "source" / name).parent, "raise SystemExit", Path(name).name)
    assert f"source/{name} was added" in str(refuse(out))


def test_bytecode_of_another_program_is_not_read(written: tuple[nn.Module, Path]) -> None:
    _, out = written
    write_source(out / "source" / "__pycache__", "no bytecode", f"net.cpython-3{sys.version_info.minor}.pyc")
    load_directory(out)
    (out / "source" / "link").symlink_to(out)
    assert "source/link is a symbolic link" in str(refuse(out))


def test_a_source_folder_that_is_a_link(written: tuple[nn.Module, Path]) -> None:
    _, out = written
    (out / "source").rename(out.parent / "away")
    (out / "source").symlink_to(out.parent / "away")
    assert "symbolic link" in str(refuse(out))


def sign(out: Path, name: str) -> None:
    """Bring the manifest up to date with a file that a test changed on purpose."""
    data = json.loads((out / "manifest.json").read_text())
    record = file_record(out / name)
    data["files"][name] = {"sha256": record.sha256, "size": record.size}
    (out / "manifest.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("source/net.py", "Linear(8, 8)", "Linear(8, 9)", "fc.bias is [8] in the file and [9] in the rebuilt model"),
        ("source/net.py", "self.fc", "self.fd", "the plan does not fit the model: KeyError"),
        ("source/net.py", '"scale"', '"other"', "1 missing (other); 1 unexpected (scale)"),
        ("source/net.py", "self.head.weight = ", "1 / 0 #", "ZeroDivisionError"),
        ("plan.json", '"schema": 2', '"schema": 7', "the plan has schema 7"),
        ("plan.json", "te.Linear", "te.Nothing", "unknown replacement"),
        ("plan.json", "{", "[", "plan.json is not readable JSON"),
        ("model.safetensors", "embed", "embex", "unexpected (embex.weight)"),
        ("buffers.safetensors", "random", "ran.om", "has no place for the buffer ran.om"),
    ],
)
def test_files_that_no_longer_fit(written: tuple[nn.Module, Path], name: str, old: str, new: str, message: str) -> None:
    _, out = written
    data = (out / name).read_bytes().replace(old.encode(), new.encode())
    (out / name).write_bytes(data)
    sign(out, name)
    assert message in str(refuse(out))


def test_weights_that_are_no_safetensors(written: tuple[nn.Module, Path]) -> None:
    _, out = written
    (out / "model.safetensors").write_bytes(b"\x80\x04pickle")
    sign(out, "model.safetensors")
    assert "model.safetensors cannot be read" in str(refuse(out))


def test_shards_that_are_not_listed(tmp_path: Path) -> None:
    convert_file(write_source(tmp_path / "in", PLAIN), tmp_path / "out", shard_bytes=300)
    index = tmp_path / "out" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"embed.weight": "../w.safetensors"}}))
    sign(tmp_path / "out", index.name)
    assert "names '../w.safetensors', which manifest.json does not list" in str(refuse(tmp_path / "out"))
    index.write_text("{}")
    sign(tmp_path / "out", index.name)
    assert "is damaged" in str(refuse(tmp_path / "out"))


def test_the_module_of_another_directory_is_not_taken(tmp_path: Path) -> None:
    for folder, size in (("one", 3), ("two", 5)):
        write_source(tmp_path / folder, f"N = {size}", "sizes_of_net.py")
        path = write_source(tmp_path / folder, "import sizes_of_net\nfrom torch import nn\nmodel = nn.Linear(sizes_of_net.N, 2)")
        convert_file(path, tmp_path / f"{folder}_te")
    loaded = [load_directory(tmp_path / f"{folder}_te") for folder in ("one", "two", "one")]
    assert [next(model.parameters()).shape[1] for model in loaded] == [3, 5, 3]
