"""The pytest plugin as another project's pytest run sees it: in a process of its own, with warnings as errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib import metadata
from pathlib import Path

import pytest

import te_convert

INI = "[pytest]\nminversion = 8.3\naddopts = --strict-markers --strict-config -ra -p no:cacheprovider\nfilterwarnings = error\n"
TESTS = """
import sys

import pytest
import torch
from torch import nn

import te_convert

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pair():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8))
    return net, te_convert.convert(net, (X,)).model


def test_good(pair, te_convert_parity):
    assert te_convert_parity(*pair, (X,), golden="golden/net.json").passed


def test_wrong(pair, te_convert_parity):
    with torch.no_grad():
        pair[1][0].weight.mul_(1.01)
    te_convert_parity(*pair, (X,))


def test_file(te_convert_check):
    te_convert_check("net.py")
"""


def project(folder: Path, tests: str) -> Path:
    folder.mkdir()
    (folder / "pytest.ini").write_text(INI)
    (folder / "test_it.py").write_text(tests)
    (folder / "net.py").write_text("from torch import nn\nmodel = nn.Sequential(nn.Linear(16, 8))\n")
    return folder


def pytest_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A pytest in which this plugin is the only one that is not pytest's own."""
    source = str(Path(te_convert.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-p", "te_convert.testing.plugin", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_fixtures_and_golden_figures(tmp_path: Path) -> None:
    folder = project(tmp_path / "project", TESTS)
    first = pytest_run(folder, "-q", "--te-convert-update-golden")
    assert first.returncode == 1, first.stdout + first.stderr
    assert "1 failed, 2 passed" in first.stdout
    assert "scenario inputs: SQNR " in first.stdout
    assert "testing/__init__.py" not in first.stdout, "the traceback ends in the user's test"
    golden = json.loads((folder / "golden" / "net.json").read_text())
    assert golden["converted"] == ["0"]
    golden["converted"] = ["0", "1"]
    (folder / "golden" / "net.json").write_text(json.dumps(golden))
    second = pytest_run(folder, "-q", "-k", "good", "--junit-xml", "j.xml")
    assert second.returncode == 1
    assert "golden 1: not converted any more" in second.stdout
    (folder / "golden" / "net.json").write_text("{")
    third = pytest_run(folder.parent, "-q", "-k", "good or file", "--junit-xml", "j.xml", "project")
    assert "InputError: the golden file " in third.stdout
    cases = {case.get("name"): case for case in ET.parse(tmp_path / "j.xml").getroot().iter("testcase")}
    properties = {found.get("name"): found.get("value") for found in cases["test_file"].iter("property")}
    assert properties == {"te_convert_backend": "reference", "te_convert_worst_sqnr_db": "inf"}


def test_an_unrelated_run_imports_nothing_heavy(tmp_path: Path) -> None:
    heavy = "{'torch', 'numpy', 'rich', 'click', 'te_convert.api', 'te_convert.check'}"
    folder = project(tmp_path / "project", f"import sys\n\n\ndef test_it():\n    assert not {heavy} & set(sys.modules)\n")
    done = pytest_run(folder, "-q")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_plugin_serves_this_suite(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> None:
    assert pytestconfig.pluginmanager.hasplugin("te_convert"), "run make setup"
    assert pytestconfig.getoption("--te-convert-update-golden") is False
    for name in ("te_convert_parity", "te_convert_check"):
        assert callable(request.getfixturevalue(name))


def test_the_entry_point_is_installed() -> None:
    found = [entry.value for entry in metadata.entry_points(group="pytest11") if entry.name == "te_convert"]
    assert found == ["te_convert.testing.plugin"], "run make setup"
