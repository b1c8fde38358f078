"""The RMSNorm rule: plain, one-plus and misnamed norms; look-alikes say what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_convert.plan.model import Outcome
from te_convert.replacements.specs import RMSNormSpec
from te_convert.weights.ops import Move, WeightMap
from tests.rules.rule_cases import build, codes, decide, x_like

MODELS = "transformers.models."
EPS32 = 1.1920928955078125e-07


class WithBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (6,), self.weight, 1e-6) + self.shift


class Centred(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class LayerNormInName(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


def spec(eps: float = 1e-6, zero_centered: bool = False, dtype: str = "float32") -> RMSNormSpec:
    return RMSNormSpec(6, eps, zero_centered, dtype)


CONVERTED: dict[str, tuple[Callable[[], nn.Module], RMSNormSpec, list[str]]] = {
    "torch": (lambda: nn.RMSNorm(6, eps=1e-3), spec(1e-3), []),
    "torch without eps": (lambda: nn.RMSNorm(6), spec(EPS32), []),
    "torch without eps in bfloat16": (lambda: nn.RMSNorm(6, dtype=torch.bfloat16), spec(EPS32, dtype="bfloat16"), []),
    "llama": (lambda: build(MODELS + "llama.modeling_llama:LlamaRMSNorm", 6), spec(), []),
    "llama in bfloat16": (
        lambda: build(MODELS + "llama.modeling_llama:LlamaRMSNorm", 6).bfloat16(),
        spec(dtype="bfloat16"),
        ["norm.rounding"],
    ),
    "gemma": (lambda: build(MODELS + "gemma.modeling_gemma:GemmaRMSNorm", 6), spec(zero_centered=True), []),
    "t5, called LayerNorm": (lambda: build(MODELS + "t5.modeling_t5:T5LayerNorm", 6), spec(), []),
    "image gpt, called LayerNorm": (
        lambda: build(MODELS + "imagegpt.modeling_imagegpt:ImageGPTLayerNorm", 6),
        spec(1e-5),
        [],
    ),
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("case", sorted(CONVERTED))
def test_converted(case: str, recorded: bool) -> None:
    make, expected, advices = CONVERTED[case]
    module = make()
    dtype = next(module.parameters()).dtype
    decision = decide(module, x_like(dtype=dtype) if recorded else None)
    assert (decision.outcome, decision.rule, decision.kind, decision.spec) == (
        Outcome.CONVERTED,
        "rms-norm",
        "RMSNorm",
        expected,
    )
    assert decision.weights == WeightMap((Move("weight", "weight"),))
    assert codes(decision) == ([] if recorded else ["capture.no-graph"]) + advices


def channels_first() -> nn.Module:
    return build("timm.layers:LayerNorm2d", 6)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, list[str], str]] = {
    "no affine": (lambda: nn.RMSNorm(6, elementwise_affine=False), x_like(), ["norm.no-affine"], "elementwise_affine=False"),
    "several dimensions": (lambda: nn.RMSNorm((3, 6)), x_like(), ["norm.multi-dim"], "normalized_shape is (3, 6)"),
    "both": (
        lambda: nn.RMSNorm((3, 6), elementwise_affine=False),
        x_like(),
        ["norm.multi-dim", "norm.no-affine"],
        "normalized_shape is (3, 6)",
    ),
    "bias": (WithBias, x_like(), ["norm.not-recognised"], "WithBias: an RMSNorm with a bias (shift)"),
    "subtracts the mean": (
        lambda: Centred(6, eps=1e-5),
        x_like(),
        ["norm.not-recognised"],
        "Centred: an nn.RMSNorm that subtracts the mean",
    ),
    "channels first": (channels_first, torch.randn(2, 6, 4, 4), ["norm.not-recognised"], "LayerNorm2d: its input is 4 wide"),
    "no norm": (
        lambda: build(MODELS + "mobilebert.modeling_mobilebert:NoNorm", 6),
        x_like(),
        ["norm.not-recognised"],
        "NoNorm: it does not normalise",
    ),
    "float64": (lambda: nn.RMSNorm(6).double(), x_like(dtype=torch.float64), ["dtype.float64"], "parameters are float64"),
    "another input dtype": (
        lambda: nn.RMSNorm(6),
        x_like(dtype=torch.float64),
        ["dtype.mixed"],
        "parameters are float32, recorded inputs float64",
    ),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("case", sorted(REFUSED))
def test_near_misses(case: str) -> None:
    make, inputs, expected, detail = REFUSED[case]
    decision = decide(make(), inputs)
    assert (decision.outcome, codes(decision)) == (Outcome.REFUSED, expected)
    assert decision.reasons[0].detail.startswith(detail)


def test_a_layer_norm_in_name_only_leaves_its_bias() -> None:
    decision = decide(LayerNormInName(6, bias=False), x_like())
    assert (decision.outcome, decision.kind, decision.rule) == (Outcome.CONVERTED, "RMSNorm", "rms-norm")


def test_a_gain_without_norm_in_its_name_is_no_match() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.rand(6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain

    decision = decide(Gain(), x_like())
    assert (decision.outcome, decision.reasons) == (Outcome.NO_MATCH, ())
