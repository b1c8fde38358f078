"""Norms are recognised by their numbers, whatever they are called, and look-alikes are not."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from te_convert.facts.norms import Kind, NormFacts, NotANorm, looks_like_norm, probe_norm, probe_norm_cached

FLOAT32_EPS = 1.1920928955078125e-07
MODELS = "transformers.models."


def load(path: str, *args: Any, **kwargs: Any) -> nn.Module:
    """Build ``package.module:Class``."""
    module, name = path.split(":")
    built: nn.Module = getattr(importlib.import_module(module), name)(*args, **kwargs)
    return built


def norm(kind: Kind, width: int, eps: float, **changes: Any) -> NormFacts:
    """Facts of a norm with weight, bias if a LayerNorm, all in float32; ``changes`` replace any of them."""
    bias = "bias" if kind == "LayerNorm" else None
    defaults: dict[str, Any] = {"zero_centered_gamma": False, "weight": "weight", "bias": bias, "rounding": "float32"}
    return NormFacts(kind, width, eps, **{**defaults, "keeps_dtype": True, **changes})


def detail(module: nn.Module, **kwargs: Any) -> str:
    facts = probe_norm(module, **kwargs)
    assert isinstance(facts, NotANorm), facts
    return facts.detail


class Formula(nn.Module):
    """Applies a formula to its input and its parameters, under names that say nothing."""

    def __init__(self, formula: Callable[..., object], width: int = 24, count: int = 1) -> None:
        super().__init__()
        self.formula = formula
        self.width = width
        for name in "ab"[:count]:
            self.register_parameter(name, nn.Parameter(torch.rand(width)))

    def forward(self, x: Tensor) -> Any:
        return self.formula(x, *self.parameters())


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def layer(x: Tensor, eps: float = 1e-6) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=eps)


CASES: list[tuple[str, dict[str, Any], NormFacts]] = [
    ("llama.modeling_llama:LlamaRMSNorm", {}, norm("RMSNorm", 24, 1e-6, rounding="before-weight")),
    ("t5.modeling_t5:T5LayerNorm", {"eps": 1e-5}, norm("RMSNorm", 24, 1e-5, rounding="before-weight")),
    ("gemma.modeling_gemma:GemmaRMSNorm", {}, norm("RMSNorm", 24, 1e-6, zero_centered_gamma=True)),
    ("gemma2.modeling_gemma2:Gemma2RMSNorm", {}, norm("RMSNorm", 24, 1e-6, zero_centered_gamma=True)),
    ("gemma3.modeling_gemma3:Gemma3RMSNorm", {}, norm("RMSNorm", 24, 1e-6, zero_centered_gamma=True)),
    ("qwen3_5.modeling_qwen3_5:Qwen3_5RMSNorm", {}, norm("RMSNorm", 24, 1e-6, zero_centered_gamma=True)),
    ("olmo2.modeling_olmo2:Olmo2RMSNorm", {}, norm("RMSNorm", 24, 1e-6)),
    ("imagegpt.modeling_imagegpt:ImageGPTLayerNorm", {}, norm("RMSNorm", 24, 1e-5, rounding="unknown")),
    ("kosmos2_5.modeling_kosmos2_5:Kosmos2_5LayerNorm", {}, norm("RMSNorm", 24, 1e-6, rounding="before-weight")),
    ("cohere.modeling_cohere:CohereLayerNorm", {"eps": 1.5625e-7}, norm("LayerNorm", 24, 1.5625e-7, bias=None)),
    (
        "nemotron.modeling_nemotron:NemotronLayerNorm1P",
        {},
        norm("LayerNorm", 24, 1e-5, zero_centered_gamma=True, rounding="unknown"),
    ),
]


@pytest.mark.parametrize(("path", "arguments", "expected"), CASES, ids=[case[0].split(":")[1] for case in CASES])
def test_transformers_norms(path: str, arguments: dict[str, Any], expected: NormFacts) -> None:
    module = load(MODELS + path, 24, **arguments)
    assert looks_like_norm(module)
    assert probe_norm(module) == expected
    assert probe_norm(module.to(torch.float16)) == expected
    assert probe_norm(module.to("meta", torch.bfloat16)) == expected


def test_names_lie() -> None:
    cpm = load(MODELS + "cpmant.modeling_cpmant:CpmAntLayerNorm", SimpleNamespace(eps=1e-6, hidden_size=24))
    assert probe_norm(cpm) == norm("RMSNorm", 24, 1e-6, rounding="before-weight")
    l2 = load(MODELS + "llama4.modeling_llama4:Llama4TextL2Norm", eps=1e-5)
    assert not looks_like_norm(l2)
    assert probe_norm(l2, width=24) == norm("RMSNorm", 24, 1e-5, weight=None)


def test_transformers_look_alikes() -> None:
    no_norm = load(MODELS + "mobilebert.modeling_mobilebert:NoNorm", 24)
    assert looks_like_norm(no_norm)
    assert "it does not normalise: an input 1e4 times larger" in detail(no_norm)
    gated = load(MODELS + "qwen3_5.modeling_qwen3_5:Qwen3_5RMSNormGated", 24)
    assert looks_like_norm(gated)
    assert "missing 1 required positional argument: 'gate'" in detail(gated)
    router = load(
        MODELS + "llama4.modeling_llama4:Llama4Router",
        SimpleNamespace(hidden_size=6, num_local_experts=4, num_experts_per_tok=2),
    )
    assert not looks_like_norm(router)
    assert "weight float32[4, 6]" in detail(router)


def test_timm() -> None:
    assert probe_norm(load("timm.layers:LayerNorm", 24)) == norm("LayerNorm", 24, 1e-6)
    assert probe_norm(load("timm.layers:RmsNorm", 24)) == norm("RMSNorm", 24, 1e-6)
    scale, channels = load("timm.layers:LayerScale", 24), load("timm.layers:LayerNorm2d", 24)
    assert looks_like_norm(scale)
    assert "it does not normalise" in detail(scale)
    assert looks_like_norm(channels)
    assert detail(channels).startswith("forward raised RuntimeError: permute")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_torch_forms(dtype: torch.dtype) -> None:
    assert probe_norm(nn.LayerNorm(24, dtype=dtype)) == norm("LayerNorm", 24, 1e-5)
    assert probe_norm(nn.LayerNorm((24,), bias=False, dtype=dtype)) == norm("LayerNorm", 24, 1e-5, bias=None)
    assert probe_norm(nn.RMSNorm(24, eps=1e-3, dtype=dtype)) == norm("RMSNorm", 24, 1e-3)
    eps = 2.220446049250313e-16 if dtype == torch.float64 else FLOAT32_EPS
    assert probe_norm(nn.RMSNorm(24, dtype=dtype)) == norm("RMSNorm", 24, eps)
    assert probe_norm(nn.RMSNorm(24), dtype=dtype) == norm("RMSNorm", 24, eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_eps_of_the_dtype_itself(dtype: torch.dtype) -> None:
    module = Formula(lambda x, a: rms(x.double(), torch.finfo(x.dtype).eps).to(x.dtype) * a)
    low, full = probe_norm(module.to(dtype)), probe_norm(module.float())
    assert isinstance(low, NormFacts)
    assert isinstance(full, NormFacts)
    assert (low.eps, full.eps) == (torch.finfo(dtype).eps, FLOAT32_EPS)


def test_without_parameters_the_width_is_recorded() -> None:
    plain = nn.LayerNorm(24, elementwise_affine=False)
    assert looks_like_norm(plain)
    assert probe_norm(plain) == probe_norm(plain, width=24) == norm("LayerNorm", 24, 1e-5, weight=None, bias=None)
    assert "forward raised RuntimeError" in detail(plain, width=25)
    free = Formula(rms, count=0)
    assert not looks_like_norm(free)
    assert detail(free) == "it has no parameters and no input was recorded, so its width is unknown"
    assert probe_norm(free, width=10) == norm("RMSNorm", 10, 1e-6, weight=None, rounding="unknown")


def test_shapes_that_are_refused() -> None:
    assert looks_like_norm(nn.LayerNorm((4, 6)))
    assert detail(nn.LayerNorm((4, 6))) == "it normalises over several dimensions: (4, 6)"
    assert detail(nn.RMSNorm((4, 6), elementwise_affine=False), width=6) == "it normalises over several dimensions: (4, 6)"
    assert detail(nn.LayerNorm(1)) == "its width is 1; a norm needs two values"
    assert detail(nn.LayerNorm(0)) == "its parameter weight has no elements"
    assert detail(Formula(rms, count=0), width=0) == "its width is 0; a norm needs two values"
    assert detail(nn.LayerNorm(24), width=12) == "its input is 12 wide and its parameters 24"


def test_what_does_not_look_like_a_norm() -> None:
    modules = (nn.BatchNorm1d(4), nn.InstanceNorm1d(4, affine=True), nn.GroupNorm(2, 4), nn.PReLU(4), nn.Identity())
    for module in (*modules, nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4)), nn.Bilinear(1, 1, 1)):
        assert not looks_like_norm(module), module
        assert isinstance(probe_norm(module), NotANorm)
    assert detail(nn.BatchNorm1d(4)) == "it has buffers: running_mean, running_var, num_batches_tracked"
    assert detail(nn.Sequential(nn.LayerNorm(4))) == "it has child modules: 0"


class LN(nn.Module):
    """The norm of nanoGPT: a LayerNorm with an optional bias."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_nano_gpt(bias: bool) -> None:
    module = LN(24, bias)
    assert looks_like_norm(module)
    assert probe_norm(module) == norm("LayerNorm", 24, 1e-5, bias="bias" if bias else None)


def test_roles_follow_the_numbers() -> None:
    swapped = Formula(lambda x, a, b: layer(x) * b + a, count=2)
    assert looks_like_norm(swapped)
    assert probe_norm(swapped) == norm("LayerNorm", 24, 1e-6, weight="b", bias="a", rounding="before-weight")
    one_plus = Formula(lambda x, a, b: layer(x) * (1 + a) + b, count=2)
    assert probe_norm(one_plus) == norm(
        "LayerNorm", 24, 1e-6, zero_centered_gamma=True, weight="a", bias="b", rounding="before-weight"
    )
    added = Formula(lambda x, a: layer(x) + a)
    facts = probe_norm(added)
    assert isinstance(facts, NormFacts)
    assert (facts.weight, facts.bias, facts.zero_centered_gamma) == (None, "a", False)


NEAR_MISSES: dict[str, tuple[Callable[..., object], int, str]] = {
    "unbiased variance": (
        lambda x, a: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-6).sqrt() * a,
        1,
        "it differs from LayerNorm(eps=",
    ),
    "eps outside the root": (lambda x, a: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-3) * a, 1, "RMSNorm(eps=1e-06)"),
    "variance floor": (lambda x, a: x / x.pow(2).mean(-1, keepdim=True).clamp_min(1e-6).sqrt() * a, 1, "RMSNorm(eps=1e-06)"),
    "unit length": (lambda x, a: functional.normalize(x, dim=-1) * a, 1, "differs from RMSNorm(eps="),
    "root of width times unit length": (lambda x, a: functional.normalize(x, dim=-1) * 24**0.5 * a, 1, "differs from RMSNorm"),
    "floor below the tiny inputs": (
        lambda x, a: x / x.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-18) * a,
        1,
        "its divisor has a floor in place of an eps",
    ),
    "l1": (lambda x, a: x / (x.abs().mean(-1, keepdim=True) + 1e-6) * a, 1, "differs from RMSNorm"),
    "partial": (lambda x, a: x * torch.rsqrt(x[..., :12].pow(2).mean(-1, keepdim=True) + 1e-6) * a, 1, "differs from RMSNorm"),
    "channels first": (lambda x, a: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * a, 1, "is not a multiple"),
    "grouped": (
        lambda x, a: rms(x.unflatten(-1, (2, -1))).flatten(-2) * a,
        1,
        "its output is not a multiple of the (centred) input",
    ),
    "softmax": (lambda x, a: torch.softmax(x, -1) * a, 1, "it does not normalise"),
    "affine": (lambda x, a, b: x * a + b, 2, "it does not normalise: an input 1e4 times larger gives an output 1e+04 times"),
    "two weights": (lambda x, a, b: rms(x) * (a + b), 2, "a and b act alike"),
    "two weights that multiply": (lambda x, a, b: rms(x) * a * (1 + b), 2, "differs from RMSNorm"),
    "two biases": (lambda x, a, b: rms(x) + a + b, 2, "a and b act alike"),
    "exponential gamma": (lambda x, a: rms(x) * a.exp(), 1, "differs from RMSNorm"),
    "doubled bias": (lambda x, a, b: layer(x) * a + 2 * b, 2, "differs from LayerNorm"),
    "clamped output": (lambda x, a: (rms(x) * a).clamp(-500.0, 500.0), 1, "differs from RMSNorm"),
    "clamped input": (lambda x, a: rms(x.clamp(-65504.0, 65504.0)) * a, 1, "differs from RMSNorm"),
    "returns a tuple": (lambda x, a: (rms(x) * a, x), 1, "forward returns a tuple, not one tensor"),
    "returns NaN": (lambda x, a: rms(x) * a * float("nan"), 1, "NaN or infinity"),
    "another shape": (lambda x, a: (rms(x) * a).flatten(), 1, "it maps shape [3, 5, 24] to [360]"),
    "edits its input": (lambda x, a: x.mul_(torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * a, 1, "changes its input"),
    "hard-coded dimension": (
        lambda x, a: x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + 1e-6) * a,
        1,
        "differs from RMSNorm",
    ),
    "half precision inside": (lambda x, a: rms(x.bfloat16()).to(x.dtype) * a, 1, "is not a multiple"),
}


@pytest.mark.parametrize("case", sorted(NEAR_MISSES))
def test_near_misses_say_what_was_seen(case: str) -> None:
    formula, count, expected = NEAR_MISSES[case]
    module = Formula(formula, count=count)
    assert looks_like_norm(module)
    assert expected in detail(module)


class Dropping(LN):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.5, self.training)


class ThreeDimensional(LN):
    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return super().forward(x.reshape(batch * length, width)).reshape(batch, length, width)


def test_training_mode_counts() -> None:
    assert detail(Dropping(24, True)).endswith("in training mode")


def test_one_rank_is_enough() -> None:
    assert probe_norm(ThreeDimensional(24, True)) == norm("LayerNorm", 24, 1e-5)


def test_output_dtype_is_seen() -> None:
    assert probe_norm(Formula(lambda x, a: rms(x.float()) * a.float())) == norm("RMSNorm", 24, 1e-6, weight="a", keeps_dtype=False)


def test_low_precision_that_raises_is_unknown() -> None:
    def formula(x: Tensor, a: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            raise NotImplementedError("no bfloat16 here")
        return rms(x) * a

    assert probe_norm(Formula(formula)) == norm("RMSNorm", 24, 1e-6, weight="a", rounding="unknown", keeps_dtype=False)


def test_no_eps_at_all() -> None:
    assert probe_norm(nn.LayerNorm(24, eps=0.0)) == norm("LayerNorm", 24, 0.0)


def test_eps_without_an_attribute() -> None:
    odd = probe_norm(Formula(lambda x, a: rms(x, 1.005e-5) * a))
    assert isinstance(odd, NormFacts)
    assert odd.eps == pytest.approx(1.005e-5, rel=1e-6)
    assert odd.eps != 1e-5
    common = probe_norm(Formula(lambda x, a: rms(x.float(), 1e-5).to(x.dtype) * a))
    assert isinstance(common, NormFacts)
    assert common.eps == 1e-5


class ByHand(nn.Module):
    """A norm with every choice that the formula leaves."""

    def __init__(self, width: int, eps: float, *, centred: bool, one_plus: bool, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.small = eps
        self.centred, self.one_plus = centred, one_plus
        self.gain = nn.Parameter(torch.rand(width, dtype=dtype))
        self.shift = nn.Parameter(torch.rand(width, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y - y.mean(-1, keepdim=True) if self.centred else y
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.small)
        y = y * (self.gain.float() + self.one_plus)
        return (y if self.shift is None else y + self.shift.float()).to(x.dtype)


@settings(max_examples=40, deadline=None)
@given(
    width=st.one_of(st.integers(2, 9), st.integers(2, 600)),
    exponent=st.floats(-12.0, -2.0),
    centred=st.booleans(),
    one_plus=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_every_choice_is_recovered(
    width: int, exponent: float, centred: bool, one_plus: bool, bias: bool, dtype: torch.dtype
) -> None:
    eps = 10.0**exponent
    module = ByHand(width, eps, centred=centred, one_plus=one_plus, bias=bias, dtype=dtype)
    kind: Kind = "LayerNorm" if centred else "RMSNorm"
    shift = "shift" if bias else None
    assert looks_like_norm(module)
    assert probe_norm(module) == norm(kind, width, eps, zero_centered_gamma=one_plus, weight="gain", bias=shift)


@settings(max_examples=25, deadline=None)
@given(eps=st.floats(1e-12, 1e-2), width=st.integers(2, 300), bias=st.booleans(), rms_norm=st.booleans())
def test_torch_norms_with_any_eps(eps: float, width: int, bias: bool, rms_norm: bool) -> None:
    module = nn.RMSNorm(width, eps=eps) if rms_norm else nn.LayerNorm(width, eps=eps, bias=bias)
    expected = norm("RMSNorm", width, eps) if rms_norm else norm("LayerNorm", width, eps, bias="bias" if bias else None)
    assert probe_norm(module) == expected


def test_module_gradients_hooks_and_random_state_are_untouched() -> None:
    calls: list[nn.Module] = []
    module = Dropping(24, True)
    module.register_forward_hook(lambda hooked, args, output: calls.append(hooked))
    module(torch.randn(2, 24)).sum().backward()
    assert calls == [module]
    assert module.weight.grad is not None
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    gradient, attributes = module.weight.grad.clone(), dict(vars(module))
    identities, version, state = [id(p) for p in module.parameters()], module.weight._version, torch.get_rng_state()
    assert isinstance(probe_norm(module), NotANorm)
    assert torch.equal(torch.get_rng_state(), state)
    assert calls == [module]
    assert module.training
    assert vars(module) == attributes
    assert [id(p) for p in module.parameters()] == identities
    assert module.weight._version == version
    assert torch.equal(module.weight.grad, gradient)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_caller_contexts_do_not_matter() -> None:
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert probe_norm(nn.LayerNorm(24)) == norm("LayerNorm", 24, 1e-5)


def test_equal_layers_are_probed_once() -> None:
    runs: list[int] = []

    def formula(x: Tensor, a: Tensor) -> Tensor:
        runs.append(1)
        return rms(x) * a

    cache: dict[Hashable, NormFacts | NotANorm] = {}
    first = probe_norm_cached(Formula(formula), cache)
    count = len(runs)
    assert count > 0
    assert all(probe_norm_cached(Formula(formula).eval(), cache) is first for _ in range(5))
    assert len(runs) == count
    assert isinstance(probe_norm_cached(Formula(formula, width=12), cache, dtype=torch.float16), NormFacts)
    assert len(runs) > count
    assert probe_norm_cached(nn.LayerNorm(24, eps=1e-5), cache) != probe_norm_cached(nn.LayerNorm(24, eps=1e-6), cache)
    assert len(cache) == 4
