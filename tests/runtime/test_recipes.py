"""Which recipe a GPU generation has."""

from __future__ import annotations

import pytest
import torch

import te_convert
from te_convert.config import RECIPES
from te_convert.reasons import ReasonCode
from te_convert.runtime import recipes
from te_convert.runtime.recipes import CONDITIONS, best_recipe, why_not_here, why_unavailable

CUDA = (13, 0)
FP8 = {"fp8-delayed", "fp8-current"}
HAS = {
    (7, 5): set(),
    (8, 0): set(),
    (8, 6): set(),
    (8, 9): FP8,
    (9, 0): FP8 | {"fp8-block"},
    (10, 0): FP8 | {"fp8-block", "mxfp8", "nvfp4"},
    (10, 3): FP8 | {"fp8-block", "mxfp8", "nvfp4"},
    (12, 0): FP8 | {"fp8-block", "nvfp4"},
}
every_gpu = pytest.mark.parametrize("capability", HAS)


def test_each_recipe_has_conditions() -> None:
    assert {"bf16", "fp8", *CONDITIONS} == set(RECIPES)


@every_gpu
@pytest.mark.report("NVIDIA/TransformerEngine#1159", "huggingface/accelerate#1348", "NVIDIA/TransformerEngine#2304")
def test_what_each_generation_has(capability: tuple[int, int]) -> None:
    assert {name for name in CONDITIONS if not why_unavailable(name, capability, CUDA)} == HAS[capability]
    for name in CONDITIONS.keys() - HAS[capability]:
        why = why_unavailable(name, capability, CUDA)
        assert name in why
        assert f"this GPU has {capability[0]}.{capability[1]}" in why


@every_gpu
def test_fp8_is_the_best_there_is(capability: tuple[int, int]) -> None:
    best = best_recipe(capability, CUDA)
    assert best == ("mxfp8" if "mxfp8" in HAS[capability] else "fp8-current" if HAS[capability] else None)
    assert (why_unavailable("fp8", capability, CUDA) == "") is (best is not None)


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "needs"),
    [
        ("fp8-block", (9, 0), (12, 8), "CUDA 12.9"),
        ("fp8-block", (9, 0), (12, 9), ""),
        ("fp8-current", (8, 9), (12, 0), "CUDA 12.1"),
        ("fp8-current", (8, 9), None, "this torch has none"),
        ("fp8-current", (9, 0), (12, 0), ""),
        ("mxfp8", (12, 0), CUDA, "below 12.0"),
    ],
)
def test_cuda_counts_too(recipe: str, capability: tuple[int, int], cuda: tuple[int, int] | None, needs: str) -> None:
    why = why_unavailable(recipe, capability, cuda)
    assert needs in why
    assert bool(why) is bool(needs)


def test_nothing_is_said_without_a_gpu_or_in_high_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "current_capability", lambda: None)
    assert why_not_here("mxfp8") == ""
    monkeypatch.setattr(recipes, "current_capability", lambda: (8, 0))
    assert why_not_here(None) == why_not_here("bf16") == ""
    assert "8.9" in why_not_here("fp8")


@pytest.mark.report("NVIDIA/TransformerEngine#1159")
def test_the_report_warns_of_a_recipe_that_this_gpu_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = torch.nn.Linear(32, 32), torch.randn(32, 32)
    for capability, count in (((8, 0), 1), ((8, 9), 0)):
        monkeypatch.setattr(recipes, "current_capability", lambda value=capability: value)
        monkeypatch.setattr(recipes, "torch_cuda", lambda: CUDA)
        report = te_convert.convert(net, (x,), recipe="fp8-current").report
        lines = [line for line in report.warnings if line.startswith(ReasonCode.RECIPE_UNAVAILABLE.value)]
        assert len(lines) == count
        assert all("compute capability 8.9; this GPU has 8.0" in line for line in lines)


def test_a_broken_driver_has_no_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", fails)
    assert recipes.current_capability() is None
