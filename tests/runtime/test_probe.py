"""Broken installs of TE are described, never raised, and never imported in this process."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch

import te_convert
from te_convert.errors import EnvironmentLacksError
from te_convert.runtime import backend, doctor, probe
from te_convert.runtime.probe import TransformerEngineProbe, describe_environment, distribution_version

FAILURES = {
    "missing library": ("raise OSError('libcudnn_adv.so.9: cannot open shared object file')", "libcudnn_adv"),
    "undefined symbol": ("raise ImportError('undefined symbol: _ZN3c10')", "undefined symbol"),
    "assertion": ("assert False, 'TE needs torch'", "TE needs torch"),
    "runtime": ("raise RuntimeError('Found no NVIDIA driver')", "no NVIDIA driver"),
    "stop iteration": ("raise StopIteration", "StopIteration"),
    "missing file": ("raise FileNotFoundError('Could not find shared object file')", "shared object"),
    "crash": ("import os; os._exit(9)", "exit status 9"),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit status -9"),
    "silent": ("", "has no Linear"),
    "wrong package": ("Linear = None; del Linear", "has no Linear"),
    "exits silently": ("raise SystemExit(0)", "has no Linear"),
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of this process and its children, with a light torch in front for the children."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "light"), str(tmp_path)]))
    (tmp_path / "light").mkdir()
    (tmp_path / "light" / "torch.py").write_text("")
    monkeypatch.setattr(probe, "probe_transformer_engine", probe.probe_transformer_engine.__wrapped__)
    return tmp_path


def write_te(folder: Path, body: str) -> None:
    package = folder / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "pytorch.py").write_text(body + "\n")


@pytest.mark.parametrize("kind", FAILURES)
def test_a_broken_install_is_described(kind: str, install: Path) -> None:
    body, expected = FAILURES[kind]
    write_te(install, body)
    found = probe.probe_transformer_engine()
    assert (found.installed, found.importable) == (True, False)
    assert expected in found.error
    assert "transformer_engine.pytorch" not in sys.modules


def test_a_working_install_is_found_whatever_it_prints(install: Path) -> None:
    write_te(install, "import sys; print('banner'); print('warning', file=sys.stderr); Linear = object")
    assert probe.probe_transformer_engine() == TransformerEngineProbe(True, True, "", distribution_version("transformer-engine"))


def test_an_import_that_hangs_is_given_up(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_te(install, "import time; time.sleep(60)")
    monkeypatch.setattr(probe, "_TIMEOUT_S", 0.5)
    assert "TimeoutExpired" in probe.probe_transformer_engine().error


def test_no_install_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = probe.probe_transformer_engine.__wrapped__()
    assert (found.installed, found.importable) == (False, False)
    assert "not installed" in found.error


def test_the_environment_is_plain_json(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = describe_environment.__wrapped__()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["torch"] == torch.__version__
    assert distribution_version("no-such-distribution") is None

    def fails(*_: object) -> None:
        raise RuntimeError("driver")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", fails)
    assert describe_environment.__wrapped__()["gpus"] == []


# ---- backend ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "probe_transformer_engine", lambda: TransformerEngineProbe(True, True, "", "2.20"))
    return monkeypatch


@pytest.mark.usefixtures("machine")
def test_te_is_chosen_where_it_can_run() -> None:
    assert backend.choose_backend("auto", "cuda").name == "te"
    assert backend.choose_backend("te", "cuda").name == "te"
    assert backend.choose_backend("reference", "cuda").name == "reference"
    assert backend.choose_backend("auto", "cpu").name == "reference"


def test_what_lacks_is_named(machine: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentLacksError, match="the model is on cpu"):
        backend.choose_backend("te", "cpu")
    machine.setattr(backend, "probe_transformer_engine", lambda: TransformerEngineProbe(True, False, "libcudnn", None))
    assert "libcudnn" in backend.choose_backend("auto", "cuda").reason
    machine.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentLacksError, match="no CUDA device"):
        backend.choose_backend("te", "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_real_gpu_is_described() -> None:
    assert describe_environment()["gpus"]


# ---- doctor ----------------------------------------------------------------------------------------------------------
def checks_by_name() -> dict[str, te_convert.Check]:
    return {check.name: check for check in te_convert.doctor()}


def test_every_failed_check_has_a_consequence_and_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_transformer_engine", lambda: TransformerEngineProbe(False, False, "not installed", None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    checks = checks_by_name()
    failed = [check for check in checks.values() if check.ok is False]
    assert {check.name for check in failed} == {"torch CUDA build", "GPU", "Transformer Engine"}
    assert all(check.consequence and check.fix for check in failed)
    assert not doctor.te_would_run(list(checks.values()))
    json.dumps([check.to_dict() for check in checks.values()])


@pytest.mark.parametrize(("capability", "consequence"), [((8, 0), "8.9"), ((9, 0), "")])
def test_a_gpu_is_judged_by_its_capability(capability: tuple[int, int], consequence: str, machine: pytest.MonkeyPatch) -> None:
    machine.setattr(doctor, "probe_transformer_engine", lambda: TransformerEngineProbe(True, True, "", "2.20"))
    machine.setattr(torch.version, "cuda", "13.0")
    machine.setattr(torch.cuda, "get_device_capability", lambda: capability)
    machine.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    checks = checks_by_name()
    assert checks["GPU"].ok
    assert consequence in checks["GPU"].consequence
    assert bool(checks["GPU"].consequence) is bool(consequence)
    assert doctor.te_would_run(list(checks.values()))


def test_doctor_never_raises(machine: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: unknown error")

    machine.setattr(torch.cuda, "get_device_capability", fails)
    machine.setattr(torch.cuda, "device_count", fails)
    machine.setattr(doctor, "probe_transformer_engine", lambda: TransformerEngineProbe(True, False, "broken", "2.20"))
    checks = checks_by_name()
    assert checks["GPU"].ok is False
    assert "unknown error" in checks["GPU"].fact
    assert "broken" in checks["Transformer Engine"].fact
