"""Real architectures: the graph computes the same bits, and the plan knows who reads what."""

from __future__ import annotations

from collections import Counter

import pytest

from te_convert.capture.run import capture, other_mode, record
from te_convert.capture.scenario import normalize_inputs
from te_convert.config import ConvertConfig
from te_convert.match.leaves import LeafPolicy
from te_convert.plan.choose import make_plan
from te_convert.plan.model import Outcome, Plan
from tests.capture.architectures import ARCHITECTURES
from tests.capture.small_models import assert_replay_is_equal

EXPECTED: dict[str, dict[str, int]] = {
    "bert": {"te.Linear": 13, "te.LayerNorm": 5},
    "gpt2": {"te.Linear": 9, "te.LayerNorm": 5},
    "llama": {"te.Linear": 15, "te.RMSNorm": 5},
    "t5": {"te.Linear": 33, "te.RMSNorm": 12},
    "bart": {"te.Linear": 32, "te.LayerNorm": 12},
    "mixtral": {"te.Linear": 8, "te.RMSNorm": 5},
    "falcon": {"te.Linear": 8, "te.LayerNorm": 3},
    "gptj": {"te.Linear": 12, "te.LayerNorm": 3},
    "opt": {"te.Linear": 12, "te.LayerNorm": 5},
    "bloom": {"te.Linear": 8, "te.LayerNorm": 6},
    "gemma2": {"te.Linear": 14, "te.RMSNorm": 9},
    "mamba": {"te.Linear": 6, "te.RMSNorm": 3},
    "whisper": {"te.Linear": 16, "te.LayerNorm": 7},
    "clip": {"te.Linear": 26, "te.LayerNorm": 11},
    "vit": {"te.Linear": 9, "te.LayerNorm": 5},
    "swin": {"te.Linear": 14, "te.LayerNorm": 9},
    "convnext": {"te.Linear": 9, "te.LayerNorm": 4},
    "beit": {"te.Linear": 7, "te.LayerNorm": 5},
}


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
@pytest.mark.report("huggingface/transformers#36022", "huggingface/transformers#31414")
def test_graph_and_plan(name: str) -> None:
    make, inputs = ARCHITECTURES[name]
    model = make()
    (scenario,) = normalize_inputs(inputs)
    before = {key: (value.clone(), value._version) for key, value in model.state_dict().items()}
    recording = record(model, scenario, LeafPolicy())
    recording.graph.lint()
    assert_replay_is_equal(model, recording)
    found = capture(model, [scenario, other_mode(scenario, training=True)], LeafPolicy())
    assert found.failures == ()
    plan = make_plan(model, found, ConvertConfig(fuse=False))
    assert Plan.from_dict(plan.to_dict()) == plan
    assert Counter(decision.replacement for decision in plan.converting) == EXPECTED[name]
    assert all(decision.calls >= 2 for decision in plan.converting)
    refused = {reason.code for decision in plan if decision.outcome is Outcome.REFUSED for reason in decision.reasons}
    assert refused <= {"module.weight-read-elsewhere", *({"norm.not-recognised"} if name == "convnext" else ())}
    fused = make_plan(model, found, ConvertConfig())
    assert Plan.from_dict(fused.to_dict()) == fused
    assert {decision.fqn for decision in plan.converting} <= {decision.fqn for decision in fused.converting}
    assert {decision.fused_into for decision in fused.converting} - {None} == {fusion.fqn for fusion in fused.fusions}
    assert all(value.equal(before[key][0]) for key, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())
