"""Every spec has valid arguments for each release of Transformer Engine, 2.0 to 2.20, or a reason why the release is too old."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.errors import EnvironmentLacksError
from te_convert.reasons import ReasonCode
from te_convert.replacements.build import module_class, new_module, why_not_built
from te_convert.replacements.experts import grouped_arguments
from te_convert.replacements.specs import DotProductAttentionSpec, GroupedExpertsSpec, LayerNormMLPSpec, LinearSpec, Spec
from te_convert.runtime import backend
from tests.replacements import te_releases
from tests.te_contract.test_modules import SPECS

every_version = pytest.mark.parametrize("version", te_releases.VERSIONS)

SINCE = {"silu": 8, "sreglu": 8, "clamped_swiglu": 10, "glu": 13, "softcap": 20, "softmax_type": 8}
"""Second number of the first release 2.x that knows an activation or an argument."""


def special(spec: Spec) -> str:
    """The one thing of a spec that old releases may lack, or ""."""
    if isinstance(spec, DotProductAttentionSpec):
        return "softcap" if spec.softcap else "softmax_type" if spec.softmax_type != "vanilla" else ""
    return str(getattr(spec, "activation", ""))


@pytest.fixture
def te(version: str, monkeypatch: pytest.MonkeyPatch) -> str:
    te_releases.install(monkeypatch, version)
    return version


def test_the_records_reach_from_2_0_to_2_20() -> None:
    assert list(te_releases.VERSIONS) == [f"2.{minor}" for minor in range(21)]
    assert {te_releases.described("activations", v) is not None for v in te_releases.VERSIONS} == {True}


@every_version
@pytest.mark.report("NVIDIA/Megatron-LM#1280", "huggingface/accelerate#1240", "Lightning-AI/lightning-thunder#809")
def test_each_spec_is_built_or_the_release_is_too_old(te: str) -> None:
    minor = int(te.split(".")[1])
    for spec in SPECS:
        old = not isinstance(spec, GroupedExpertsSpec) and minor < SINCE.get(special(spec), 0)
        why = why_not_built(spec, "te")
        assert bool(why) is old, (spec, why)
        if old:
            assert special(spec) in why
            with pytest.raises(EnvironmentLacksError, match="too old"):
                new_module(module_class(spec, "te"), spec, "te")
        elif not isinstance(spec, GroupedExpertsSpec):
            bound = new_module(module_class(spec, "te"), spec, "te").bound.arguments
            assert_means_the_spec(bound, spec)


def assert_means_the_spec(bound: dict[str, Any], spec: Spec) -> None:
    """Every number and word of the spec arrives under its name, parameters are on the string "meta", and nothing is drawn."""
    renamed = {
        "dtype": "params_dtype" if "params_dtype" in bound else "dtype",
        "eps": "layernorm_epsilon" if "layernorm_epsilon" in bound else "eps",
        "post_layernorm": "output_layernorm",
    }
    for field in dataclasses.fields(spec):
        value, name = getattr(spec, field.name), renamed.get(field.name, field.name)
        given = bound.get(name, bound.get("kwargs", {}).get(name))
        if field.name == "dtype":
            assert given in (getattr(torch, value), None), name
            assert given is not None or isinstance(spec, DotProductAttentionSpec)
        elif field.name == "kv_channels":
            assert given in (value, value[0])
        elif field.name not in ("bias", "softcap", "softmax_type") or field.name in bound:
            assert given == value or (field.name == "softcap" and not value), (field.name, given)
    if not isinstance(spec, DotProductAttentionSpec):
        assert bound.get("device", bound.get("kwargs", {}).get("device")) == "meta"
    for name, make in bound.items():
        if name.endswith("init_method"):
            assert make(weight := torch.ones(2)) is None
            assert torch.equal(weight, torch.ones(2))
    for name in ("return_bias", "return_layernorm_output", "parameters_split", "sequence_parallel"):
        assert name not in bound  # TE's defaults: one tensor out, one weight


@every_version
def test_grouped_products_are_built(te: str) -> None:
    cls = module_class_of_groups()
    args, kwargs = grouped_arguments(cls, 3, 32, 48, "bfloat16")
    bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs).arguments
    assert (bound["num_gemms"], bound["in_features"], bound["out_features"]) == (3, 32, 48)
    assert (bound["bias"], bound["params_dtype"], bound["device"]) == (False, torch.bfloat16, "meta")


def module_class_of_groups() -> type[nn.Module]:
    import transformer_engine.pytorch as te

    cls: type[nn.Module] = te.GroupedLinear
    return cls


CALLED: dict[str, tuple[str, ...]] = {
    "DotProductAttention": (
        "attn_mask_type",
        "window_size",
        "attention_mask",
        "core_attention_bias_type",
        "core_attention_bias",
    ),
    "MultiheadAttention": ("attention_mask", "encoder_output", "attn_mask_type"),
    "TransformerLayer": (
        "attention_mask",
        "self_attn_mask_type",
        "encoder_output",
        "enc_dec_attn_mask",
        "enc_dec_attn_mask_type",
    ),
}
"""What converted modules give by name."""


@every_version
def test_calls_by_name_are_known(version: str) -> None:
    for name, arguments in CALLED.items():
        known = te_releases.signature(te_releases.described(name, version)["forward"]).parameters
        assert known.keys() >= set(arguments)
    assert te_releases.described("fp8_autocast", version) is not None
    assert (te_releases.described("autocast", version) is not None) is (int(version.split(".")[1]) >= 9)
    assert te_releases.described("checkpoint", version) is not None


def test_an_argument_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a release without ``zero_centered_gamma``, and one without the class."""
    te = te_releases.install(monkeypatch, "2.20")
    mlp = next(spec for spec in SPECS if isinstance(spec, LayerNormMLPSpec))
    told = inspect.signature(te.LayerNormMLP.__init__)
    fewer = [parameter for name, parameter in told.parameters.items() if name != "zero_centered_gamma"]
    te.LayerNormMLP.__init__.__signature__ = told.replace(parameters=fewer)
    assert "zero_centered_gamma" in why_not_built(mlp, "te")
    del te.Linear
    assert why_not_built(LinearSpec(16, 16, True, "float32"), "te") == "this Transformer Engine has no Linear"
    assert why_not_built(mlp, "reference") == ""


def test_parts_of_a_fusion_that_the_release_cannot_build_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    te_releases.install(monkeypatch, "2.7")
    monkeypatch.setattr(backend, "_why_not_te", lambda device_type: "")
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(32), model[1:]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = x + self.mlp(self.norm(x))
            return y

    block = Block()
    result = te_convert.convert(block, (torch.randn(2, 4, 32),), backend="te", verify=False)
    told = {site.fqn: [r for r in site.reasons if r.code == ReasonCode.FUSION_TE_TOO_OLD.value] for site in result.report.sites}
    assert all(len(told[fqn]) == 1 and "'silu'" in told[fqn][0].detail for fqn in ("norm", "mlp.1", "mlp.3"))
    assert [(d.fqn, d.replacement) for d in result.plan.converting] == [
        ("norm", "te.LayerNormLinear"), ("mlp.1", "te.LayerNormLinear"), ("mlp.3", "te.Linear"),
    ]  # fmt: skip


def test_a_site_that_the_release_cannot_build_is_left_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    te = te_releases.install(monkeypatch, "2.7")
    del te.LayerNorm
    monkeypatch.setattr(backend, "_why_not_te", lambda device_type: "")
    result = te_convert.convert(nn.Sequential(nn.LayerNorm(32), nn.ReLU()), (torch.randn(2, 4, 32),), backend="te")
    assert not result.converted
    (found,) = result.report.sites[0].reasons
    assert found.code == ReasonCode.RUNTIME_TE_TOO_OLD.value
    assert "no LayerNorm" in found.detail
    assert "upgrade" in found.hint
