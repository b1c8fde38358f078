"""Probes make no large tensors: what is large in a recording is looked at in a small run that went the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import te_convert
from te_convert.capture.run import record
from te_convert.capture.scenario import Scenario, normalize_inputs
from te_convert.match import eager_attention
from te_convert.match.leaves import LeafPolicy
from te_convert.match.small_runs import MAX_ELEMENTS, small_nodes
from te_convert.plan.model import Outcome
from tests.estimate.models import Block

BATCH, LENGTH, WIDTH, HEADS = 8, 2048, 64, 4


class Masked(nn.Module):
    """Written-out attention with a causal buffer, and a mask that is given."""

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.qkv, self.least = nn.Linear(WIDTH, 3 * WIDTH), least
        self.register_buffer("causal", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
        self.causal: Tensor

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        length = x.shape[1]
        if length < self.least:
            raise ValueError("too short")
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) / (WIDTH // HEADS) ** 0.5
        scores = scores.masked_fill(~self.causal[:length, :length], float("-inf"))
        if mask is not None:
            scores = scores + mask
        out: Tensor = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        return out


class GoesAnotherWay(Masked):
    """Short inputs have their scores clamped."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.shape[1] > 100:
            return super().forward(x, mask)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out: Tensor = ((q @ k.transpose(-2, -1)).tanh().softmax(-1) @ v).transpose(1, 2).flatten(-2)
        return out


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of a tensor with memory that an operation returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if type(value) is Tensor and value.device.type == "cpu":
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


MODELS: dict[str, Callable[[], tuple[nn.Module, Any, str]]] = {
    "in parts": lambda: (Block(eager=True), (meta(BATCH, LENGTH, WIDTH),), "attn"),
    "a block": lambda: (Block(eager=True, scaled=False), (meta(BATCH, LENGTH, WIDTH),), "attn"),
    "causal": lambda: (Masked(), (meta(BATCH, LENGTH, WIDTH),), ""),
    "a mask": lambda: (Masked(), (meta(BATCH, LENGTH, WIDTH), meta(BATCH, 1, LENGTH, LENGTH)), ""),
    "a mask of three dimensions": lambda: (Masked(), (meta(BATCH, LENGTH, WIDTH), meta(LENGTH, LENGTH)), ""),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_at_a_large_size_makes_no_large_tensor(name: str) -> None:
    model, inputs, fqn = MODELS[name]()
    with LargestTensor() as largest:
        plan = te_convert.analyze(model.to("meta"), inputs)
    assert largest.elements <= MAX_ELEMENTS
    site = plan.get(fqn)
    assert (site.outcome, site.rule) == (Outcome.CONVERTED, "eager-attention")
    assert {shape.input for shape in site.shapes} == {(BATCH, HEADS, LENGTH, WIDTH // HEADS)}


@pytest.mark.parametrize("model", [Masked(least=1000), GoesAnotherWay()], ids=["does not run", "another way"])
def test_a_model_without_a_small_run_is_refused_with_the_figure(model: nn.Module) -> None:
    with LargestTensor() as largest:
        plan = te_convert.analyze(model.to("meta"), (meta(BATCH, LENGTH, WIDTH),))
    assert largest.elements <= MAX_ELEMENTS
    (reason,) = plan.get("").reasons
    assert reason.code == "attention.eager-region"
    assert f"its {BATCH * HEADS * LENGTH**2:,} scores are too many for a probe" in reason.detail


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_attention, "MAX_ELEMENTS", 0)


class Scaled(nn.Module):
    """Attention whose probabilities are ``between`` of the scores."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.between = nn.Linear(WIDTH, 3 * WIDTH), between

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out: Tensor = (self.between(q @ k.transpose(-2, -1)) @ v).transpose(1, 2).flatten(-2)
        return out


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda scores: scores.softmax(-1),
    "scaled": lambda scores: (scores * 0.2).softmax(-1),
    "over the queries": lambda scores: scores.softmax(-2),
    "clamped": lambda scores: scores.clamp(-1, 1).softmax(-1),
    "twice": lambda scores: scores.softmax(-1).softmax(-1),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_a_small_run_decides_as_the_recorded_one(name: str, request: pytest.FixtureRequest) -> None:
    model, x = Scaled(BETWEEN[name]), (torch.randn(4, 100, WIDTH),)
    at_its_size = te_convert.analyze(model, x).to_dict()
    request.getfixturevalue("everything_is_large")
    assert te_convert.analyze(model, x).to_dict() == at_its_size


def test_nodes_are_paired_by_what_they_do() -> None:
    model = Masked()
    (scenario,) = normalize_inputs((torch.randn(4, 100, WIDTH),))
    assert isinstance(scenario, Scenario)
    recording = record(model, scenario, LeafPolicy())
    found = small_nodes(model, recording)
    assert found is not None
    small, nodes = found
    assert small.scenario.args[0].shape == (2, 64, WIDTH)
    products = [node for node in recording.graph.nodes if node.target == "matmul"]
    assert [tuple(nodes[node].meta["tensor_meta"].shape) for node in products] == [
        (2, HEADS, 64, 64),
        (2, HEADS, 64, WIDTH // HEADS),
    ]
    assert small_nodes(Masked(least=90), recording) is None
    assert small_nodes(GoesAnotherWay(), recording) is None
