"""Norms are recognised by their numbers, whatever they are called, and look-alikes are not."""

from __future__ import annotations

from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from te_convert.facts.norm_formula import NormFacts
from te_convert.facts.norms import NotANorm, looks_like_norm, probe_norm, probe_norm_cached
from tests.facts.norm_samples import FLOAT32_EPS, LN, MODELS, Formula, detail, layer, load, norm, rms

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
