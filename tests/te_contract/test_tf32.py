"""float32 models on TE's CUDA kernels, which multiply in TF32: the mapping has float32's bounds, the kernels those of TF32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import te_convert
from te_convert import api, pipeline, reference
from te_convert.runtime.backend import multiplies_in_tf32
from tests.te_contract import te_kernels
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu
from tests.te_contract.test_converted_models import CASES, te_modules

pytestmark = needs_te


def to_tf32(x: Tensor) -> Tensor:
    """Rounded to ten bits of mantissa, ties to even."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return rounded.view(torch.float32)


@pytest.fixture(autouse=True)
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with te_on_cpu() as package:
        rows = te_kernels._rows
        monkeypatch.setattr(te_kernels, "_rows", lambda x: to_tf32(rows(x)))
        for module in (pipeline, api):
            monkeypatch.setattr(module, "multiplies_in_tf32", lambda backend, device: backend == "te")
        yield package


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "blocks", "mixtral", "attention"])
def test_models_pass_on_both(name: str) -> None:
    case = CASES[name]
    original = case.model()
    result = te_convert.convert(original, case.inputs, backend="te", allow=case.allow)
    parity = result.report.parity
    assert parity.passed, result.report
    assert (parity.backend, parity.reverted) == ("te", ())
    assert te_modules(result.model) == case.modules
    assert any("TF32" in note for note in parity.notes)
    assert all("TF32" in scenario.bound or "gradient" in scenario.bound for scenario in parity.scenarios)
    assert min(scenario.figures.sqnr_db for scenario in parity.scenarios) < 90  # the kernels do round
    assert te_convert.verify(original, result.model, case.inputs).passed


def test_the_bounds_of_float32_would_put_every_product_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    monkeypatch.setattr(pipeline, "multiplies_in_tf32", lambda backend, device: False)
    result = te_convert.convert(CASES["gpt2"].model(), CASES["gpt2"].inputs, backend="te")
    assert len(result.report.parity.reverted) > 4


def test_a_wrong_mapping_fails_by_the_bounds_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of 80 dB, which TF32's own noise would hide."""
    forward = reference.Linear.forward
    monkeypatch.setattr(reference.Linear, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs) * 1.0001)
    case = CASES["gpt2"]
    parity = te_convert.convert(case.model(), case.inputs, backend="te").report.parity
    assert {site.fqn for site in parity.reverted} == {"lm_head", *(f"transformer.h.{i}.attn.c_proj" for i in range(2))}
    assert parity.passed


def test_a_wrong_kernel_fails_by_the_bounds_of_tf32(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = te.Linear.forward
    monkeypatch.setattr(te.Linear, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs) * 1.01)
    case = CASES["gpt2"]
    result = te_convert.convert(case.model(), case.inputs, backend="te")
    reverted = {site.fqn for site in result.report.parity.reverted}
    assert reverted == {"lm_head", *(f"transformer.h.{i}.attn.c_proj" for i in range(2))}
    assert result.report.parity.passed
    assert "Linear" not in te_modules(result.model)


def test_a_second_conversion_completes_the_first() -> None:
    case = CASES["gpt2"]
    first = te_convert.convert(case.model(), case.inputs, backend="te", include="transformer.h.0.*").model
    result = te_convert.convert(first, case.inputs, backend="te")
    assert result.report.parity.passed, result.report
    assert te_modules(result.model) == case.modules


def test_only_te_on_cuda_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    pairs = [("te", "cuda"), ("te", "cpu"), ("reference", "cuda")]
    assert [multiplies_in_tf32(*pair) for pair in pairs] == [True, False, False]
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert not multiplies_in_tf32("te", "cuda")
