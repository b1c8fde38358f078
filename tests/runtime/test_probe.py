"""Broken installs of TE are recognised by a stable code, never raised, and never imported in this process."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from te_convert.errors import EnvironmentLacksError, FallbackWarning
from te_convert.runtime import backend, causes, probe
from te_convert.runtime.doctor import Check
from te_convert.runtime.packages import Packages, find_packages
from te_convert.runtime.probe import TransformerEngineProbe, describe_environment, distribution_version
from tests.runtime import shadow
from tests.runtime.doctoring import checks_of
from tests.runtime.shadow import ROWS, Shadow


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.report(
    "NVIDIA/TransformerEngine#1684",
    "NVIDIA/TransformerEngine#906",
    "NVIDIA/TransformerEngine#756",
    "NVIDIA/TransformerEngine#1853",
    "NVIDIA/TransformerEngine#1541",
    "NVIDIA/TransformerEngine#1284",
    "huggingface/accelerate#1475",
)
def test_every_broken_installation_has_its_code(row: str, tmp_path: Path) -> None:
    made, code = ROWS[row]
    found = made.probe(tmp_path)
    assert found.code == code, found
    assert found.importable is (code == "")
    assert "\n" not in found.error
    assert bool(found.error) is bool(code)
    assert "transformer_engine.pytorch" not in sys.modules
    if code:
        (verdict,) = [check for check in checks_of(found) if check.name == "Transformer Engine"]
        assert verdict.ok is False
        assert verdict.code == code
        assert "{" not in verdict.fix.replace("python -c", "")


def test_every_cause_of_a_failed_import_is_reproduced() -> None:
    shown = {code for _, code in ROWS.values() if code} | {"te.import-hangs"}
    assert {cause.code for cause in causes.CAUSES if cause.code.startswith(("te.", "torch."))} == shown


def test_a_fix_names_what_the_installation_needs(tmp_path: Path) -> None:
    found = ROWS["dependency absent"][0].probe(tmp_path)
    (verdict,) = [check for check in checks_of(found) if check.name == "Transformer Engine"]
    assert verdict.fix == "pip install onnxscript"
    assert causes.fill(causes.BY_CODE["te.absent"].fix, Packages(), "12.8") == (
        f"pip install --no-build-isolation 'transformer-engine[pytorch,core_cu12]=={causes.NEWEST_KNOWN}'"
    )


def test_a_computed_product_is_told_from_an_import(tmp_path: Path) -> None:
    found = ROWS["works"][0].probe(tmp_path)
    assert found.computed
    assert found.torch.gpus == (probe.Gpu("a GPU", (9, 0), 80 * 2**30),)
    assert (found.torch.cuda, found.torch.nccl, found.torch.cudnn, found.torch.cxx11_abi) == ("13.0", (2, 30, 4), 91200, True)
    (tmp_path / "full").mkdir()
    assert not ROWS["GPU is full"][0].probe(tmp_path / "full").computed


def test_what_packages_print_does_not_matter(tmp_path: Path) -> None:
    noisy = "import sys; print('banner', end=''); print('warning', file=sys.stderr)\n"
    assert Shadow(outer=noisy, inner=noisy + shadow.WORKS).probe(tmp_path).importable


def test_an_import_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_TIMEOUT_S", 4.0)
    found = Shadow(outer="import time; time.sleep(60)").probe(tmp_path)
    assert found.code == "te.import-hangs"
    assert found.torch.version == "2.14.1"  # what was known before it hung
    assert "4 s" in found.error


def test_an_interpreter_that_does_not_start_is_said(tmp_path: Path) -> None:
    found = probe.run_probe(str(tmp_path / "no-python"), [])
    assert found.code == "torch.broken"
    assert "FileNotFoundError" in found.error


def test_damaged_metadata_counts_as_not_there(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine-1.dist-info").mkdir()
    (tmp_path / "einops-1.0.dist-info").mkdir()
    (tmp_path / "einops-1.0.dist-info" / "METADATA").write_bytes(b"\xff\xfe\x00")
    found = find_packages([str(tmp_path), str(tmp_path / "nowhere")])
    assert (found.te, found.cores, found.needs["einops"]) == (None, {}, None)


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
    monkeypatch.setattr(importlib.util, "find_spec", fails)
    assert probe.find_te() is False


# ---- backend ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "probe_transformer_engine", lambda: TransformerEngineProbe(""))
    return monkeypatch


@pytest.mark.usefixtures("machine")
def test_te_is_chosen_where_it_can_run() -> None:
    assert backend.choose_backend("auto", "cuda") == backend.Backend(
        "te", "Transformer Engine imports and the model is on a CUDA device"
    )
    assert backend.choose_backend("te", "cuda").name == "te"
    assert backend.choose_backend("reference", "cuda").name == "reference"
    assert backend.choose_backend("auto", "cpu").name == "reference"


def test_what_lacks_is_named(machine: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(EnvironmentLacksError, match="the model is on cpu") as caught:
        backend.choose_backend("te", "cpu")
    assert caught.value.exit_code == 4
    backend.warn_missed(backend.choose_backend("auto", "cpu"))  # where nobody expects TE, nothing is missed
    assert not recwarn.list
    machine.setattr(backend, "probe_transformer_engine", lambda: TransformerEngineProbe("te.cudnn-missing", "libcudnn"))
    missed = backend.choose_backend("auto", "cuda")
    assert "libcudnn" in missed.reason
    with pytest.warns(FallbackWarning, match=r"te\.cudnn-missing.*libcudnn"):
        backend.warn_missed(missed)
    machine.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentLacksError, match="no CUDA device"):
        backend.choose_backend("te", "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_real_gpu_is_described() -> None:
    assert describe_environment()["gpus"]


def test_the_type_of_a_check_is_public() -> None:
    import te_convert

    assert all(isinstance(check, Check) for check in checks_of(TransformerEngineProbe("")))
    assert callable(te_convert.doctor)
