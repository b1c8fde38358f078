"""The LayerNorm rule: every form of the norm, whatever its name, and every near miss with its reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from te_convert.plan.model import Outcome
from te_convert.replacements.specs import LayerNormSpec
from te_convert.weights.ops import Fill, Move, WeightMap
from tests.rules.rule_cases import Wrapped, build, codes, decide, x_like

MODELS = "transformers.models."


class LN(nn.Module):
    """nanoGPT's norm, with names of its own."""

    def __init__(self, bias: bool = True, one_plus: bool = False) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(6))
        self.shift = nn.Parameter(torch.rand(6)) if bias else None
        self.one_plus = one_plus

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (6,), self.gain + float(self.one_plus), self.shift, 1e-3)


class BiasOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (6,)) + self.shift


class Upcast(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class Doubled(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def subclassed() -> nn.Module:
    module = nn.LayerNorm(6)
    module.weight = nn.Parameter(torch.ones(6).as_subclass(Wrapped))
    return module


def spec(eps: float = 1e-5, zero_centered: bool = False, dtype: str = "float32") -> LayerNormSpec:
    return LayerNormSpec(6, eps, zero_centered, dtype)


WEIGHT, BIAS, NO_BIAS = Move("weight", "weight"), Move("bias", "bias"), Fill("bias", 0.0, 6)

CONVERTED: dict[str, tuple[Callable[[], nn.Module], LayerNormSpec, WeightMap]] = {
    "plain": (lambda: nn.LayerNorm(6), spec(), WeightMap((WEIGHT, BIAS))),
    "eps": (lambda: nn.LayerNorm(6, eps=1e-12), spec(1e-12), WeightMap((WEIGHT, BIAS))),
    "no bias": (lambda: nn.LayerNorm(6, bias=False), spec(), WeightMap((WEIGHT, NO_BIAS))),
    "bfloat16": (lambda: nn.LayerNorm(6, dtype=torch.bfloat16), spec(dtype="bfloat16"), WeightMap((WEIGHT, BIAS))),
    "float16": (lambda: nn.LayerNorm(6, dtype=torch.float16), spec(dtype="float16"), WeightMap((WEIGHT, BIAS))),
    "other names": (LN, spec(1e-3), WeightMap((Move("gain", "weight"), Move("shift", "bias")))),
    "other names, no bias": (lambda: LN(bias=False), spec(1e-3), WeightMap((Move("gain", "weight"), NO_BIAS))),
    "one plus": (lambda: LN(one_plus=True), spec(1e-3, True), WeightMap((Move("gain", "weight"), Move("shift", "bias")))),
    "cohere": (
        lambda: build(MODELS + "cohere.modeling_cohere:CohereLayerNorm", 6, eps=1e-5),
        spec(),
        WeightMap((WEIGHT, NO_BIAS)),
    ),
    "timm": (lambda: build("timm.layers:LayerNorm", 6), spec(1e-6), WeightMap((WEIGHT, BIAS))),
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("case", sorted(CONVERTED))
def test_converted(case: str, recorded: bool) -> None:
    make, expected, weights = CONVERTED[case]
    module = make()
    dtype = next(module.parameters()).dtype
    decision = decide(module, x_like(dtype=dtype) if recorded else None)
    assert (decision.outcome, decision.rule, decision.kind) == (Outcome.CONVERTED, "layer-norm", "LayerNorm")
    assert (decision.spec, decision.weights) == (expected, weights)
    assert codes(decision) == ([] if recorded else ["capture.no-graph"])


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "no affine": (lambda: nn.LayerNorm(6, elementwise_affine=False), x_like(), ["norm.no-affine"]),
    "several dimensions": (lambda: nn.LayerNorm((3, 6)), x_like(), ["norm.multi-dim"]),
    "both": (lambda: nn.LayerNorm((3, 6), elementwise_affine=False), x_like(), ["norm.multi-dim", "norm.no-affine"]),
    "bias only": (BiasOnly, x_like(), ["norm.no-affine"]),
    "another forward": (lambda: Doubled(6), x_like(), ["norm.not-recognised"]),
    "float64": (lambda: nn.LayerNorm(6).double(), x_like(dtype=torch.float64), ["dtype.float64"]),
    "output dtype": (lambda: Upcast(6).bfloat16(), x_like(dtype=torch.bfloat16), ["norm.output-dtype"]),
    "output dtype, not recorded": (lambda: Upcast(6).bfloat16(), None, ["capture.no-graph", "norm.output-dtype"]),
    "parametrized": (
        lambda: parametrizations.weight_norm(nn.LayerNorm(6), dim=0),
        x_like(),
        ["module.parametrized"],
    ),
    "tensor subclass": (subclassed, x_like(), ["parameter.tensor-subclass"]),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_near_misses(case: str) -> None:
    make, inputs, expected = REFUSED[case]
    decision = decide(make(), inputs)
    assert (decision.outcome, codes(decision)) == (Outcome.REFUSED, expected)
    assert decision.replacement is None


def test_float32_norm_on_bfloat16_input() -> None:
    def run(m: Any, x: Tensor) -> Any:
        return m.site(x)

    decision = decide(Upcast(6), x_like(dtype=torch.bfloat16), run)
    assert decision.outcome is Outcome.REFUSED
    assert codes(decision) == ["dtype.mixed", "norm.output-dtype"]


def test_weight_read_elsewhere() -> None:
    read = decide(nn.LayerNorm(6), x_like(), lambda m, x: m.site(x) * m.site.weight)
    assert (read.outcome, codes(read)) == (Outcome.CONVERTED, ["module.weight-also-read"])
    renamed = decide(LN(), x_like(), lambda m, x: m.site(x) * m.site.gain)
    assert (renamed.outcome, codes(renamed)) == (Outcome.REFUSED, ["module.weight-read-elsewhere"])


def test_batch_and_group_norms_are_no_match() -> None:
    for module, x in ((nn.BatchNorm1d(6), x_like()), (nn.GroupNorm(2, 6), x_like())):
        decision = decide(module, x)
        assert (decision.outcome, decision.reasons) == (Outcome.NO_MATCH, ())
