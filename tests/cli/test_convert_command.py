from __future__ import annotations

import html
import json
import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from te_convert.cli.output import print_json, text_style, working
from te_convert.errors import ConversionError
from te_convert.report.html import render_html
from te_convert.report.text import render_headline, render_text
from tests.cli.conftest import Run
from tests.cli.fake_api import FakeApi
from tests.report.sample_reports import nothing, parity_failed, success

ARGS = ("model.py", "--out", "some/dir")


def test_a_success(run: Run, api: FakeApi) -> None:
    result = run(*ARGS)
    assert result.exit_code == 0
    assert result.stdout == render_text(success())
    assert result.stderr.splitlines()[-2:] == ["wrote some/dir", "load it with te_convert.load('some/dir')"]
    assert api.order == ["check_out", "open_model", "convert", "save"]


def test_what_the_api_is_asked_for(run: Run, api: FakeApi) -> None:
    options = ["--force", "--inputs", "a:int64[2]", "--inputs", "b:float32[2]", "--weights", "w.safetensors"]
    options += ["--include", "enc.*", "--include", "dec.*", "--exclude", "head", "--allow", "gelu-tanh"]
    options += ["--recipe", "fp8", "--backend", "reference", "--no-verify", "--strict", "--min-sqnr", "25", "--bisect"]
    assert run(*ARGS, *options).exit_code == 0
    out = Path("some/dir")
    assert api.calls["check_out"] == ((out, True), {})
    assert api.calls["parse_inputs"] == ((("a:int64[2]", "b:float32[2]"),), {})
    assert api.calls["open_model"] == (("model.py", Path("w.safetensors")), {})
    assert api.calls["convert"] == (
        ("the model", ((), {"parsed": True})),
        {
            "recipe": "fp8",
            "backend": "reference",
            "include": ("enc.*", "dec.*"),
            "exclude": ("head",),
            "inplace": True,
            "allow": ("gelu-tanh",),
            "verify": False,
            "strict": True,
            "min_sqnr": 25.0,
            "bisect": True,
            "policy": "none",
            "gpu": None,
            "tokens": None,
            "progress": None,
            "fuse": True,
        },
    )
    assert api.calls["save"][0][1] == out
    assert api.calls["save"][1] == {"source": "the source", "force": True}


def test_the_defaults(run: Run, api: FakeApi) -> None:
    run(*ARGS)
    args, kwargs = api.calls["convert"]
    assert args == ("the model", "its own inputs")
    assert (kwargs["recipe"], kwargs["backend"], kwargs["verify"], kwargs["strict"]) == (None, "auto", True, False)


@pytest.mark.parametrize(
    ("report", "options", "code"),
    [
        (success(), (), 0),
        (success(), ("--no-verify",), 0),
        (nothing(), (), 1),
        (replace(parity_failed(), converted=False), (), 1),
        (parity_failed(), (), 3),
        (replace(success(), parity=replace(success().parity, status="sites-only")), (), 0),
        (replace(success(), parity=replace(success().parity, status="not-verified")), (), 3),
        (replace(success(), parity=replace(success().parity, status="not-verified")), ("--no-verify",), 0),
    ],
)
def test_exit_codes(report: Any, options: tuple[str, ...], code: int, run: Run, api: FakeApi) -> None:
    api.report = report
    result = run(*ARGS, *options)
    assert result.exit_code == code
    assert result.stdout == render_text(report)


def test_an_unchanged_model_is_said_to_be_unchanged(run: Run, api: FakeApi) -> None:
    api.report = nothing()
    assert "wrote some/dir (the model is unchanged)" in run(*ARGS).stderr


def test_json_is_the_report_and_nothing_else(run: Run, api: FakeApi) -> None:
    result = run(*ARGS, "--json")
    command = "te-convert model.py --out some/dir --json"
    assert json.loads(result.stdout) == {**json.loads(success().to_json()), "command": command}
    assert "wrote some/dir" in result.stderr


def test_html_is_written_with_the_command_that_made_it(run: Run, api: FakeApi, tmp_path: Path) -> None:
    file = tmp_path / "new" / "a page.html"
    result = run(*ARGS, "--html", str(file), "-q")
    command = shlex.join(["te-convert", *ARGS, "--html", str(file), "-q"])
    assert file.read_text(encoding="utf-8") == render_html(replace(success(), command=command))
    assert api.calls["save"][0][0].report.command == command
    assert (result.exit_code, result.stdout) == (0, render_headline(success()) + "\n")
    assert f"wrote {file}" in run(*ARGS, "--html", str(file)).stderr


def test_html_of_a_failure_under_strict_is_written(run: Run, api: FakeApi, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    api.raises["convert"] = ConversionError("parity failed", "see the report", report=parity_failed())
    assert run(*ARGS, "--strict", "--html", str(file)).exit_code == 3
    assert render_headline(parity_failed()).splitlines()[0] in html.unescape(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("arguments", [ARGS, ("model.py", "--dry-run"), ("analyze", "model.py")])
def test_html_that_cannot_be_written_is_refused_before_the_work(
    arguments: tuple[str, ...], run: Run, api: FakeApi, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "page.html"):
        result = run(*arguments, "--html", str(place))
        assert (result.exit_code, result.stdout, api.order) == (2, "", [])
        assert result.stderr.splitlines() == [
            f"error: {place} cannot be written",
            "hint: name a file in a directory that can be written",
        ]


def test_json_stays_valid_with_figures_that_json_lacks(run: Run, api: FakeApi) -> None:
    def reject(name: str) -> Any:
        raise AssertionError(name)

    api.report = parity_failed()
    data = json.loads(run(*ARGS, "--json").stdout, parse_constant=reject)
    assert {site["sqnr_db"] for site in data["parity"]["sites"]} == {"inf", "nan"}


def test_print_json_turns_every_odd_float_into_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": (1.5, math.inf), "b": [-math.inf, {"c": math.nan}]})
    assert json.loads(capsys.readouterr().out) == {"a": [1.5, "inf"], "b": ["-inf", {"c": "nan"}]}


def test_quiet_prints_the_verdict_and_is_silent_otherwise(run: Run, api: FakeApi) -> None:
    result = run(*ARGS, "-q")
    assert result.stdout == render_headline(success()) + "\n"
    assert all(line.startswith("the model's code prints") for line in result.stderr.splitlines())


@pytest.mark.parametrize("options", [("--dry-run",), ("--dry-run", "--out", "d")])
def test_a_dry_run_analyzes(options: tuple[str, ...], run: Run, api: FakeApi) -> None:
    result = run("model.py", *options)
    assert result.exit_code == 0
    assert result.stdout == run("analyze", "model.py").stdout
    assert set(api.order) == {"open_model", "analyze"}


def test_prints_of_the_model_go_to_stderr(run: Run, api: FakeApi) -> None:
    result = run(*ARGS)
    assert "the model's code prints" not in result.stdout
    assert "the model's code prints in open_model" in result.stderr


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with working() as progress:
        assert progress is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with working(quiet=True) as progress:
        assert progress is None
    with working() as progress:
        assert progress is not None
        progress("verify [bold]", 1, 2)
        progress("verify [bold]", 2, 2)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "verify [bold]" in shown.err


@pytest.mark.parametrize(
    ("environment", "color"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colour_on_a_terminal(environment: dict[str, str], color: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert text_style() == {"width": 100, "color": False}
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "500")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert text_style() == {"width": 140, "color": color}
