"""The cases of tests/gpu on real TE modules without a GPU: so that they are right the day one is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_convert.reference.emulation import emulate
from tests.gpu.kernel_cases import CASES, assert_alike, assert_near, run
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu
from tests.te_contract.test_quantizers import bgrad_quantize, current_scaling, layout_decides

pytestmark = [needs_te, pytest.mark.usefixtures("layout_decides")]
__all__ = ["layout_decides"]


@pytest.fixture(autouse=True)
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with te_on_cpu() as package:
        from transformer_engine.pytorch.module import base

        monkeypatch.setattr(base.tex, "bgrad_quantize", bgrad_quantize)
        yield package


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_high_precision(name: str, dtype: str) -> None:
    found, expected = (run(CASES[name], dtype, backend, "cpu") for backend in ("te", "reference"))
    assert_near(found, expected, CASES[name].bounds[dtype])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.recipes and name != "GroupedLinear"])
def test_current_scaling(name: str, te: Any) -> None:
    found = run(CASES[name], "bfloat16", "te", "cpu", current_scaling(te))
    assert_alike(found, run(CASES[name], "bfloat16", "reference", "cpu", emulate("fp8-current")))


def test_a_wrong_kernel_is_found() -> None:
    """The bounds can be missed: by a gradient that is lost."""
    for name, broken in (("Linear", "bias"), ("LayerNorm", "bias"), ("LayerNormMLP", "fc1_bias"), ("TransformerLayer", "fc2_bias")):
        case = CASES[name]
        found, expected = (run(case, "bfloat16", "reference", "cpu") for _ in range(2))
        key = next(key for key in found if key.endswith(broken))
        found[key] = torch.zeros_like(found[key])
        with pytest.raises(AssertionError):
            assert_near(found, expected, case.bounds["bfloat16"])
        with pytest.raises(AssertionError):
            assert_alike(found, expected)
