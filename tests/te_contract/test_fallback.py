"""Real TE modules of every kind leave TE while the model runs, and a real installation that is broken is recognised."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.errors import FallbackWarning
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.runtime.probe import run_probe
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu
from tests.te_contract.test_converted_models import TOLERANCE, Case, backward, every_case, run

pytestmark = needs_te
ALGORITHM = "Unable to find suitable cuBLAS GEMM algorithm"


@pytest.fixture
def te() -> Iterator[Any]:
    with te_on_cpu() as package:
        yield package


def sites(model: nn.Module) -> list[Any]:
    return [module.__dict__[SITE_ATTRIBUTE] for module in model.modules() if SITE_ATTRIBUTE in module.__dict__]


@pytest.mark.usefixtures("te")
@every_case
def test_every_kind_of_module_goes_on_as_its_twin(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model = te_convert.convert(case.model(), case.inputs, backend="reference", allow=case.allow).model
    expected = run(model, case.inputs)
    backward(model, case.inputs)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    te_convert.materialize(model)
    before = run(model, case.inputs)
    torch.testing.assert_close(before, expected, **TOLERANCE)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError(ALGORITHM)

    bases = {
        base
        for module in model.modules()
        for base in type(module).__mro__
        if base.__module__.startswith("transformer_engine.pytorch")
    }
    for base in bases:
        if "forward" in base.__dict__:
            monkeypatch.setattr(base, "forward", fails)
    with pytest.warns(FallbackWarning, match=ALGORITHM) as caught:
        found = run(model, case.inputs)
    assert len(caught) == 1
    assert torch.equal(found, expected)
    left = [site for site in te_convert.fallbacks(model) if site.on_twin]
    assert len(left) == len([record for record in sites(model) if record.backend == "reference"]) > 0
    assert all(site.calls > 0 for site in left)
    model.zero_grad()
    backward(model, case.inputs)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=name)


# ---- real installations --------------------------------------------------------------------------------------------------
Breaking = Callable[[Path], None]


def _remove(pattern: str) -> Breaking:
    def change(packages: Path) -> None:
        (found,) = packages.glob(pattern)
        found.unlink()

    return change


def _version(name: str, version: str) -> Breaking:
    def change(packages: Path) -> None:
        (info,) = packages.glob(f"{name}-*.dist-info")
        metadata = (info / "METADATA").read_text().splitlines()
        info.unlink()
        new = packages / f"{name}-{version}.dist-info"
        new.mkdir()
        (new / "METADATA").write_text(
            "\n".join(f"Version: {version}" if line.startswith("Version:") else line for line in metadata)
        )

    return change


def _stub(pattern: str) -> Breaking:
    def change(packages: Path) -> None:
        (found,) = packages.glob(pattern)
        found.unlink()
        found.write_bytes(b"\x7fELF")

    return change


def _hide(packages: Path) -> None:
    (packages / "transformer_engine").rename(packages / "gone")


LIBRARIES = "transformer_engine/wheel_lib"
REAL: dict[str, tuple[tuple[Breaking, ...], str]] = {
    "whole": ((), ""),
    "meta package only": (
        (_remove("transformer_engine_cu13-*.dist-info"), _remove("transformer_engine_torch-*.dist-info")),
        "te.core-missing",
    ),
    "no core library": ((_remove(f"{LIBRARIES}/libtransformer_engine.so"),), "te.core-library-missing"),
    "no torch extension": ((_remove(f"{LIBRARIES}/transformer_engine_torch*.so"),), "te.torch-extension-missing"),
    "versions differ": ((_version("transformer_engine_cu13", "2.19.0"),), "te.version-mismatch"),
    "corrupt core": ((_stub(f"{LIBRARIES}/libtransformer_engine.so"),), "te.library-corrupt"),
    "corrupt extension": ((_stub(f"{LIBRARIES}/transformer_engine_torch*.so"),), "te.library-corrupt"),
    "dependency absent": ((_remove("onnxscript"),), "te.dependency-missing"),
    "absent": ((_remove("transformer_engine-*.dist-info"), _hide), "te.absent"),
}


def shadow_environment(folder: Path) -> tuple[str, Path]:
    """A virtual environment whose packages are links to this one's, but for TE's own folders, which are made of links."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    real = Path(sysconfig.get_paths()["purelib"])
    for entry in real.iterdir():
        if entry.name != "transformer_engine":
            (packages / entry.name).symlink_to(entry)
    for place, inner in ((Path("transformer_engine"), ("wheel_lib",)), (Path(LIBRARIES), ())):
        (packages / place).mkdir()
        for entry in (real / place).iterdir():
            if entry.name not in (*inner, "__pycache__"):
                (packages / place / entry.name).symlink_to(entry)
    return str(folder / "bin" / "python"), packages


@pytest.mark.slow
@pytest.mark.parametrize("row", REAL)
def test_a_real_installation_that_is_broken_has_its_code(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, code = REAL[row]
    python, packages = shadow_environment(tmp_path)
    for change in changes:
        change(packages)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    said = subprocess.run(
        [python, "-c", "import json, sys; print(json.dumps(sys.path))"], capture_output=True, text=True, check=True
    )
    found = run_probe(python, [entry for entry in json.loads(said.stdout) if entry])
    assert found.code == code, found
