"""Which GPU has which recipe: our table says what Transformer Engine's own checks say."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_convert.runtime.recipes import CONDITIONS, why_unavailable
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu

pytestmark = needs_te

CHECKS = {
    "fp8-delayed": "_compute_fp8_support",
    "fp8-current": "_compute_fp8_support",
    "fp8-block": "_compute_fp8_block_scaling_support",
    "mxfp8": "_compute_mxfp8_support",
    "nvfp4": "_compute_nvfp4_support",
}


@pytest.fixture(autouse=True)
def te() -> Iterator[Any]:
    with te_on_cpu() as package:
        yield package


@pytest.mark.parametrize("cuda", ["12.0", "12.1", "12.8", "12.9", "13.0"])
@pytest.mark.parametrize(
    "capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)], ids=str
)
def test_the_table_is_tes(capability: tuple[int, int], cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quantization = importlib.import_module("transformer_engine.pytorch.quantization")
    monkeypatch.setattr(quantization, "get_device_compute_capability", lambda *_: capability)
    monkeypatch.setattr(quantization.tex, "get_cublasLt_version", lambda: 130000)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    major, minor = map(int, cuda.split("."))
    for name in CONDITIONS:
        if not hasattr(quantization, CHECKS[name]):
            pytest.skip("this release has its checks elsewhere")
        able, _ = getattr(quantization, CHECKS[name])()
        assert (why_unavailable(name, capability, (major, minor)) == "") is able, name


def test_the_names_are_tes() -> None:
    recipes = importlib.import_module("transformer_engine.common.recipe")
    assert all(hasattr(recipes, conditions.name) for conditions in CONDITIONS.values())
