from __future__ import annotations

import pytest
import torch

from te_convert.errors import InputError
from te_convert.estimate.gpus import FRACTIONS, GPUS, check_gpu, chosen_gpu, find_gpu
from te_convert.estimate.kernels import FORMATS
from te_convert.runtime.recipes import CONDITIONS, why_unavailable


def test_names_are_forgiving() -> None:
    assert find_gpu(" H200 NVL ").name == "h200-nvl"


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(InputError, match="'v100'") as error:
        find_gpu("v100")
    assert "h100" in error.value.hint
    assert "b300" in error.value.hint


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA B300 SXM6 AC", "b300"),
    ],
)
def test_the_gpu_in_this_machine(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    assert check_gpu(None) == name


def test_a_gpu_without_figures_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T4")
    with pytest.raises(InputError, match="T4"):
        chosen_gpu(None)
    assert chosen_gpu("a100").name == "a100"


def test_no_gpu_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="no GPU to estimate for") as error:
        chosen_gpu(None)
    assert "--gpu" in error.value.hint


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_every_recipe_that_a_gpu_can_run_has_a_peak_and_a_fraction(gpu) -> None:  # type: ignore[no-untyped-def]
    for recipe in CONDITIONS:
        if not why_unavailable(recipe, gpu.capability, (99, 0)):
            assert FORMATS[recipe].peak in gpu.tflops, recipe
            assert FORMATS[recipe].gemm in FRACTIONS[gpu.generation].gemm, recipe
