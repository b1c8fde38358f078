"""Tensor-parallel arguments reach TE's constructors in every recorded release, and the twins take their part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_convert.reference.unsupported import NotSupportedError
from te_convert.replacements.build import module_class, new_module
from te_convert.replacements.parallel import Parallel
from te_convert.replacements.specs import (
    DotProductAttentionSpec,
    LayerNormLinearSpec,
    LayerNormMLPSpec,
    LayerNormSpec,
    LinearSpec,
    Spec,
)
from tests.replacements import te_releases

LINEAR = LinearSpec(16, 32, True, "float32")
NORM_LINEAR = LayerNormLinearSpec(16, 32, True, 1e-5, "RMSNorm", False, "float32")
MLP = LayerNormMLPSpec(16, 32, True, 1e-5, "LayerNorm", "swiglu", False, "float32")
ATTENTION = DotProductAttentionSpec(4, (8, 8), 2, None, 0.0, "float32")
CASES: list[tuple[Spec, str, dict[str, Any], dict[str, tuple[int, ...]]]] = [
    (LINEAR, "column", {"parallel_mode": "column"}, {"weight": (16, 16), "bias": (16,)}),
    (LINEAR, "row", {"parallel_mode": "row"}, {"weight": (32, 8), "bias": (32,)}),
    (NORM_LINEAR, "column", {"parallel_mode": "column"}, {"layer_norm_weight": (16,), "weight": (16, 16), "bias": (16,)}),
    (MLP, "pair", {"set_parallel_mode": True}, {"fc1_weight": (32, 16), "fc2_weight": (16, 16), "fc2_bias": (16,)}),
    (ATTENTION, "heads", {}, {}),
]
every_case = pytest.mark.parametrize(("spec", "mode", "arguments", "shapes"), CASES)


@every_case
@pytest.mark.parametrize("version", te_releases.VERSIONS)
def test_arguments_reach_the_constructor(
    spec: Any, mode: str, arguments: dict[str, Any], shapes: Any, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del shapes
    te_releases.install(monkeypatch, version)
    group = object()
    module = new_module(module_class(spec, "te"), spec, "te", Parallel(mode, group, 2, 1))
    given = module.__dict__["bound"].arguments
    wanted = {**arguments, "tp_group": group, "tp_size": 2}
    assert {name: given.get(name) for name in wanted} == wanted


@every_case
def test_the_twin_has_one_ranks_part(spec: Any, mode: str, arguments: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    del arguments
    module = new_module(module_class(spec, "reference"), spec, "reference", Parallel(mode, None, 2, 0))
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert found.items() >= shapes.items()
    if spec is ATTENTION:
        y = module(torch.zeros(1, 3, 2, 8), torch.zeros(1, 3, 1, 8), torch.zeros(1, 3, 1, 8))
        assert y.shape == (1, 3, 16)


def test_what_cannot_be_divided() -> None:
    norm = LayerNormSpec(16, 1e-5, False, "float32")
    with pytest.raises(ValueError, match="is not divided among ranks"):
        new_module(module_class(norm, "reference"), norm, "reference", Parallel("column", None, 2, 0))
    with pytest.raises(NotSupportedError, match="32 features cannot be divided among 3"):
        new_module(module_class(LINEAR, "reference"), LINEAR, "reference", Parallel("column", None, 3, 0))
