"""Real Transformer Engine modules and the twins compute the same from the same spec: outputs, gradients, names, dtypes.

Built as the conversion builds them: constructor arguments of replacements/build.py, parameters on meta, then assigned.  Warnings
are errors here as everywhere in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_convert.reference.activations import ACTIVATION_NAMES, is_gated
from te_convert.replacements.build import constructor_arguments, module_class, parameter_names
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
from te_convert.rewrite.site import site_class
from te_convert.weights.ops import WeightMap
from tests.te_contract.te_kernels import ACTIVATIONS
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu

pytestmark = needs_te

HIDDEN, FFN, HEADS = 32, 48, 4
BATCH, LENGTH, SOURCE = 2, 6, 9
NORMS = ("LayerNorm", "RMSNorm")
DTYPES = ("float32", "bfloat16")
TOLERANCES: dict[str, dict[str, float]] = {"float32": {"rtol": 1e-5, "atol": 1e-5}, "bfloat16": {"rtol": 0.02, "atol": 0.02}}
"""float32: the sums' rounding.  bfloat16: two to three ulps, relative to the largest entry (see :func:`assert_near`)."""


@pytest.fixture(autouse=True)
def te() -> Iterator[Any]:
    with te_on_cpu() as package:
        yield package


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def build(spec: Spec, backend: str) -> nn.Module:
    """A module whose parameters were on meta, with the same random values on every backend."""
    cls = module_class(spec, backend)
    args, kwargs = constructor_arguments(spec, cls)
    module = cls(*args, **kwargs)
    for seed, (name, parameter) in enumerate(sorted(module.named_parameters())):
        assert parameter.is_meta, name
        scale = 1.0 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
        values = nn.Parameter(randn(*parameter.shape, seed=seed, dtype=parameter.dtype) * scale)
        path, _, last = name.rpartition(".")
        module.get_submodule(path)._parameters[last] = values
    return module


def assert_near(actual: Tensor, expected: Tensor, dtype: str, what: str) -> None:
    """Equal within the tolerance of the dtype, of which the absolute part grows with the largest entry."""
    tolerance = TOLERANCES[dtype]
    assert actual.dtype == expected.dtype, what
    largest = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(
        actual, expected, rtol=tolerance["rtol"], atol=tolerance["atol"] * largest, msg=lambda text: f"{what}: {text}"
    )


def compare(spec: Spec, inputs: tuple[Tensor, ...], call: Callable[..., Tensor] | None = None, /, **options: Any) -> None:
    """Output and the gradients of all inputs and parameters are the same on TE and on its twin."""
    run = call or (lambda module, *tensors: module(*tensors, **options))
    found = []
    for backend in ("te", "reference"):
        module = build(spec, backend)
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        y = run(module, *leaves)
        y.backward(randn(*y.shape, seed=99, dtype=y.dtype))
        gradients = {f"input {index}": x.grad for index, x in enumerate(leaves) if x.requires_grad}
        gradients |= {name: parameter.grad for name, parameter in module.named_parameters()}
        found.append((y.detach(), gradients))
    (on_te, te_gradients), (on_twin, twin_gradients) = found
    assert on_te.shape == on_twin.shape
    assert_near(on_te, on_twin, spec.dtype, "output")
    assert te_gradients.keys() == twin_gradients.keys()
    for name, expected in twin_gradients.items():
        actual = te_gradients[name]
        assert actual is not None, name
        assert expected is not None, name
        assert_near(actual, expected, spec.dtype, f"gradient of {name}")


def rows(size: int, dtype: str) -> Tensor:
    return randn(BATCH, LENGTH, size, dtype=torch_dtype(dtype))


# --- single modules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias: bool, dtype: str) -> None:
    compare(LinearSpec(HIDDEN, FFN, bias, dtype), (rows(HIDDEN, dtype),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("spec", [LayerNormSpec, RMSNormSpec])
def test_norms(spec: Callable[..., Spec], zero_centered: bool, dtype: str) -> None:
    compare(spec(HIDDEN, 1e-6, zero_centered, dtype), (rows(HIDDEN, dtype),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_layer_norm_linear(norm: str, bias: bool, zero_centered: bool, dtype: str) -> None:
    compare(LayerNormLinearSpec(HIDDEN, FFN, bias, 1e-6, norm, zero_centered, dtype), (rows(HIDDEN, dtype),))


def test_all_activations_have_a_stand_in() -> None:
    assert set(ACTIVATIONS) == set(ACTIVATION_NAMES)
    assert len(ACTIVATIONS) == 12


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("norm", "bias", "zero_centered"), [("LayerNorm", True, False), ("RMSNorm", False, True)])
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_layer_norm_mlp(activation: str, norm: str, bias: bool, zero_centered: bool, dtype: str) -> None:
    spec = LayerNormMLPSpec(HIDDEN, FFN, bias, 1e-6, norm, activation, zero_centered, dtype)
    compare(spec, (rows(HIDDEN, dtype) * 3,))
    assert build(spec, "te").fc1_weight.shape[0] == FFN * (2 if is_gated(activation) else 1)  # type: ignore[index]


# --- attention -----------------------------------------------------------------------------------------------------------------


def attention(
    heads: int = HEADS, groups: int = HEADS, channels: tuple[int, int] = (8, 8), **options: Any
) -> DotProductAttentionSpec:
    arguments = {"softmax_scale": None, "attention_dropout": 0.0, "dtype": "float32", **options}
    return DotProductAttentionSpec(heads, channels, groups, **arguments)


def heads_of(spec: DotProductAttentionSpec, queries: int = LENGTH, keys: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    dtype, (wide, narrow) = torch_dtype(spec.dtype), spec.kv_channels
    return (
        randn(BATCH, queries, spec.num_attention_heads, wide, seed=1, dtype=dtype),
        randn(BATCH, keys, spec.num_gqa_groups, wide, seed=2, dtype=dtype),
        randn(BATCH, keys, spec.num_gqa_groups, narrow, seed=3, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"groups": 2}, {"channels": (8, 12)}, {"softmax_scale": 0.7}, {"softcap": 2.0}, {"groups": 1, "softcap": 1.5}],
    ids=str,
)
@pytest.mark.parametrize(
    ("mask_type", "queries", "keys", "window"),
    [
        ("no_mask", LENGTH, SOURCE, None),
        ("no_mask", LENGTH, LENGTH, (2, 2)),
        ("causal", LENGTH, LENGTH, None),
        ("causal", LENGTH, LENGTH, (2, 0)),
        ("causal_bottom_right", LENGTH, SOURCE, None),
        ("causal_bottom_right", 1, SOURCE, (3, 0)),
        ("no_mask", 24, 24, None),
    ],
)
def test_dot_product_attention(
    mask_type: str, queries: int, keys: int, window: tuple[int, int] | None, options: dict[str, Any], dtype: str
) -> None:
    spec = attention(**options, dtype=dtype)
    arguments: dict[str, Any] = {"attn_mask_type": mask_type}
    if window is not None or "causal" in mask_type:
        arguments["window_size"] = window or (-1, 0)
    compare(spec, heads_of(spec, queries, keys), **arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"softmax_scale": 1.0}, {"softmax_scale": 0.7, "groups": 2}], ids=str)
@pytest.mark.parametrize(
    ("mask_type", "queries", "keys"),
    [("no_mask", LENGTH, SOURCE), ("no_mask", 1, SOURCE), ("causal", LENGTH, LENGTH), ("causal_bottom_right", LENGTH, SOURCE)],
)
def test_dot_product_attention_with_a_bias(mask_type: str, queries: int, keys: int, options: dict[str, Any], dtype: str) -> None:
    """The bias [1, h, sq, skv] gets a gradient, too."""
    spec = attention(**options, dtype=dtype, bias=True)
    window = {"window_size": (-1, 0)} if "causal" in mask_type else {}
    bias = randn(1, HEADS, queries, keys, seed=4, dtype=torch_dtype(dtype))

    def call(module: nn.Module, *tensors: Tensor) -> Tensor:
        biased = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": tensors[3]}
        y: Tensor = module(*tensors[:3], attn_mask_type=mask_type, **window, **biased)
        return y

    compare(spec, (*heads_of(spec, queries, keys), bias), call)


def padded(length: int, *valid: int) -> Tensor:
    """bool [b, 1, 1, length], True where a row is padding."""
    return torch.stack([torch.arange(length) >= count for count in valid])[:, None, None]


@pytest.mark.parametrize("keys", [LENGTH, SOURCE])
def test_dot_product_attention_with_padding(keys: int) -> None:
    """One mask for queries and one for keys; padded queries give zeros on both."""
    spec = attention(groups=2)
    masks = (padded(LENGTH, LENGTH, 4), padded(keys, keys, 3))
    compare(spec, heads_of(spec, LENGTH, keys), attn_mask_type="padding", attention_mask=masks)


def masks() -> dict[str, dict[str, Any]]:
    """Calls of rewrite/blocks.py."""
    seen = torch.rand(BATCH, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)) > 0.3
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    return {
        "no_mask": {"attention_mask": None, "attn_mask_type": "no_mask"},
        "causal": {"attention_mask": None, "attn_mask_type": "causal"},
        "heads": {"attention_mask": ~seen, "attn_mask_type": "arbitrary"},
        "shared": {"attention_mask": ~seen[:1, :1], "attn_mask_type": "arbitrary"},
        "padding": {"attention_mask": padded(LENGTH, LENGTH, 4), "attn_mask_type": "arbitrary"},
    }


def sequence(layout: str, length: int = LENGTH, seed: int = 1, dtype: str = "float32") -> Tensor:
    shape = (BATCH, length) if layout == "bshd" else (length, BATCH)
    return randn(*shape, HIDDEN, seed=seed, dtype=torch_dtype(dtype))


@pytest.mark.parametrize("kind", masks())
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("bias", [True, False])
def test_multi_head_self_attention(bias: bool, layout: str, kind: str) -> None:
    spec = MultiheadAttentionSpec(HIDDEN, HEADS, 0.0, bias, "self", layout, "float32")
    compare(spec, (sequence(layout),), **masks()[kind])


@pytest.mark.parametrize("mask", [None, padded(SOURCE, SOURCE, 4)], ids=["no_mask", "padding"])
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("bias", [True, False])
def test_multi_head_cross_attention(bias: bool, layout: str, mask: Tensor | None) -> None:
    spec = MultiheadAttentionSpec(HIDDEN, HEADS, 0.0, bias, "cross", layout, "float32")
    options = {"attention_mask": mask, "attn_mask_type": "no_mask" if mask is None else "arbitrary"}

    def call(module: nn.Module, x: Tensor, source: Tensor) -> Tensor:
        y: Tensor = module(x, encoder_output=source, **options)
        return y

    compare(spec, (sequence(layout), sequence(layout, SOURCE, seed=2)), call)


def layer(**options: Any) -> TransformerLayerSpec:
    fields: dict[str, Any] = {
        "eps": 1e-6,
        "bias": True,
        "activation": "gelu",
        "normalization": "LayerNorm",
        "zero_centered_gamma": False,
        "post_layernorm": False,
        "parallel_attention_mlp": False,
        "layer_type": "encoder",
        "attn_input_format": "bshd",
        "self_attn_mask_type": "no_mask",
        "dtype": "float32",
    }
    return TransformerLayerSpec(HIDDEN, FFN, HEADS, **{**fields, **options})


FORMS: dict[str, dict[str, Any]] = {
    "pre": {},
    "pre-causal": {"self_attn_mask_type": "causal", "activation": "silu"},
    "post": {"post_layernorm": True, "activation": "relu"},
    "parallel": {"parallel_attention_mlp": True},
    "rms": {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "zero_centered_gamma": True},
    "sbhd": {"attn_input_format": "sbhd", "activation": "relu"},
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_transformer_layer(form: str, bias: bool) -> None:
    spec = layer(**{**FORMS[form], "bias": bias})
    compare(spec, (sequence(spec.attn_input_format),))
    for mask in masks().values():
        options = {"attention_mask": mask["attention_mask"], "self_attn_mask_type": mask["attn_mask_type"]}
        compare(spec, (sequence(spec.attn_input_format),), **options)


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_decoder_layer(layout: str, post: bool) -> None:
    spec = layer(layer_type="decoder", attn_input_format=layout, activation="relu", post_layernorm=post)
    options = {
        "attention_mask": None,
        "self_attn_mask_type": "causal",
        "enc_dec_attn_mask": padded(SOURCE, SOURCE, 5),
        "enc_dec_attn_mask_type": "arbitrary",
    }

    def call(module: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
        y: Tensor = module(x, encoder_output=memory, **options)
        return y

    compare(spec, (sequence(layout), sequence(layout, SOURCE, seed=2)), call)


@pytest.mark.parametrize("form", FORMS)
def test_transformer_layer_in_bfloat16(form: str) -> None:
    spec = layer(**FORMS[form], dtype="bfloat16")
    compare(spec, (sequence(spec.attn_input_format, dtype="bfloat16"),))


# --- experts -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_multiple", [1, 8])
@pytest.mark.parametrize(("gated", "activation"), [(True, "silu"), (False, "relu")])
def test_grouped_experts(gated: bool, activation: str, row_multiple: int, dtype: str) -> None:
    """Two choices of four experts for each token, one expert without any, and one choice of none."""
    spec = GroupedExpertsSpec(4, HIDDEN, FFN, gated, activation, row_multiple, dtype)
    index = torch.tensor([[0, 1], [1, 3], [0, 3], [3, 1], [1, 4], [0, 1], [3, 0]])
    tokens = randn(len(index), HIDDEN, dtype=torch_dtype(dtype))
    weights = randn(*index.shape, seed=5, dtype=torch_dtype(dtype)).sigmoid()

    def call(module: nn.Module, x: Tensor, gates: Tensor) -> Tensor:
        y: Tensor = module(x, index, gates)
        return y

    compare(spec, (tokens, weights), call)


# --- construction and state ----------------------------------------------------------------------------------------------------

SPECS: list[Spec] = [
    LinearSpec(HIDDEN, FFN, True, "float32"),
    LinearSpec(HIDDEN, FFN, False, "bfloat16"),
    LayerNormSpec(HIDDEN, 1e-6, False, "float32"),
    RMSNormSpec(HIDDEN, 1e-6, True, "float32"),
    *(LayerNormLinearSpec(HIDDEN, FFN, bias, 1e-6, norm, False, "float32") for norm in NORMS for bias in (True, False)),
    *(LayerNormMLPSpec(HIDDEN, FFN, True, 1e-6, "LayerNorm", name, False, "bfloat16") for name in ACTIVATION_NAMES),
    LayerNormMLPSpec(HIDDEN, FFN, False, 1e-6, "RMSNorm", "swiglu", False, "float32"),
    attention(),
    attention(groups=2, softcap=1.0, softmax_scale=0.5),
    *(
        MultiheadAttentionSpec(HIDDEN, HEADS, 0.0, bias, kind, "bshd", "float32")
        for bias in (True, False)
        for kind in ("self", "cross")
    ),
    *(layer(**options) for options in FORMS.values()),
    layer(layer_type="decoder"),
    GroupedExpertsSpec(3, HIDDEN, FFN, True, "silu", 1, "float32"),
]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.name}-{SPECS.index(spec)}")


@every_spec
def test_construction_draws_nothing_and_allocates_nothing(spec: Spec) -> None:
    before = torch.get_rng_state()
    cls = site_class(spec, "te")
    args, kwargs = constructor_arguments(spec, module_class(spec, "te"))
    module = cls(*args, **kwargs)
    assert torch.equal(torch.get_rng_state(), before)
    assert issubclass(cls, module_class(spec, "te"))
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not list(module.buffers())
    for name in parameter_names(spec):
        assert module.get_parameter(name).dtype is torch_dtype(spec.dtype)


@every_spec
def test_names_and_shapes_are_the_twins(spec: Spec) -> None:
    described = []
    for backend in ("te", "reference"):
        module = build(spec, backend)
        described.append({key: (value.dtype, tuple(value.shape)) for key, value in module.state_dict().items()})
    assert described[0] == described[1]
    names = [name for name, _ in build(spec, "te").named_parameters()]
    assert names == [name for name, _ in build(spec, "reference").named_parameters()]
    if parameter_names(spec):
        assert set(names) == set(parameter_names(spec))


@every_spec
def test_state_moves_between_te_and_the_twins_either_way(spec: Spec) -> None:
    on_te, on_twin = build(spec, "te"), build(spec, "reference")
    with torch.no_grad():
        for parameter in on_twin.parameters():
            parameter.mul_(2)
    on_te.load_state_dict(on_twin.state_dict())
    torch.testing.assert_close(dict(on_te.named_parameters()), dict(on_twin.named_parameters()), rtol=0, atol=0)
    on_twin.load_state_dict(on_te.state_dict())


@every_spec
def test_inner_modules_stay_te_modules_with_a_quiet_state_dict(spec: Spec) -> None:
    module, plain = build(spec, "te"), build(spec, "te")
    quiet_children(module, WeightMap(()))
    assert not [key for key in module.state_dict() if key.endswith("_extra_state") and "." in key]
    module.load_state_dict({key: value for key, value in plain.state_dict().items() if "_extra_state" not in key}, strict=False)
    for quiet, before in zip(module.modules(), plain.modules(), strict=True):
        assert isinstance(quiet, type(before))
        assert quiet.train(False).training is before.train(False).training
