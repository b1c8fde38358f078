"""One case for each kind of site: a spec, its inputs, and how near TE's kernels have to come to the twin.

The bounds are those of Transformer Engine's own ``tests/pytorch/test_numerics.py``: of ``test_linear_accuracy`` for products
(float32 among them: TE multiplies float32 in TF32), ``test_layernorm_accuracy`` for norms, ``test_dpa_accuracy`` for attention,
``test_gpt_accuracy`` for layers; under a recipe the relative one of its FP8 tests.  The absolute part grows with the largest entry.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.replacements.build import module_class, new_module
from te_convert.replacements.specs import (
    DotProductAttentionSpec,
    GroupedExpertsSpec,
    LayerNormLinearSpec,
    LayerNormMLPSpec,
    LayerNormSpec,
    LinearSpec,
    MultiheadAttentionSpec,
    RMSNormSpec,
    Spec,
    TransformerLayerSpec,
    torch_dtype,
)
from te_convert.rewrite.nested import quiet_children
from te_convert.rewrite.rows import PADDED, run_padded
from te_convert.weights.ops import WeightMap

HIDDEN, FFN, HEADS, BATCH, LENGTH = 128, 256, 2, 2, 64
DTYPES = ("float32", "bfloat16", "float16")
Bounds = dict[str, tuple[float, float]]
"""dtype → (absolute, relative)."""
PRODUCTS: Bounds = {"float32": (5e-3, 1e-3), "float16": (5e-2, 1e-2), "bfloat16": (5e-2, 2e-2)}
NORMS: Bounds = {"float32": (2e-3, 1.3e-6), "float16": (2e-3, 1e-3), "bfloat16": (2e-2, 1.6e-2)}
ATTENTION: Bounds = {"float32": (5e-2, 1e-2), "float16": (5e-2, 1e-2), "bfloat16": (5e-2, 1e-2)}
LAYERS: Bounds = {"float32": (5e-2, 1e-2), "float16": (5e-2, 1e-2), "bfloat16": (1e-1, 1e-2)}
QUANTIZED = 0.125
"""Under a recipe, of the norm of each tensor: a layer is a chain of quantised products, of which single entries tell nothing."""


@dataclass(frozen=True)
class Case:
    """``call`` runs a module on tensors of these shapes; ``recipes`` says whether its products are quantised by one."""

    spec: Callable[[str], Spec]
    shapes: tuple[tuple[int, ...], ...]
    bounds: Bounds
    recipes: bool = True
    call: Callable[..., Tensor] = lambda module, *tensors: module(*tensors)


def causal(module: nn.Module, *tensors: Tensor) -> Tensor:
    y: Tensor = module(*tensors, attn_mask_type="causal", window_size=(-1, 0))
    return y


def attends_across(module: nn.Module, x: Tensor, source: Tensor) -> Tensor:
    y: Tensor = module(x, encoder_output=source)
    return y


def routed(module: nn.Module, tokens: Tensor, gates: Tensor) -> Tensor:
    """Two of four experts for each token."""
    index = torch.arange(len(tokens), device=tokens.device)
    y: Tensor = module(tokens, torch.stack([index % 4, (index * 7 + 1) % 4], 1), gates)
    return y


def layer(dtype: str, **options: Any) -> TransformerLayerSpec:
    fields: dict[str, Any] = {"eps": 1e-5, "bias": True, "activation": "gelu", "normalization": "LayerNorm"}
    fields |= {"zero_centered_gamma": False, "post_layernorm": False, "parallel_attention_mlp": False, "layer_type": "encoder"}
    fields |= {"attn_input_format": "bshd", "self_attn_mask_type": "causal", "dtype": dtype}
    return TransformerLayerSpec(HIDDEN, FFN, HEADS, **{**fields, **options})


X, HEAD = (BATCH, LENGTH, HIDDEN), (BATCH, LENGTH, HEADS, HIDDEN // HEADS)
CASES: dict[str, Case] = {
    "Linear": Case(lambda d: LinearSpec(HIDDEN, FFN, True, d), (X,), PRODUCTS),
    "Linear without bias": Case(lambda d: LinearSpec(HIDDEN, FFN, False, d), (X,), PRODUCTS),
    "Linear, one token": Case(lambda d: LinearSpec(HIDDEN, FFN, True, d), ((1, 1, HIDDEN),), PRODUCTS),
    "LayerNorm": Case(lambda d: LayerNormSpec(HIDDEN, 1e-5, False, d), (X,), NORMS, recipes=False),
    "RMSNorm, 1 + w": Case(lambda d: RMSNormSpec(HIDDEN, 1e-6, True, d), (X,), NORMS, recipes=False),
    "LayerNormLinear": Case(lambda d: LayerNormLinearSpec(HIDDEN, FFN, True, 1e-5, "LayerNorm", False, d), (X,), PRODUCTS),
    "LayerNormLinear, RMS": Case(lambda d: LayerNormLinearSpec(HIDDEN, FFN, False, 1e-6, "RMSNorm", False, d), (X,), PRODUCTS),
    "LayerNormMLP": Case(lambda d: LayerNormMLPSpec(HIDDEN, FFN, True, 1e-5, "LayerNorm", "gelu", False, d), (X,), PRODUCTS),
    "LayerNormMLP, SwiGLU": Case(
        lambda d: LayerNormMLPSpec(HIDDEN, FFN, False, 1e-6, "RMSNorm", "swiglu", False, d), (X,), PRODUCTS
    ),
    "LayerNormMLP, 7 tokens": Case(
        lambda d: LayerNormMLPSpec(HIDDEN, FFN, True, 1e-5, "LayerNorm", "silu", False, d), ((1, 7, HIDDEN),), PRODUCTS
    ),
    "DotProductAttention": Case(
        lambda d: DotProductAttentionSpec(HEADS, (64, 64), HEADS, None, 0.0, d), (HEAD, HEAD, HEAD), ATTENTION, False, causal
    ),
    "MultiheadAttention": Case(lambda d: MultiheadAttentionSpec(HIDDEN, HEADS, 0.0, True, "self", "bshd", d), (X,), ATTENTION),
    "MultiheadAttention, cross": Case(
        lambda d: MultiheadAttentionSpec(HIDDEN, HEADS, 0.0, True, "cross", "bshd", d), (X, X), ATTENTION, True, attends_across
    ),
    "TransformerLayer": Case(layer, (X,), LAYERS),
    "TransformerLayer, post-norm": Case(lambda d: layer(d, post_layernorm=True, activation="relu"), (X,), LAYERS),
    "TransformerLayer, RMS": Case(lambda d: layer(d, normalization="RMSNorm", activation="swiglu", bias=False), (X,), LAYERS),
    "GroupedLinear": Case(
        lambda d: GroupedExpertsSpec(4, HIDDEN, FFN, True, "silu", 32, d), ((96, HIDDEN), (96, 2)), PRODUCTS, True, routed
    ),
}


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build(spec: Spec, backend: str, device: str) -> nn.Module:
    """The same weights on every backend; 1-D ones are those that bfloat16 holds, since TE rounds biases to it under a recipe."""
    module: nn.Module = new_module(module_class(spec, backend), spec, backend)
    quiet_children(module, WeightMap(()))  # any number of rows
    for seed, (name, parameter) in enumerate(sorted(module.named_parameters())):
        values = randn(*parameter.shape, seed=seed) * (1.0 if parameter.dim() == 1 else parameter.shape[1] ** -0.5)
        values = values.bfloat16() if parameter.dim() == 1 else values
        path, _, last = name.rpartition(".")
        holder = module.get_submodule(path)
        holder._parameters[last] = nn.Parameter(values.to(device, parameter.dtype))
    return module.train()


def run(case: Case, dtype: str, backend: str, device: str, context: AbstractContextManager[Any] | None = None) -> dict[str, Tensor]:
    """Output and gradients."""
    module = build(case.spec(dtype), backend, device)
    leaves = [randn(*shape, seed=50 + index).to(device, torch_dtype(dtype)) for index, shape in enumerate(case.shapes)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    if backend == "te" and type(module).__name__ in PADDED:
        called: Any = partial(run_padded, module)
    else:
        called = module
    with context or nullcontext():
        y = case.call(called, *leaves)
    y.backward(randn(*y.shape, seed=99).to(y))
    inputs = {f"input {index}": leaf.grad for index, leaf in enumerate(leaves) if leaf.grad is not None}
    weights = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return {"output": y.detach(), **inputs, **weights}


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], bounds: tuple[float, float]) -> None:
    assert actual.keys() == expected.keys()
    absolute, relative = bounds
    for name, value in expected.items():
        largest = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(
            actual[name].float(), value.float(), atol=absolute * largest, rtol=relative, msg=partial("{}: {}".format, name)
        )


def assert_alike(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Both are the same up to the noise of a recipe."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.isfinite(actual[name]).all(), name
        difference = float((actual[name].float() - value.float()).norm())
        assert difference <= QUANTIZED * float(value.float().norm()), (name, difference)
