"""Specs become constructor arguments that fit every TE version, on meta, and survive JSON."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

from te_convert.errors import EnvironmentLacksError, LoadError
from te_convert.replacements.build import constructor_arguments, module_class, parameter_names
from te_convert.replacements.recipes import build_recipe
from te_convert.replacements.specs import (
    LayerNormSpec,
    LinearSpec,
    RMSNormSpec,
    Spec,
    dtype_name,
    spec_from_dict,
    spec_to_dict,
    torch_dtype,
)
from te_convert.rewrite.site import site_class
from tests.replacements import fake_te

SPECS: list[Spec] = [
    LinearSpec(6, 4, bias=True, dtype="bfloat16"),
    LinearSpec(6, 4, bias=False, dtype="float32"),
    LayerNormSpec(6, 1e-6, zero_centered_gamma=False, dtype="float16"),
    RMSNormSpec(6, 1e-6, zero_centered_gamma=True, dtype="float32"),
]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.name}-{spec.dtype}")


def build(spec: Spec, backend: str) -> nn.Module:
    cls = module_class(spec, backend)
    args, kwargs = constructor_arguments(spec, cls)
    return cls(*args, **kwargs)


@every_spec
@pytest.mark.parametrize("version", ["2.0", "2.20"])
def test_te_modules_are_built_on_meta_without_random_numbers_or_warnings(
    spec: Spec, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_te.install(monkeypatch, version)
    before = torch.get_rng_state()
    module, twin = build(spec, "te"), build(spec, "reference")
    assert torch.equal(torch.get_rng_state(), before)
    assert type(module).__module__ == fake_te.__name__
    shapes = {name: (p.shape, p.dtype, p.is_meta) for name, p in module.named_parameters()}
    assert shapes == {name: (p.shape, p.dtype, p.is_meta) for name, p in twin.named_parameters()}
    assert tuple(shapes) == parameter_names(spec)
    assert {dtype for _, dtype, _ in shapes.values()} == {torch_dtype(spec.dtype)}
    assert all(meta for *_, meta in shapes.values())
    for name in ("eps", "zero_centered_gamma"):
        assert getattr(module, name, None) == getattr(twin, name, None) == getattr(spec, name, None)


def test_linear_gets_an_initialiser_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_te.install(monkeypatch)
    spec = SPECS[0]
    args, kwargs = constructor_arguments(spec, module_class(spec, "te"))
    weight = torch.ones(2)
    kwargs["init_method"](weight)
    assert torch.equal(weight, torch.ones(2))
    assert args == (6, 4)
    assert "init_method" not in constructor_arguments(spec, module_class(spec, "reference"))[1]


def test_norms_of_an_older_te_get_params_dtype() -> None:
    class Old(nn.Module):
        def __init__(self, hidden_size: int, eps: float, params_dtype: torch.dtype, zero_centered_gamma: bool, device: str) -> None:
            super().__init__()

    spec = SPECS[2]
    args, kwargs = constructor_arguments(spec, Old)
    assert kwargs["params_dtype"] is torch.float16
    Old(*args, **kwargs)


@every_spec
def test_the_site_class_is_made_once_and_is_a_te_module(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_te.install(monkeypatch)
    cls = site_class(spec, "te")
    assert cls is site_class(spec, "te")
    assert issubclass(cls, module_class(spec, "te"))
    assert cls is not site_class(spec, "reference")


@pytest.mark.parametrize("error", [OSError, ImportError, AssertionError, RuntimeError, FileNotFoundError, StopIteration])
def test_a_te_that_fails_to_import_is_a_lack_of_the_environment(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name.startswith("transformer_engine"):
                raise error("libcudnn_adv.so.9: cannot open shared object file")

    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(EnvironmentLacksError, match="libcudnn_adv") as caught:
        module_class(SPECS[0], "te")
    assert "doctor" in caught.value.hint


@every_spec
def test_specs_survive_json(spec: Spec) -> None:
    assert spec_from_dict(json.loads(json.dumps(spec_to_dict(spec)))) == spec


@pytest.mark.parametrize("data", [{}, {"module": "te.Conv"}, {"module": "te.Linear"}, {**spec_to_dict(SPECS[0]), "extra": 1}])
def test_a_damaged_spec_is_a_load_error(data: dict[str, object]) -> None:
    with pytest.raises(LoadError):
        spec_from_dict(data)


def test_dtypes_have_names() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch_dtype(dtype_name(dtype)) is dtype
    with pytest.raises(LoadError, match="unknown dtype"):
        torch_dtype("nn")


def test_recipes_are_tes_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_te.install(monkeypatch)
    assert isinstance(build_recipe("fp8-delayed"), fake_te.DelayedScaling)
    assert isinstance(build_recipe("mxfp8"), fake_te.MXFP8BlockScaling)
    assert isinstance(build_recipe("fp8"), fake_te.Float8CurrentScaling)
    with pytest.raises(EnvironmentLacksError, match="NVFP4BlockScaling"):
        build_recipe("nvfp4")


def test_fp8_on_a_te_without_current_scaling_is_delayed_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_te.install(monkeypatch, "2.0")
    assert isinstance(build_recipe("fp8"), fake_te.DelayedScaling)


@pytest.mark.parametrize(
    ("capability", "recipe"),
    [
        ((8, 9), "Float8CurrentScaling"),
        ((9, 0), "Float8CurrentScaling"),
        ((10, 0), "MXFP8BlockScaling"),
        ((12, 0), "Float8CurrentScaling"),
    ],
)
def test_fp8_is_the_best_that_the_gpu_has(capability: tuple[int, int], recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_te.install(monkeypatch)
    show_gpu(monkeypatch, capability)
    assert type(build_recipe("fp8")).__name__ == recipe


def show_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    from te_convert.replacements import recipes
    from te_convert.runtime import recipes as table

    for module in (recipes, table):
        monkeypatch.setattr(module, "current_capability", lambda: capability)
        monkeypatch.setattr(module, "torch_cuda", lambda: (13, 0))


@pytest.mark.parametrize("name", ["fp8", "fp8-current", "mxfp8"])
def test_a_gpu_without_the_recipe_is_a_lack_of_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_te.install(monkeypatch)
    show_gpu(monkeypatch, (8, 0))
    with pytest.raises(EnvironmentLacksError, match=r"this GPU has 8\.0"):
        build_recipe(name)
