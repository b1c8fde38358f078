"""The README's first block runs by itself, its commands exist, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_first_block_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BLOCKS[0], "README.md", "exec"), {"__name__": "readme"})  # the point of the test; tests/docs runs the others
    assert "parity passed" in capsys.readouterr().out


def test_commands_exist() -> None:
    from te_convert.cli.main import main

    names = set(re.findall(r"^te-convert (\w+) ", README, flags=re.MULTILINE)) - {"model", "path"}
    assert {"analyze", "doctor"} <= names
    assert names <= set(main.commands)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {a or b for a, b in re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", README, flags=re.MULTILINE)}
    assert {"demo", "test"} <= named <= targets


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
