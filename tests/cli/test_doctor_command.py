from __future__ import annotations

import json

import pytest
from syrupy.assertion import SnapshotAssertion

from te_convert.cli.doctor import render_checks
from te_convert.runtime import doctor
from te_convert.runtime.doctor import Check
from tests.cli.conftest import Run

GOOD = [
    Check("torch", None, "2.0"),
    Check("torch CUDA build", True, "CUDA 12.8"),
    Check("GPU", True, "A GPU (compute capability 8.0)", "FP8 recipes need 8.9; bf16 works", "use recipe=None"),
    Check("Transformer Engine", True, "imports"),
]
BAD = [
    Check("torch", None, "2.0"),
    Check("GPU", False, "no [CUDA] device", "kernels cannot run", "run where there is one"),
    Check("Transformer Engine", False, "OSError: libx.so\n  not found", "twins are used", "reinstall it", "te.import-fails"),
]
LONG = [Check("Transformer Engine", False, "word " * 60, "and " * 60, "pip install " + "x" * 200, "te.import-fails")]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What doctor was asked for; it answers with ``CHECKS``."""
    asked: list[str | None] = []

    def run_checks(recipe: str | None = None) -> list[Check]:
        print("a package prints")  # noqa: T201
        asked.append(recipe)
        return CHECKS

    monkeypatch.setattr(doctor, "run_checks", run_checks)
    return asked


CHECKS: list[Check] = []


@pytest.mark.parametrize(("checks", "code"), [(GOOD, 0), (BAD, 4)])
@pytest.mark.usefixtures("answer")
def test_the_table(checks: list[Check], code: int, run: Run, snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CHECKS", checks)
    result = run("doctor")
    assert result.exit_code == code
    assert result.stdout == snapshot


@pytest.mark.parametrize(("checks", "runs", "code"), [(GOOD, True, 0), (BAD, False, 4)])
def test_json(
    checks: list[Check], runs: bool, code: int, run: Run, answer: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "CHECKS", checks)
    result = run("doctor", "--json", "--strict-for", "mxfp8")
    assert result.exit_code == code
    assert json.loads(result.stdout) == {
        "te_would_run": runs,
        "strict_for": "mxfp8",
        "checks": [check.to_dict() for check in checks],
    }
    assert answer == ["mxfp8"]


@pytest.mark.usefixtures("answer")
def test_the_verdict_names_the_recipe_that_was_demanded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CHECKS", BAD)
    assert "with the recipe fp8 would not run here" in run("doctor", "--strict-for", "fp8").stdout
    unknown = run("doctor", "--strict-for", "fp5")
    assert unknown.exit_code == 2
    assert "fp5" in unknown.stderr


def test_it_fits_in_100_columns() -> None:
    lines = render_checks(LONG, False, 100, False, strict_for="fp8-delayed").splitlines()
    assert max(map(len, lines)) <= 100


def test_colour() -> None:
    assert "\x1b[" in render_checks(BAD, False, 100, True)
    assert "\x1b[" not in render_checks(BAD, False, 100, False)
