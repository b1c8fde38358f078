"""What doctor concludes from the facts; it never raises."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import te_convert
from te_convert.config import RECIPES
from te_convert.errors import InputError
from te_convert.runtime import causes, doctor, machine, probe
from te_convert.runtime.doctor import Check, te_would_run
from te_convert.runtime.machine import Driver
from te_convert.runtime.packages import Packages
from te_convert.runtime.probe import TorchFacts, TransformerEngineProbe
from tests.runtime.doctoring import checks_of, on
from tests.runtime.shadow import STALE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"
CPU_ONLY = TransformerEngineProbe("te.absent", "ModuleNotFoundError", torch=TorchFacts("2.14.1+cpu"))
NO_GPU = on()


def failed(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.code for check in checks if check.ok is False}


CASES: dict[str, tuple[TransformerEngineProbe, dict[str, Any], dict[str, str]]] = {
    "runs": (on((9, 0)), {}, {}),
    "two GPUs": (on((9, 0), (9, 0)), {}, {}),
    "GPU too old": (on((7, 5)), {}, {"GPU": "gpu.too-old"}),
    "one of two too old": (on((9, 0), (7, 0)), {}, {"GPU": "gpu.too-old"}),
    "no GPU": (NO_GPU, {}, {"GPU": "gpu.none"}),
    "no driver": (NO_GPU, {"driver": Driver(None)}, {"GPU": "gpu.none", "driver": "driver.absent"}),
    "driver too old": (NO_GPU, {"driver": Driver((570, 86))}, {"GPU": "gpu.none", "driver": "driver.too-old"}),
    "driver old enough for CUDA 12": (on(cuda="12.8"), {"driver": Driver((570, 86))}, {"GPU": "gpu.none"}),
    "driver too old for CUDA 12": (on(cuda="12.8"), {"driver": Driver((524,))}, {"GPU": "gpu.none", "driver": "driver.too-old"}),
    "old driver with a compatibility package": (on((9, 0)), {"driver": Driver((570, 86))}, {}),
    "nvidia-smi fails": (NO_GPU, {"driver": Driver(None, "nvidia-smi failed")}, {"GPU": "gpu.none", "driver": "driver.broken"}),
    "nvidia-smi fails where torch has GPUs": (on((9, 0)), {"driver": Driver(None, "nvidia-smi failed")}, {}),
    "torch for the CPU": (CPU_ONLY, {}, {"torch": "torch.cpu-only", "GPU": "gpu.none", "Transformer Engine": "te.absent"}),
    "old glibc": (
        on((9, 0), code="te.absent", error="none"),
        {"glibc": (2, 27)},
        {"system": "os.glibc-too-old", "Transformer Engine": "te.absent"},
    ),
    "old glibc, and it runs": (on((9, 0)), {"glibc": (2, 27)}, {}),
    "no glibc": (on((9, 0)), {"glibc": None}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_fails_is_named(case: str) -> None:
    seen, machine_, expected = CASES[case]
    checks = checks_of(seen, **machine_)
    assert failed(checks) == expected
    assert te_would_run(checks) is not bool(expected)
    for check in checks:
        assert check.code in {"", *causes.BY_CODE}
        if check.ok is False:
            assert check.consequence
            assert check.fix
    assert json.loads(json.dumps([check.to_dict() for check in checks]))


def test_packages_for_two_versions_of_cuda_are_said_even_when_it_runs() -> None:
    cores = {name: version for name, version in STALE.items() if "-cu" in name}
    checks = checks_of(on((9, 0), packages=Packages(te="2.20.2", cores=cores)))
    assert te_would_run(checks)
    (check,) = [check for check in checks if check.code]
    assert (check.name, check.code) == ("TE packages", "te.mixed-cuda")
    assert check.fix.endswith("'transformer-engine[pytorch,core_cu13]==2.20.2'")


RECIPE_CASES: dict[str, tuple[str, TransformerEngineProbe, str]] = {
    "Hopper has FP8": ("fp8", on((9, 0)), ""),
    "Ampere has bf16": ("bf16", on((8, 0)), ""),
    "Ampere has no FP8": ("fp8", on((8, 0)), "8.9"),
    "Hopper has no MXFP8": ("mxfp8", on((9, 0)), "10.0"),
    "Blackwell has MXFP8": ("mxfp8", on((10, 0)), ""),
    "sm120 has no MXFP8": ("mxfp8", on((12, 0)), "below 12.0"),
    "sm120 has NVFP4": ("nvfp4", on((12, 0)), ""),
    "the other GPU counts": ("mxfp8", on((10, 0), (9, 0)), "10.0"),
    "CUDA is too old": ("fp8-block", on((9, 0), cuda="12.8"), "CUDA 12.9"),
    "TE is too old": (
        "nvfp4",
        TransformerEngineProbe("", torch=on((10, 0)).torch, recipes=("DelayedScaling",)),
        "NVFP4BlockScaling",
    ),
    "no GPU": ("bf16", on(), "no GPU"),
    "TE does not run": ("fp8", on((9, 0), code="te.cudnn-missing", error="cudnn"), "Transformer Engine does not run"),
}


@pytest.mark.parametrize("case", RECIPE_CASES)
def test_a_recipe_can_be_demanded(case: str) -> None:
    recipe, seen, why = RECIPE_CASES[case]
    checks = checks_of(seen, recipe)
    assert checks[-1].name == f"recipe {recipe}"
    assert checks[-1].ok is (why == "")
    assert why in checks[-1].fact
    assert te_would_run(checks) is (why == "")


def test_every_recipe_is_judged() -> None:
    for recipe in RECIPES:
        assert checks_of(on((10, 0)), recipe)[-1].ok is True
    with pytest.raises(InputError, match="unknown recipe"):
        te_convert.doctor("fp5")


class OddError(Exception):
    def __str__(self) -> str:
        return "a message\nof two lines"


PROBES: dict[str, tuple[Any, Any]] = {
    "probe_transformer_engine": (doctor, on((9, 0))),
    "find_driver": (machine, Driver((580,))),
    "find_glibc": (machine, (2, 36)),
    "find_nvcc": (machine, ""),
    "find_compiler": (machine, ""),
}


@pytest.mark.parametrize("error", [RuntimeError, StopIteration, SystemExit, OSError, OddError, MemoryError, AssertionError])
@pytest.mark.parametrize("name", PROBES)
def test_doctor_never_raises(error: type[BaseException], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise error

    for each, (place, answer) in PROBES.items():
        monkeypatch.setattr(place, each, fails if each == name else lambda answer=answer: answer)
    checks = doctor.run_checks("fp8")
    assert te_would_run(checks) is (name != "probe_transformer_engine")
    assert "doctor.internal" in {check.code for check in checks}


# ---- tools -------------------------------------------------------------------------------------------------------------
def program(body: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(f"#!{sys.executable}\n{body}\n")
        path.chmod(0o755)

    return write


@pytest.mark.parametrize(
    ("body", "version", "error"),
    [
        ("print('580.65.06')", (580, 65, 6), ""),
        ("import sys; print('NVIDIA-SMI has failed'); sys.exit(9)", None, "exit status 9: NVIDIA-SMI has failed"),
        ("import os; os.kill(os.getpid(), 11)", None, "exit status -11"),
        ("import sys; sys.stdout.buffer.write(bytes(range(256)))", None, ""),
        ("import time; time.sleep(60)", None, "does not answer"),
        ("", None, ""),
    ],
)
def test_nvidia_smi_can_fail_in_any_way(
    body: str, version: tuple[int, ...] | None, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(body)(tmp_path / "nvidia-smi")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "_DRIVER_FILE", tmp_path / "none")
    monkeypatch.setattr(machine, "_TIMEOUT_S", 1.0)
    found = machine.find_driver()
    assert found.version == version
    assert error in found.error
    assert bool(found.error) is bool(error)


def test_the_kernel_module_tells_the_driver_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "_DRIVER_FILE", tmp_path / "version")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\nGCC version: 12.2.0\n"
    )
    assert machine.find_driver() == Driver((535, 183, 1))
    (tmp_path / "nvidia-smi").write_text("no program")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert machine.find_driver().version == (535, 183, 1)
    assert "nvidia-smi" in machine.find_driver().error


def test_compilers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program("print('Cuda compilation tools, release 13.0, V13.0.88')")(tmp_path / "nvcc")
    program("print('g++ 12.2.0\\nmore')")(tmp_path / "g++")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert machine.find_nvcc() == f"13.0 ({tmp_path / 'nvcc'})"
    assert machine.find_compiler() == "g++ 12.2.0"
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setattr(machine, "_USUAL_TOOLKIT", tmp_path / "none")
    assert machine.find_nvcc() == machine.find_compiler() == ""


# ---- in reports --------------------------------------------------------------------------------------------------------
def test_a_report_embeds_the_verdict_and_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(doctor, "probed", lambda: None)
    monkeypatch.setattr(subprocess, "run", fails)
    net = torch.nn.Sequential(torch.nn.Linear(16, 16))
    verdict = te_convert.convert(net, (torch.randn(2, 16),), backend="reference").report.to_dict()["environment"]["doctor"]
    assert verdict["code"] in causes.BY_CODE or torch.cuda.is_available()
    assert verdict["te_would_run"] is (False if verdict["code"] else None)


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        (on((9, 0)), ""),
        (on(), "gpu.none"),
        (CPU_ONLY, "te.absent"),
        (on((9, 0), code="te.kernel-fails", error="x"), "te.kernel-fails"),
    ],
)
def test_what_was_probed_before_is_what_a_report_says(
    seen: TransformerEngineProbe, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probed", lambda: seen)
    assert doctor.brief() == {"te_would_run": not code, "code": code}


def test_nothing_is_probed_for_a_report() -> None:
    before = probe.probe_transformer_engine.cache_info()
    probe.probed()
    assert probe.probe_transformer_engine.cache_info().misses == before.misses


# ---- the page ----------------------------------------------------------------------------------------------------------
def test_the_page_lists_every_code_with_its_meaning_and_fix() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \| (.*) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    expected = [(cause.code, cause.meaning, f"`{cause.fix}`" if cause.is_command else cause.fix) for cause in causes.CAUSES]
    lines = "\n".join(f"| `{code}` | {meaning} | {fix} |" for code, meaning, fix in expected)
    assert rows == expected, f"docs/doctor.md: the table should be\n{lines}"


def test_the_page_names_every_driver() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for cuda, driver in causes.MINIMUM_DRIVER.items():
        assert f"| {cuda} | {driver} |" in text


def test_doctor_works_where_torch_does_not_import(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import te_convert; "
        "print([check.code for check in te_convert.doctor() if check.name == 'torch'])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "['torch.broken']", done.stderr
