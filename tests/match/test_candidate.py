"""A candidate knows its names, ties, parents, calls and readers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from te_convert.capture.run import capture
from te_convert.capture.scenario import normalize_inputs
from te_convert.config import Alignment
from te_convert.facts.sharing import find_parents, module_names, parameter_names
from te_convert.match.candidate import Candidate, find_candidates
from te_convert.match.leaves import LeafPolicy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.again = self.block[0]
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.block[1].bias = self.block[0].bias

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.block(self.embed(ids))) + self.embed.weight.sum()
        return y


def candidates() -> dict[str, Candidate]:
    model = Net()
    found = capture(model, normalize_inputs([torch.tensor([[1, 2]]), torch.tensor([3])]), LeafPolicy())
    return {site.fqn: site for site in find_candidates(model, found, Alignment(8, 16))}


def test_each_module_once_with_its_aliases() -> None:
    found = candidates()
    assert list(found) == ["", "embed", "block", "block.0", "block.1", "head"]
    assert found["block.0"].aliases == ("again",)
    assert found["head"].aliases == ()
    assert [type(parent).__name__ for parent in found["block.0"].parents] == ["Net", "Sequential"]


def test_ties() -> None:
    found = candidates()
    assert found["head"].ties == {"weight": ("embed.weight",)}
    assert found["embed"].ties == {"weight": ("head.weight",)}
    assert found["block.0"].ties == {"bias": ("block.1.bias",)}
    assert found[""].ties == {}


def test_calls_and_readers() -> None:
    found = candidates()
    assert [call.input_shape for call in found["block.0"].calls] == [(1, 2, 4), (1, 4)]
    assert (found["block.0"].width, found["block.0"].dtype, found["block.0"].input_dtypes) == (4, torch.float32, {torch.float32})
    assert [use.function for use in found["head"].direct_uses] == ["sum", "sum"]
    assert found["head"].direct_uses == found["embed"].direct_uses
    assert found["block.1"].direct_uses == ()
    assert (found[""].dtype, found[""].parameters) == (None, {})
    assert found["head"].alignment == Alignment(8, 16)


def test_names_and_parents_of_a_model() -> None:
    model = Net()
    assert module_names(model)[id(model.again)] == ["block.0", "again"]
    assert parameter_names(model)[id(model.embed.weight)] == ["embed.weight", "head.weight"]
    assert find_parents(model)[id(model.again)] == [(model, "again"), (model.block, "0")]
    assert id(model) not in find_parents(model)
