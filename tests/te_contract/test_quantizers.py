"""Emulated recipes against Transformer Engine's own modules under its pure-Python reference quantizers, forward and backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_convert.reference.emulation import emulate
from te_convert.reference.quantize import E4M3, E5M2, Format, quantize_tensor
from te_convert.replacements.specs import LayerNormLinearSpec, LayerNormMLPSpec, LinearSpec, MultiheadAttentionSpec, Spec
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu
from tests.te_contract.test_modules import FORMS, layer, randn
from tests.te_contract.test_modules import build as build_module

pytestmark = needs_te

ROWS, IN, OUT = 32, 64, 96
SEQUENCES = (4, 8, IN)


@pytest.fixture(autouse=True)
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with te_on_cpu() as package:
        from transformer_engine.pytorch.module import base

        monkeypatch.setattr(base.tex, "bgrad_quantize", bgrad_quantize)
        yield package


def bgrad_quantize(gradient: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """As TE's kernel: the bias's gradient is that of what comes in, not of its quantised form."""
    return gradient.float().reshape(-1, gradient.shape[-1]).sum(0).to(gradient.dtype), quantizer(gradient)


def build(spec: Spec, backend: str) -> nn.Module:
    """With biases that bfloat16 can hold: TE rounds a float32 bias to it."""
    module = build_module(spec, backend)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.copy_(parameter.bfloat16())
    return module


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_current_scaling_is_bit_equal(fmt: Format, dtype: torch.dtype) -> None:
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingQuantizerRef

    assert fmt.dtype is not None
    for seed in range(50):
        x = (randn(48, 33, seed=seed) * 10.0 ** (seed % 9 - 4)).to(dtype)
        theirs: Any = CurrentScalingQuantizerRef(fmt.dtype).quantize(x)
        ours = quantize_tensor(x, fmt)
        assert torch.equal(ours.data.to(fmt.dtype).view(torch.uint8), theirs.data.view(torch.uint8))
        assert torch.equal(ours.scale_inv.view(1), theirs.scale)


def run(
    module: nn.Module, context: AbstractContextManager[Any], dtype: torch.dtype, shape: tuple[int, ...], **options: Any
) -> dict[str, Tensor]:
    """Output and gradients."""
    x, gradient = randn(*shape, seed=91, dtype=dtype).requires_grad_(), None
    with context:
        y = module(x, **options)
        gradient = randn(*y.shape, seed=92, dtype=dtype)
        y.backward(gradient)  # inside, as TE's custom quantizers want it
    assert x.grad is not None
    return {"y": y, "x": x.grad, **{name: p.grad for name, p in module.named_parameters() if p.grad is not None}}


SPECS: dict[str, Callable[[str, bool], Spec]] = {
    "Linear": lambda dtype, bias: LinearSpec(IN, OUT, bias, dtype),
    "LayerNormLinear": lambda dtype, bias: LayerNormLinearSpec(IN, OUT, bias, 1e-5, "RMSNorm", False, dtype),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_current_scaling_of_modules(name: str, dtype: str, te: Any) -> None:
    assert_same(SPECS[name](dtype, True), current_scaling(te), "fp8-current", dtype)


def test_nvfp4_of_a_linear(te: Any) -> None:
    from transformer_engine.common.recipe import CustomRecipe
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import nvfp4_ref_rht_2d_factory

    recipe = te.autocast(enabled=True, recipe=CustomRecipe(qfactory=nvfp4_ref_rht_2d_factory))
    assert_same(LinearSpec(IN, OUT, False, "float32"), recipe, "nvfp4", "float32")


@pytest.fixture
def layout_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """TE's MLP asks for the gradient of fc1's weight with grad=False, by which its custom product takes it for a forward."""
    from transformer_engine.pytorch.cpp_extensions import gemm

    custom_gemm = gemm.custom_gemm

    def told_by_layout(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(custom_gemm).bind(*args, **kwargs).arguments
        return custom_gemm(**{**given, "grad": given.get("grad", False) or given.get("layout", "TN") != "TN"})

    monkeypatch.setattr(gemm, "custom_gemm", told_by_layout)


def current_scaling(te: Any) -> AbstractContextManager[Any]:
    from transformer_engine.common.recipe import CustomRecipe
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import current_scaling_ref_factory

    context: AbstractContextManager[Any] = te.autocast(enabled=True, recipe=CustomRecipe(qfactory=current_scaling_ref_factory))
    return context


@pytest.mark.usefixtures("layout_decides")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_current_scaling_of_an_mlp(activation: str, dtype: str, te: Any) -> None:
    spec = LayerNormMLPSpec(IN, OUT, True, 1e-5, "LayerNorm", activation, False, dtype)
    assert_same(spec, current_scaling(te), "fp8-current", dtype)


@pytest.mark.usefixtures("layout_decides")
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_current_scaling_of_an_attention_module(kind: str, te: Any) -> None:
    spec = MultiheadAttentionSpec(IN, 4, 0.0, True, kind, "bshd", "float32")
    options = {"encoder_output": randn(*SEQUENCES, seed=93)} if kind == "cross" else {}
    assert_same(spec, current_scaling(te), "fp8-current", "float32", shape=SEQUENCES, **options)


@pytest.mark.usefixtures("layout_decides")
@pytest.mark.parametrize("form", FORMS)
def test_current_scaling_of_a_transformer_layer(form: str, te: Any) -> None:
    spec = replace(layer(**FORMS[form]), hidden_size=IN, ffn_hidden_size=OUT)
    assert_same(spec, current_scaling(te), "fp8-current", "float32", shape=SEQUENCES)


def assert_same(
    spec: Spec,
    recipe: AbstractContextManager[Any],
    name: str,
    dtype: str,
    shape: tuple[int, ...] = (ROWS, IN),
    **options: Any,
) -> None:
    wide = getattr(torch, dtype)
    call: Any = partial(run, dtype=wide, shape=shape, **options)
    theirs = call(build(spec, "te"), recipe)
    ours, plain = call(build(spec, "reference"), emulate(name)), call(build(spec, "reference"), torch.enable_grad())
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert_near(ours[key], value, dtype, key)
    noise, difference = (float((a - theirs["y"]).detach().float().norm()) for a in (plain["y"], ours["y"]))
    assert difference < noise / 10  # the agreement is that of the quantisation, not of the mathematics alone


def assert_near(ours: Tensor, theirs: Tensor, dtype: str, what: str) -> None:
    """Relative to the largest entry."""
    assert ours.dtype == theirs.dtype
    bound = {"float32": 1e-5, "bfloat16": 8e-3}[dtype]
    largest = float(theirs.detach().abs().max())
    error = float((ours - theirs).detach().abs().max()) / largest
    assert error < bound, (what, error)
