"""The explain command on a real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

NET = """
import torch
from torch import nn

print("the model's code prints")


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def example_inputs():
    return (torch.randn(4, 16, generator=torch.Generator().manual_seed(0)),)
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)


def test_a_site(run: Run) -> None:
    result = run("explain", "net.py", "1")
    assert (result.exit_code, result.stderr) == (0, "the model's code prints\n")
    assert result.stdout.startswith("1: FUSED into 1.layernorm_1 (te.LayerNormLinear) by the rule norm-linear\n")
    assert "norm-linear         claimed (with 0)" in result.stdout


@pytest.mark.parametrize("args", [(), ("--list",), ("1", "--list")])
def test_all_sites(args: tuple[str, ...], run: Run) -> None:
    result = run("explain", "net.py", *args)
    assert result.exit_code == 0
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [["FUSED", "0"], ["FUSED", "1"], ["CONVERTED", "3"]]


def test_json(run: Run) -> None:
    data = json.loads(run("explain", "net.py", "3", "--json", "--context", "0", "--exclude", "3").stdout)
    assert (data["fqn"], data["decision"]["outcome"], len(data["graph"])) == ("3", "EXCLUDED", 1)
    assert json.loads(run("explain", "net.py", "--json").stdout)["model_class"] == "Sequential"


def test_a_name_that_is_none(run: Run) -> None:
    result = run("explain", "net.py", "9")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-2:] == [
        "error: Sequential has no module '9'",
        "hint: te-convert explain MODEL --list names all sites",
    ]
