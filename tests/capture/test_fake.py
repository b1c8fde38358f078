"""Models without weights give the same graph shape and the same plan as models with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from te_convert.capture.fake import is_meta
from te_convert.capture.graph import Recording
from te_convert.capture.inputs import derive_scenario
from te_convert.capture.run import capture, record
from te_convert.capture.scenario import normalize_inputs
from te_convert.config import ConvertConfig
from te_convert.match.leaves import LeafPolicy
from te_convert.plan.choose import make_plan
from te_convert.plan.model import Outcome
from tests.capture.architectures import ARCHITECTURES


def shape_of(recording: Recording) -> list[tuple[str, str, object]]:
    nodes: list[tuple[str, str, object]] = []
    for node in recording.graph.nodes:
        meta = node.meta.get("tensor_meta")
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        nodes.append((node.op, name, None if meta is None else (tuple(meta.shape), meta.dtype)))
    return nodes


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("meta_inputs", [False, True])
def test_the_same_graph_and_the_same_plan(name: str, meta_inputs: bool) -> None:
    make, _ = ARCHITECTURES[name]
    inputs = {"input_ids": torch.ones(2, 8, dtype=torch.long)}
    real = make()
    with torch.device("meta"):
        meta = make()
    assert is_meta(meta)
    assert not is_meta(real)
    given = {key: value.to("meta") for key, value in inputs.items()} if meta_inputs else inputs
    first, second = record(real, normalize_inputs(inputs)[0], LeafPolicy()), record(meta, normalize_inputs(given)[0], LeafPolicy())
    assert shape_of(first) == shape_of(second)
    assert [(call.fqn, call.input_shape) for call in first.calls] == [(call.fqn, call.input_shape) for call in second.calls]
    plans = [
        make_plan(model, capture(model, normalize_inputs(values), LeafPolicy()), ConvertConfig())
        for model, values in ((real, inputs), (meta, given))
    ]
    assert plans[0] == plans[1]
    assert plans[0].converting
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert all(parameter.is_leaf for parameter in meta.parameters())


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y * 2 if y.sum() > 0 else y


def test_a_decision_on_values_leaves_a_plan_without_a_graph() -> None:
    with torch.device("meta"):
        model = Decides()
    found = capture(model, normalize_inputs(torch.ones(2, 8)), LeafPolicy())
    assert not found.has_graph
    assert found.failures[0][0] == "inputs"
    plan = make_plan(model, found, ConvertConfig())
    (decision,) = plan.decisions
    assert (decision.outcome, decision.calls) == (Outcome.CONVERTED, 0)
    assert [reason.code for reason in decision.reasons] == ["capture.no-graph"]
    assert plan.flops_total == 0
    assert plan.notes[0].startswith("scenario inputs did not run: ")
    assert model.fc.weight.is_meta


def test_inputs_are_derived_for_meta_models_too() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4))
    scenario = derive_scenario(model)
    assert scenario is not None
    assert not scenario.args[0].is_meta
    recording = record(model, scenario, LeafPolicy())
    assert recording.call_counts() == {"": 1, "0": 1, "1": 1}
    assert recording.scenario is scenario


def test_a_model_that_is_only_partly_on_meta() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4, device="meta"), nn.BatchNorm1d(4))
    norm = model[2]
    assert isinstance(norm, nn.BatchNorm1d)
    before = norm.running_mean
    assert before is not None
    recording = record(model, normalize_inputs(torch.ones(2, 8))[0], LeafPolicy())
    assert recording.call_counts()["1"] == 1
    assert norm.running_mean is before
    assert torch.equal(before, torch.zeros(4))
