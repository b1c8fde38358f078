from __future__ import annotations

import json

import pytest
from syrupy.assertion import SnapshotAssertion

from te_convert.cli.doctor import render_checks
from te_convert.runtime.doctor import Check
from tests.cli.conftest import Run
from tests.cli.fake_api import FakeApi

GOOD = [
    Check("torch", None, "2.0"),
    Check("torch CUDA build", True, "CUDA 12.8"),
    Check("GPU", True, "A GPU (compute capability 8.0)", "FP8 recipes need 8.9; bf16 works", "use recipe=None"),
    Check("Transformer Engine", True, "imports"),
]
BAD = [
    Check("torch", None, "2.0"),
    Check("GPU", False, "no [CUDA] device", "kernels cannot run", "run where there is one"),
    Check("Transformer Engine", False, "OSError: libx.so\n  not found", "twins are used", "reinstall it"),
]


@pytest.mark.parametrize(("checks", "code"), [(GOOD, 0), (BAD, 4)])
def test_the_table(checks: list[Check], code: int, run: Run, api: FakeApi, snapshot: SnapshotAssertion) -> None:
    api.checks = checks
    result = run("doctor")
    assert result.exit_code == code
    assert result.stdout == snapshot


@pytest.mark.parametrize(("checks", "runs", "code"), [(GOOD, True, 0), (BAD, False, 4)])
def test_json(checks: list[Check], runs: bool, code: int, run: Run, api: FakeApi) -> None:
    api.checks = checks
    result = run("doctor", "--json")
    assert result.exit_code == code
    assert json.loads(result.stdout) == {"te_would_run": runs, "checks": [check.to_dict() for check in checks]}


def test_colour() -> None:
    assert "\x1b[" in render_checks(BAD, False, 100, True)
    assert "\x1b[" not in render_checks(BAD, False, 100, False)
