"""``te-convert DIR --stream`` and ``te-convert export``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from te_convert.cli import convert as convert_module
from te_convert.cli.main import main
from tests.stream.stream_samples import tensors, write

pytest.importorskip("transformers")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write("llama", tmp_path / "hf")
    return tmp_path / "hf"


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_there_and_back(source: Path, tmp_path: Path) -> None:
    code, out, _ = run(source, "--stream", "--out", tmp_path / "te")
    assert code == 0
    assert "parity of a shallow model passed on reference twins" in out
    assert "the whole model did not run" in out
    code, out, _ = run("export", tmp_path / "te", "--to", "original", "--out", tmp_path / "back")
    assert (code, out) == (0, f"wrote {tmp_path / 'back'} in the original layout\n")
    assert all(torch.equal(value, tensors(source)[key]) for key, value in tensors(tmp_path / "back").items())
    code, _, err = run("export", tmp_path / "te", "--out", tmp_path / "back")
    assert code == 2
    assert "use --force" in err


def test_large_weights_are_streamed_without_asking(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not convert_module.is_large(str(source))
    monkeypatch.setattr(convert_module, "is_large", lambda _: True)
    code, out, _ = run(source, "--out", tmp_path / "te", "-q")
    assert code == 0
    assert "shallow model" in out
    assert (tmp_path / "te" / "ledger.json").is_file()
    code, _, _ = run(source, "--out", tmp_path / "memory", "-q", "--no-stream")
    assert code == 0
    assert not (tmp_path / "memory" / "ledger.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stream", "--inputs", "x:float32[1]"], "--inputs cannot be used with --stream"),
        (["--stream", "--min-sqnr", "20"], "--min-sqnr cannot be used"),
        (["--no-stream", "--resume"], "need --stream"),
        (["--stream", "--dtype", "int8"], "Invalid value for '--dtype'"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], message: str, source: Path, tmp_path: Path) -> None:
    code, _, err = run(source, "--out", tmp_path / "te", *arguments)
    assert code == 2
    assert message in err


def test_only_directories_are_streamed(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import torch\nmodel = torch.nn.Linear(2, 2)\n")
    code, _, err = run(tmp_path / "model.py", "--stream", "--out", tmp_path / "te")
    assert code == 2
    assert "need a Transformers directory" in err


def test_export_of_something_else(source: Path, tmp_path: Path) -> None:
    code, _, err = run("export", source, "--out", tmp_path / "back")
    assert code == 2
    assert "it has no manifest.json" in err
