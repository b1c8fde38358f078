"""Wrong files and options on the command line: two lines on stderr, exit code 2, nothing on stdout, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from te_convert.cli.main import main

HEAD = "import sys\nimport torch\nfrom torch import nn\n"
NET = "class Net(nn.Module):\n  def __init__(self):\n    super().__init__()\n    self.proj = nn.Linear(32, 32)\n"
LINEAR = "model = nn.Linear(2, 2)\n"
RUN = "model = Net()\ndef example_inputs(): return (torch.zeros(2, 32),)\n"

FILES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "model.py has no model"),
    "a number": ("model = 3\n", "`model` is an int"),
    "a class": (HEAD + "model = nn.Linear\n", "model.py has no model"),
    "a function": (HEAD + "def model(x): return x\n", "it has functions model(x)"),
    "a state dict": (HEAD + "model = nn.Linear(2, 2).state_dict()\n", "`model` is an OrderedDict"),
    "two models": (HEAD + "a = nn.Linear(2, 2)\nb = nn.Linear(2, 2)\n", "several models: a, b"),
    "returns None": (HEAD + "def build_model(): pass\n", "build_model() returned a NoneType"),
    "needs arguments": (HEAD + "class M(nn.Module):\n  def __init__(self, d): pass\n", "M in model.py needs arguments: d"),
    "no super": (HEAD + "class M(nn.Module):\n  def __init__(self): self.p = nn.Linear(1, 1)\n", "before Module.__init__() call"),
    "syntax": ("def f(:\n", "model.py:1: syntax error"),
    "tabs": ("if 1:\n\tx = 1\n        y = 2\n", "model.py:3: syntax error"),
    "null bytes": (b"model = 1\0\n", "syntax error: source code string cannot contain null bytes"),
    "raises": (HEAD + "raise RuntimeError('a\\nb')\n", "RuntimeError: a b (model.py:4)"),
    "exits": (HEAD + "sys.exit(0)\n", "model.py called sys.exit() (model.py:4)"),
    "exits when built": (HEAD + "def build_model(): sys.exit(0)\n", "build_model() of model.py called sys.exit()"),
    "recursion": (HEAD + "def build_model(): return build_model()\n", "RecursionError"),
    "imports itself": ("from model import model\n", "ImportError"),
    "needs a package": ("import no_such_package_at_all\n", "ModuleNotFoundError"),
    "memory": (HEAD + "def build_model(): return nn.Linear(1 << 30, 1 << 30)\n", "memory"),
    "forward raises": (HEAD + NET + "  def forward(self, x): raise KeyError('a\\nb')\n" + RUN, "KeyError"),
    "forward exits": (HEAD + NET + "  def forward(self, x): sys.exit(7)\n" + RUN, "the model's own code called sys.exit(7)"),
    "forward recursion": (HEAD + NET + "  def forward(self, x): return self.forward(x)\n" + RUN, "RecursionError"),
    "forward memory": (HEAD + NET + "  def forward(self, x): return torch.empty(1 << 60)\n" + RUN, "memory"),
    "compiled": (HEAD + "model = torch.compile(nn.Linear(2, 2), backend='eager')\n", "is wrapped by torch.compile"),
    "data parallel": (HEAD + "model = nn.DataParallel(nn.Linear(2, 2))\n", "is wrapped by DataParallel"),
    "meta": (HEAD + "with torch.device('meta'):\n  model = nn.Linear(2, 2)\n", "on the meta device"),
    "inputs as array": (HEAD + "model = nn.Linear(2, 2)\ndef example_inputs(): return torch.zeros(2).numpy()\n", "ndarray"),
    "inputs yielded": (HEAD + "model = nn.Linear(2, 2)\ndef example_inputs(): yield 1\n", "generator"),
    "inputs of another width": (HEAD + LINEAR + "def example_inputs(): return torch.zeros(3)\n", "cannot be multiplied"),
    "inputs with arguments": (HEAD + LINEAR + "def example_inputs(n): pass\n", "missing 1 required positional argument"),
    "inputs that exit": (HEAD + LINEAR + "def example_inputs(): sys.exit()\n", "example_inputs() of model.py called sys.exit()"),
}  # fmt: skip

OPTIONS: dict[str, tuple[list[str], str]] = {
    "no file": (["nowhere.py"], "nowhere.py does not exist"),
    "no name": (["model.py:nothing"], "model.py has no 'nothing'"),
    "half a name": (["model.py:"], "'model.py:' does not exist"),
    "no module": (["no_such.module:thing"], "no file, directory or importable module"),
    "weights as a model": (["w.safetensors"], "holds weights, not a model"),
    "an empty folder": (["folder"], "without config.json"),
    "no weights": (["model.py", "--weights", "nowhere.pt"], "nowhere.pt does not exist"),
    "damaged weights": (["model.py", "--weights", "w.safetensors"], "not a readable safetensors file"),
    "folder of weights": (["model.py", "--weights", "folder"], "folder is a directory"),
    "input without sizes": (["model.py", "--inputs", "x"], "no sizes in brackets"),
    "input of another name": (["model.py", "--inputs", "y:float32[2,2]"], "unexpected keyword argument 'y'"),
    "an input too large": (["model.py", "--inputs", "float32[2,99999999999999]"], "is not a size"),
    "recipe": (["model.py", "--recipe", "fp7"], "'fp7' is not one of"),
    "bound": (["model.py", "--min-sqnr", "nan"], "finite number of dB"),
    "stream": (["model.py", "--stream"], "need a Transformers directory"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TE_CONVERT_DEBUG", raising=False)
    (tmp_path / "folder").mkdir()
    (tmp_path / "w.safetensors").write_bytes(b"xx")
    (tmp_path / "model.py").write_text(HEAD + "model = nn.Linear(2, 2)\n")
    return tmp_path


def refuse(text: str, *args: str) -> None:
    result = CliRunner().invoke(main, [*args, "--out", "out"])
    assert (result.exit_code, result.stdout) == (2, ""), result.stderr
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: ")
    assert text in error
    assert hint.startswith("hint: ")
    assert not Path("out").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_used(name: str, folder: Path) -> None:
    content, text = FILES[name]
    (folder / "model.py").write_bytes(content.encode() if isinstance(content, str) else content)
    refuse(text, "model.py")


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_cannot_be_used(name: str, folder: Path) -> None:
    args, text = OPTIONS[name]
    refuse(text, *args)


@pytest.mark.parametrize("place", ["build", "forward"])
def test_an_interrupt_is_130(place: str, folder: Path) -> None:
    build, forward = ("raise KeyboardInterrupt", "pass") if place == "build" else ("return Net()", "raise KeyboardInterrupt")
    text = f"{HEAD}{NET}  def forward(self, x): {forward}\ndef build_model(): {build}\n"
    (folder / "model.py").write_text(text + "def example_inputs(): return (torch.zeros(2, 32),)\n")
    result = CliRunner().invoke(main, ["model.py", "--out", "out"])
    assert (result.exit_code, result.stdout) == (130, "")
    assert not Path("out").exists()
