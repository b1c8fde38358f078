"""The bench command on a real model: exit codes, files, and what goes where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.test_explain_command import NET

FAST = ("--rounds", "2", "--warmup", "1", "--no-compile", "--device", "cpu")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)


def edit(path: Path, change: Any) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def scale(factor: float) -> Any:
    def change(data: Any) -> None:
        for row in data["rows"]:
            row["rounds_ms"] = [factor * each for each in row["rounds_ms"]]

    return change


def test_text_and_file(run: Run) -> None:
    result = run("bench", "net.py", *FAST, "--inference", "--out", "new/b.json")
    assert result.exit_code == 0
    assert result.stdout.startswith("Measured on a CPU with the reference twins.")
    assert result.stderr.splitlines() == ["the model's code prints", "wrote new/b.json"]
    data = json.loads(Path("new/b.json").read_text())
    assert (data["work"], [row["name"] for row in data["rows"]][:2]) == ("inference", ["original", "converted"])


def test_json_quiet_and_recipes(run: Run) -> None:
    data = json.loads(run("bench", "net.py", *FAST, "--json", "--recipe", "mxfp8", "--inputs", "float32[3,16]").stdout)
    assert [row["name"] for row in data["rows"]] == ["original", "converted", "converted, mxfp8"]
    assert data["inputs"] == {"args[0]": "float32[3, 16]"}
    assert len(run("bench", "net.py", *FAST, "-q").stdout.splitlines()) == 2


@pytest.mark.parametrize(("factor", "code"), [(1e3, 0), (1e-3, 3)])
def test_compare(factor: float, code: int, run: Run) -> None:
    assert run("bench", "net.py", *FAST, "--out", "old.json").exit_code == 0
    edit(Path("old.json"), scale(factor))
    result = run("bench", "net.py", *FAST, "--compare", "old.json")
    assert result.exit_code == code
    assert "Compared with old.json (accepted: 1.1×)" in result.stdout
    assert ("SLOWER" in result.stdout) == (code == 3)


def test_another_machine_is_refused_before_anything_is_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("bench", "net.py", *FAST, "--out", "old.json").exit_code == 0
    edit(Path("old.json"), lambda data: data["environment"].update(cpu="another"))
    from te_convert.bench import run as module

    monkeypatch.setattr(module, "_measure", lambda *args: pytest.fail("measured"))
    result = run("bench", "net.py", *FAST, "--compare", "old.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "old.json cannot be compared: its cpu is 'another'" in result.stderr


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("none.py",), "none.py"),
        (("net.py", "--compare", "none.json"), "none.json cannot be read"),
        (("net.py", "--generate", "3"), "has no generate()"),
        (("net.py", "--rounds", "1"), "'--rounds'"),
        (("net.py", "--recipe", "bf16"), "'--recipe'"),
        (("net.py", "--out", "."), "'--out'"),
    ],
)
def test_bad_input(args: tuple[str, ...], line: str, run: Run) -> None:
    result = run("bench", *args, "--no-compile", "--device", "cpu")
    assert (result.exit_code, result.stdout) == (2, "")
    assert any(line in each for each in result.stderr.splitlines() if each.startswith("error: "))
