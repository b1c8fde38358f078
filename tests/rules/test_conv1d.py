"""The Conv1D rule: a transposed weight, so ties and reads from elsewhere forbid it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_convert.plan.model import Outcome
from te_convert.replacements.specs import LinearSpec
from te_convert.weights.ops import Move, Transpose, WeightMap
from tests.rules.rule_cases import build, codes, decide, x_like


def conv1d(outputs: int = 4, inputs: int = 6) -> nn.Module:
    return build("transformers.pytorch_utils:Conv1D", outputs, inputs)


class Transposed(nn.Module):
    """The same mathematics under other names, without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel


@pytest.mark.report("huggingface/transformers#311", "huggingface/transformers#24504", "AutoGPTQ/AutoGPTQ#139")
def test_converted() -> None:
    decision = decide(conv1d(), x_like())
    assert (decision.outcome, decision.rule, decision.kind) == (Outcome.CONVERTED, "conv1d", "Conv1D")
    assert decision.spec == LinearSpec(6, 4, True, "float32")
    assert decision.weights == WeightMap((Transpose("weight", "weight"), Move("bias", "bias")))
    assert codes(decision) == ["parameter.new-object"]
    assert decision.reasons[0].detail == "weight [in, out] is stored as [out, in]"


def test_by_its_numbers() -> None:
    decision = decide(Transposed().to(torch.bfloat16), x_like(dtype=torch.bfloat16))
    assert (decision.outcome, decision.kind, decision.class_name) == (Outcome.CONVERTED, "Conv1D", "Transposed")
    assert decision.spec == LinearSpec(6, 4, False, "bfloat16")
    assert decision.weights == WeightMap((Transpose("kernel", "weight"),))


def test_square_weights_are_told_apart() -> None:
    assert decide(conv1d(6, 6), x_like()).rule == "conv1d"
    assert decide(nn.Linear(6, 6), x_like()).rule == "linear"


def test_a_tie_is_refused() -> None:
    site, other = conv1d(6, 10), nn.Embedding(10, 6)
    site.weight = other.weight

    def run(m: Any, x: Tensor) -> Any:
        return m.site(m.other(x).repeat(1, 2)[:, :10])

    decision = decide(site, torch.tensor([1, 2, 3]), run, modules={"other": other})
    assert decision.outcome is Outcome.REFUSED
    assert codes(decision) == ["parameter.tied-layout", "parameter.new-object"]
    assert decision.reasons[0].detail == "weight is also other.weight"


def test_a_read_from_elsewhere_is_refused() -> None:
    decision = decide(conv1d(), x_like(), lambda m, x: m.site(x).sum() + m.site.weight.sum())
    assert decision.outcome is Outcome.REFUSED
    assert codes(decision) == ["module.weight-read-elsewhere", "parameter.new-object"]


def test_other_near_misses() -> None:
    assert codes(decide(conv1d(), x_like(), lambda m, x: x * 1)) == ["module.never-called", "parameter.new-object"]
    float64 = decide(conv1d().double(), x_like(dtype=torch.float64))
    assert (float64.outcome, codes(float64)) == (Outcome.REFUSED, ["dtype.float64", "parameter.new-object"])
    advice = decide(conv1d(50, 32), x_like(32, rows=7), recipe="fp8-current")
    assert (advice.outcome, advice.precision) == (Outcome.CONVERTED, "high")
    assert codes(advice) == ["parameter.new-object", "alignment.features", "alignment.rows"]


def test_embeddings_and_routers_are_no_conv1d() -> None:
    class Router(Transposed):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.kernel).softmax(-1)

    for site, x in ((nn.Embedding(6, 4), torch.tensor([1])), (Router(), x_like())):
        decision = decide(site, x)
        assert (decision.outcome, decision.rule, decision.reasons) == (Outcome.NO_MATCH, None, ())
