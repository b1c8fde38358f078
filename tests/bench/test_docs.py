"""The blocks of docs/bench.md run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from te_convert.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_block_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "docs/bench.md", "exec"), {"__name__": "docs"})
    assert capsys.readouterr().out


def test_options_exist() -> None:
    shown = CliRunner().invoke(main, ["bench", "--help"]).stdout
    named = set(re.findall(r"--[a-z][a-z-]*", PAGE))
    assert BLOCKS
    assert named
    assert all(name in shown for name in named), named
