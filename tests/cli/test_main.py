from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

import te_convert
from te_convert.errors import ConversionError, EnvironmentLacksError, InputError, LoadError
from tests.cli.conftest import Run
from tests.cli.fake_api import FakeApi

ARGS = ("model.py", "--out", "d")


@pytest.mark.parametrize("command", [[], ["convert"], ["analyze"], ["estimate"], ["doctor"], ["check"], ["bench"], ["explain"]])
def test_help(command: list[str], run: Run, snapshot: SnapshotAssertion) -> None:
    long, short = run(*command, "--help"), run(*command, "-h")
    assert (long.exit_code, long.stderr) == (0, "")
    assert long.stdout == short.stdout == snapshot


def test_version(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"te-convert {te_convert.__version__}\n", "")


def test_no_arguments_show_the_help_as_an_error(run: Run) -> None:
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == run("--help").stdout


@pytest.mark.parametrize("args", [ARGS, ("convert", *ARGS), ("--out", "d", "model.py"), ("-q", *ARGS)])
def test_convert_is_the_default_command(args: tuple[str, ...], run: Run, api: FakeApi) -> None:
    assert run(*args).exit_code == 0
    assert api.calls["open_model"][0] == ("model.py", None)


def test_a_model_named_like_a_command_can_be_converted(run: Run, api: FakeApi) -> None:
    run("convert", "doctor", "--out", "d")
    assert api.calls["open_model"][0] == ("doctor", None)


def test_a_misspelt_command_is_not_taken_for_a_model(run: Run, api: FakeApi) -> None:
    result = run("analyse", "model.py")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "error: No such model or command 'analyse'. Did you mean 'analyze'?\nhint: te-convert --help lists what it takes\n"
    )
    assert not api.calls


def test_a_file_that_looks_like_a_misspelt_command_is_a_model(
    run: Run, api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "analyse").mkdir()
    assert run("analyse", "--out", "d").exit_code == 0
    assert "convert" in api.calls


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("model.py",), "error: Missing option '--out'."),
        (("--out", "d"), "error: Missing argument 'MODEL'."),
        ((*ARGS, "--recipe", "fp4"), "error: Invalid value for '--recipe': 'fp4' is not one of"),
        ((*ARGS, "--allow", "x"), "error: Invalid value for '--allow': 'x' is not"),
        ((*ARGS, "--backend", "gpu"), "error: Invalid value for '--backend': 'gpu' is not one of"),
        ((*ARGS, "--nope"), "error: No such option '--nope'."),
        ((*ARGS, "extra"), "error: Got unexpected extra argument (extra)"),
    ],
)
def test_usage_errors_are_two_lines_and_exit_2(args: tuple[str, ...], line: str, run: Run, api: FakeApi) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    first, hint = result.stderr.splitlines()
    assert first.startswith(line)
    assert hint == "hint: te-convert convert --help lists what it takes"
    assert not api.calls


@pytest.mark.parametrize("stage", ["check_out", "open_model", "convert", "save"])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("no such file:\n  model.py", "check the\npath"), 2),
        (LoadError("damaged"), 2),
        (ConversionError("3 sites were put back", "see why"), 3),
        (EnvironmentLacksError("no GPU", "use --backend reference"), 4),
    ],
)
def test_errors_of_the_api(stage: str, error: LoadError, code: int, run: Run, api: FakeApi) -> None:
    api.raises[stage] = error
    result = run(*ARGS)
    assert (result.exit_code, result.stdout) == (code, "")
    lines = [line for line in result.stderr.splitlines() if not line.startswith("the model's code")]
    expected = [f"error: {error}".replace("\n ", "")]
    expected += [f"hint: {error.hint}".replace("\n", " ")] if error.hint else []
    assert lines == expected


def test_an_unexpected_exception_is_one_line(run: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    api.raises["convert"] = ZeroDivisionError("division\nby zero")
    result = run(*ARGS)
    assert (result.exit_code, result.stdout) == (70, "")
    assert result.stderr.splitlines()[-2:] == [
        "internal error: ZeroDivisionError: division by zero",
        "hint: run again with TE_CONVERT_DEBUG=1 for the traceback, and please report it",
    ]
    assert "Traceback" not in result.stderr
    monkeypatch.setenv("TE_CONVERT_DEBUG", "1")
    result = run(*ARGS)
    assert result.exit_code == 70
    assert "Traceback (most recent call last)" in result.stderr


def test_an_interrupt_is_130(run: Run, api: FakeApi) -> None:
    api.raises["convert"] = KeyboardInterrupt()
    result = run(*ARGS)
    assert (result.exit_code, result.stdout) == (130, "")
    assert "internal" not in result.stderr


@pytest.mark.parametrize("code", [0, 1, "text", None])
def test_a_model_that_exits_does_not_choose_the_exit_code(code: object, run: Run, api: FakeApi) -> None:
    api.raises["open_model"] = SystemExit(code)
    result = run(*ARGS)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: the model's own code called sys.exit({code!r})" in result.stderr
    assert 'hint: put the script part under if __name__ == "__main__":' in result.stderr


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(te_convert.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([source, str(Path(__file__).parents[2])]), **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False, timeout=60)


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["--version"],
        ["convert", "-h"],
        ["analyze", "-h"],
        ["estimate", "-h"],
        ["doctor", "-h"],
        ["check", "-h"],
        ["m.py"],
    ],
)
def test_torch_is_not_imported_before_it_is_needed(args: list[str]) -> None:
    done = python(
        "import sys\nfrom te_convert.cli.main import main\n"
        f"try:\n    main({args!r})\nfinally:\n    assert not {{'torch', 'rich', 'jinja2'}} & set(sys.modules)\n"
    )
    assert done.returncode == (2 if args == ["m.py"] else 0), done.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = python(
        "import os, sys\n"
        "from te_convert.cli.output import print_answer\n"
        "read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
        "print_answer('x' * 100_000); print_answer('y'); sys.exit(3)\n"
    )
    assert (done.returncode, done.stderr) == (3, "")


def test_a_stdout_without_unicode_shows_question_marks() -> None:
    code = (
        "from te_convert.cli.main import main\n"
        "import click\n@click.command()\ndef show(): click.echo('a \\u2192 b')\n"
        "main.add_command(show)\nmain(['show'])"
    )
    done = python(code, PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stdout) == (0, "a ? b\n"), done.stderr
