"""`make new-rule` writes files that pass the checks."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load() -> Any:
    spec = importlib.util.spec_from_file_location("new_rule", ROOT / "scripts" / "new_rule.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests" / "rules").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_rule_and_test_are_clean_and_pass(copy: Path) -> None:
    rule, test, registry = load().write_rule(copy, "in_out")
    for check in (["check"], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *check, str(rule), str(test), str(registry)], cwd=copy, check=True)
    env = {**os.environ, "PYTHONPATH": str(copy / "src")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


@pytest.mark.parametrize(("name", "message"), [("linear", "there is a rule"), ("In-Out", "no name for a module"), ("", "no name")])
def test_a_bad_name_changes_nothing(copy: Path, name: str, message: str) -> None:
    before = (copy / "src/te_convert/rules/registry.py").read_text()
    with pytest.raises(ValueError, match=message):
        load().write_rule(copy, name)
    assert (copy / "src/te_convert/rules/registry.py").read_text() == before
