"""The check command on real models: every exit code, what goes where, and golden figures."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.cli.conftest import Run

# The eps comes from outside, as it would from a package that was upgraded.
NET = """
import os

import torch
from torch import nn

print("the model's code prints")


def build_model():
    torch.manual_seed(0)
    eps = float(os.environ.get("NET_EPS", "1e-5"))
    return nn.Sequential(nn.LayerNorm(16, eps=eps), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def example_inputs():
    return (torch.randn(4, 16, generator=torch.Generator().manual_seed(0)),)
"""
NOTHING = "from torch import nn\nmodel = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with net.py, outside of GitHub."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE", "NET_EPS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


@pytest.fixture
def directory(run: Run) -> str:
    assert run("net.py", "--out", "net_te", "-q").exit_code == 0
    return "net_te"


def files() -> set[str]:
    return {path.name for path in Path().iterdir()}


def last(result: Result) -> list[str]:
    return [line for line in result.stderr.splitlines() if line != "the model's code prints"]


def test_a_model_that_holds(run: Run) -> None:
    result = run("check", "net.py")
    assert result.exit_code == 0
    first = result.stdout.splitlines()[0]
    assert re.fullmatch(r"parity passed on reference twins \(cpu\) · \d+ runs and 2 sites compared", first)
    assert last(result) == []
    assert "the model's code prints" not in result.stdout
    assert files() == {"net.py"}


def test_a_directory_that_holds(run: Run, directory: str) -> None:
    before = {path: path.read_bytes() for path in Path(directory).rglob("*") if path.is_file()}
    result = run("check", directory)
    assert result.exit_code == 0
    assert "the inputs are example_inputs of the stored source" in result.stdout
    assert {path: path.read_bytes() for path in Path(directory).rglob("*") if path.is_file()} == before


def test_a_named_entry_and_given_inputs(run: Run) -> None:
    result = run("check", "net.py:build_model", "--inputs", "float32[3,16]", "--exclude", "0", "--json")
    data = json.loads(result.stdout)
    assert (result.exit_code, data["converted"]) == (0, ["1", "3"])
    assert data["parity"]["scenarios"][0]["numel"] == 3 * 8


def test_a_directory_on_given_inputs(run: Run, directory: str) -> None:
    data = json.loads(run("check", directory, "--inputs", "float32[5,16]", "--json").stdout)
    assert data["parity"]["scenarios"][0]["numel"] == 5 * 8
    assert "the inputs are example_inputs of the stored source" not in data["notes"]


def test_parity_that_fails(run: Run, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NET_EPS", "1e-2")
    result = run("check", directory, "-q")
    assert result.exit_code == 3
    lines = result.stdout.splitlines()
    assert lines[0].startswith("parity FAILED on reference twins (cpu) · ")
    figure = r"SQNR \d\d\.\d dB, max rel \d\.\de-0\d; bound: "
    assert re.fullmatch(rf"site 1\.layernorm_1: {figure}SQNR >= 200 dB in float64", lines[1])
    assert re.fullmatch(rf"scenario inputs: {figure}SQNR >= 90 dB and max rel <= 2e-05", lines[2])
    assert all(line.startswith("scenario inputs") for line in lines[2:])


def test_a_site_that_was_put_back_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from te_convert.rewrite import apply as rewrite_apply

    convert: Callable[..., Any] = rewrite_apply._convert

    def wrong(module: Any, decision: Any, backend: str) -> Any:
        converted = convert(module, decision, backend)
        if decision.fqn == "3":
            converted._parameters["bias"] = None
        return converted

    monkeypatch.setattr(rewrite_apply, "_convert", wrong)
    result = run("check", "net.py", "-q")
    assert result.exit_code == 3
    assert re.search(r"^site 3: put back, .+; bound: alone: ", result.stdout, re.MULTILINE)


def test_nothing_to_convert(run: Run) -> None:
    Path("conv.py").write_text(NOTHING)
    result = run("check", "conv.py", "--inputs", "float32[1,3,8,8]", "-q", "--junit", "j.xml")
    assert result.exit_code == 1
    assert result.stdout == ("nothing was converted: 0 sites would run on Transformer Engine · conv.py has nothing to compare\n")
    assert ET.parse("j.xml").getroot().get("failures") == "1"


def test_a_directory_in_which_nothing_was_converted(run: Run) -> None:
    Path("conv.py").write_text(NOTHING)
    assert run("conv.py", "--inputs", "float32[1,3,8,8]", "--out", "conv_te", "-q").exit_code == 1
    assert run("check", "conv_te", "-q").exit_code == 1


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("missing.py",), "error: missing.py does not exist"),
        (("net.py", "--inputs", "x"), "error: input 'x': no sizes in brackets"),
        (("net.py", "--inputs", "float32[4,5]"), "error: the model fails on the example inputs: RuntimeError: "),
        (("net.py", "--golden", "g.json"), "error: the golden file g.json does not exist"),
        (("net.py", "--update-golden"), "error: --update-golden needs --golden FILE."),
        (("net.py", "--junit", "net.py/j.xml"), "error: net.py/j.xml cannot be written"),
        (("net.py", "--golden", "net.py/g", "--update-golden"), "error: net.py/g cannot be written"),
        (("net.py", "--nope"), "error: No such option '--nope'."),
    ],
)
def test_bad_input(args: tuple[str, ...], line: str, run: Run) -> None:
    result = run("check", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    error, hint = last(result)
    assert error.startswith(line)
    assert hint.startswith("hint: ")


def test_a_directory_that_was_tampered_with(run: Run, directory: str) -> None:
    with (Path(directory) / "source" / "net.py").open("a") as file:
        file.write("print('not mine')\n")
    result = run("check", directory)
    assert (result.exit_code, result.stdout) == (2, "")
    assert last(result) == ["error: source/net.py was changed or truncated", "hint: convert the model again, or restore the file"]


def test_a_directory_takes_no_options_of_a_conversion(run: Run, directory: str) -> None:
    result = run("check", directory, "--exclude", "0")
    assert (result.exit_code, last(result)[0]) == (
        2,
        "error: net_te is converted already: options of a conversion mean nothing here",
    )


@pytest.mark.parametrize("target", ["net.py", "net_te"])
def test_a_backend_that_is_not_there(target: str, run: Run, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("check", target, "--backend", "te", "--junit", "j.xml")
    assert (result.exit_code, result.stdout) == (4, "")
    assert last(result)[0] == "error: backend 'te' cannot run here: no CUDA device is available"
    assert ET.parse("j.xml").getroot().get("errors") == "1"


# ---- what machines read ---------------------------------------------------------------------------------------------------


def test_json_is_the_answer_and_nothing_else(run: Run) -> None:
    result = run("check", "net.py", "--json", "--github")
    data = json.loads(result.stdout)
    assert (data["schema"], data["passed"], data["kind"], data["model_class"]) == (1, True, "model", "Sequential")
    assert data["converted"] == ["0", "1", "3"]


def test_junit(run: Run, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NET_EPS", "1e-2")
    assert run("check", directory, "--junit", "reports/j.xml").exit_code == 3
    (suite,) = ET.parse("reports/j.xml").getroot()
    failed = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    assert {"inputs", "1.layernorm_1"} <= set(failed)
    assert suite.get("failures") == str(len(failed))


def test_github(run: Run, directory: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NET_EPS", "1e-2")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(elsewhere / "summary.md"))
    Path("summary.md").write_text("what was there\n")
    result = run("check", directory, "-q")
    assert result.exit_code == 3
    assert "::" not in result.stdout
    lines = last(result)
    assert lines[0].startswith("::error file=net_te/manifest.json,title=te-convert%3A site 1.layernorm_1::SQNR ")
    assert len(lines) == len(result.stdout.splitlines()) - 1
    assert Path("summary.md").read_text().startswith("what was there\n### ❌ te-convert check `net_te`\n")
    assert last(run("check", directory, "-q", "--no-github")) == []


def test_github_is_told_of_errors_too(run: Run) -> None:
    result = run("check", "missing.py", "--github")
    assert result.exit_code == 2
    assert last(result)[0].startswith("::error title=te-convert check missing.py::missing.py does not exist; ")


def test_a_summary_that_cannot_be_written_fails_nothing(run: Run, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(elsewhere / "net.py" / "x"))
    result = run("check", "net.py", "--github")
    assert result.exit_code == 0
    lines = last(result)
    assert lines[0].startswith("::notice file=net.py,title=te-convert::parity passed")
    assert lines[1].startswith("the job summary was not written: ")


# ---- golden figures -------------------------------------------------------------------------------------------------------


def record(run: Run, target: str = "net.py") -> dict[str, Any]:
    result = run("check", target, "--golden", "g.json", "--update-golden", "-q")
    assert result.exit_code == 0
    assert result.stdout.endswith(" · figures recorded in g.json\n")
    data: dict[str, Any] = json.loads(Path("g.json").read_text())
    return data


def write(data: dict[str, Any]) -> None:
    Path("g.json").write_text(json.dumps(data))


def test_the_same_figures_pass_as_model_and_as_directory(run: Run, directory: str) -> None:
    data = record(run)
    assert (data["backend"], data["dtype"], data["converted"]) == ("reference", "float32", ["0", "1", "3"])
    for target in ("net.py", directory):
        result = run("check", target, "--golden", "g.json", "-q")
        assert (result.exit_code, result.stdout.count("\n")) == (0, 1)
        assert result.stdout.endswith(" · as good as in g.json\n")


def upgrade(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    """A library whose linear layer became less accurate, within the bounds of a parity check."""
    from te_convert.reference import Linear

    forward: Any = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: forward(self, x) * (1 + error))


def test_worse_figures_fail_and_name_what_changed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    data = record(run)
    data["versions"]["torch"] = "2.0.0"
    write(data)
    upgrade(monkeypatch, 5e-6)
    assert run("check", "net.py", "-q").exit_code == 0
    result = run("check", "net.py", "--golden", "g.json", "-q", "--junit", "j.xml")
    assert result.exit_code == 3
    assert " figures WORSE than in g.json\n" in result.stdout
    worse = r"SQNR 10\d\.\d dB; bound: recorded ∞ dB, slack"
    assert re.search(rf"^golden inputs \(perturbed\): {worse} 20 dB below 120 dB$", result.stdout, re.MULTILINE)
    assert re.search(rf"^golden 3: {worse} 3 dB below 120 dB$", result.stdout, re.MULTILINE)
    assert re.search(r"^changed since the figures were recorded: torch 2\.0\.0 → ", result.stdout, re.MULTILINE)
    (suite,) = ET.parse("j.xml").getroot()
    assert {case.get("classname") for case in suite.iter("testcase") if case.find("failure") is not None} == {"te_convert.golden"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GITHUB_ACTIONS", "true")
        assert "::error file=net.py,title=te-convert%3A golden 3::SQNR" in run("check", "net.py", "--golden", "g.json").stderr


def test_a_site_and_a_scenario_that_are_gone_fail(run: Run) -> None:
    data = record(run)
    data["scenarios"]["inputs[padded]"] = data["scenarios"]["inputs"]
    write(data)
    result = run("check", "net.py", "--golden", "g.json", "--exclude", "3", "-q")
    assert result.exit_code == 3
    assert result.stdout.splitlines()[1:] == [
        "golden 3: not converted any more; bound: recorded as converted",
        "golden inputs[padded]: not compared any more; bound: recorded as a scenario",
    ]


def test_better_figures_pass_and_are_mentioned(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        upgrade(patch, 5e-6)
        record(run)
    result = run("check", "net.py", "--golden", "g.json")
    assert result.exit_code == 0
    assert re.search(r"^Better than recorded\n  inputs: SQNR ∞ dB, recorded 10\d\.\d dB$", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 9}', '{"schema": 1}'])
def test_a_corrupted_golden_file_is_one_line(content: str, run: Run) -> None:
    Path("g.json").write_text(content)
    result = run("check", "net.py", "--golden", "g.json")
    assert (result.exit_code, result.stdout) == (2, "")
    error, _ = last(result)
    assert "g.json" in error


def test_figures_that_fail_are_never_recorded(run: Run, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NET_EPS", "1e-2")
    result = run("check", directory, "--golden", "g.json", "--update-golden")
    assert result.exit_code == 3
    assert "g.json was not written: only figures of a check that passes are recorded" in result.stdout
    assert "g.json" not in files()


def test_a_golden_file_of_another_model(run: Run) -> None:
    record(run)
    Path("other.py").write_text(NET.replace("return nn.Sequential(", "return Net(") + "\nclass Net(nn.Sequential):\n    pass\n")
    result = run("check", "other.py", "--golden", "g.json")
    assert (result.exit_code, last(result)[0]) == (2, "error: g.json records model class Sequential, and this is Net")
