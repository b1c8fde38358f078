from __future__ import annotations

import json
import shlex
from pathlib import Path

from te_convert.errors import InputError
from te_convert.report.html import render_plan_html
from te_convert.report.text import render_plan
from tests.cli.conftest import Run
from tests.cli.fake_api import FakeApi
from tests.report.sample_reports import bert_plan


def test_it_prints_the_plan(run: Run, api: FakeApi) -> None:
    result = run("analyze", "model.py", "--recipe", "fp8", "--exclude", "head")
    assert (result.exit_code, result.stdout) == (0, render_plan(bert_plan()))
    assert api.calls["analyze"] == (
        ("the model", "its own inputs"),
        {"recipe": "fp8", "include": (), "exclude": ("head",), "allow": ()},
    )


def test_json(run: Run, api: FakeApi) -> None:
    result = run("analyze", "model.py", "--json")
    assert json.loads(result.stdout) == bert_plan().to_dict() | {"scenarios": list(bert_plan().scenarios)}


def test_quiet(run: Run, api: FakeApi) -> None:
    expected = "would convert 30 of 30 sites · nothing was changed, nothing was verified\n"
    assert run("analyze", "model.py", "-q").stdout == expected


def test_html(run: Run, api: FakeApi, tmp_path: Path) -> None:
    for arguments in (("analyze", "model.py"), ("model.py", "--dry-run")):
        file = tmp_path / "plan.html"
        result = run(*arguments, "--html", str(file))
        assert (result.exit_code, result.stdout) == (0, render_plan(bert_plan()))
        assert f"wrote {file}" in result.stderr
        command = shlex.join(["te-convert", *arguments, "--html", str(file)])
        assert file.read_text(encoding="utf-8") == render_plan_html(bert_plan(), command)


def test_bad_input(run: Run, api: FakeApi) -> None:
    api.raises["parse_inputs"] = InputError("cannot read 'x'", "NAME:DTYPE[SHAPE]")
    result = run("analyze", "model.py", "--inputs", "x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-2:] == ["error: cannot read 'x'", "hint: NAME:DTYPE[SHAPE]"]
    assert "open_model" not in api.calls
