"""A converted model that is, or holds, a fx.GraphModule is copied and pickled whole, and computes the same afterwards."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import te_convert
from tests.estimate.models import Block, Mlp
from tests.rewrite.rewrite_samples import perturb

X = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))


class Holder(nn.Module):
    """Runs a part between two Linears."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(64, 64), part, nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.part(self.first(x)))
        return out


class NormMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(64), fx.symbolic_trace(Mlp(64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class TwoResults(nn.Module):
    """The norm itself is a result, which a fused norm returns lazily."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        return F.relu(self.a(y)) + self.b(y), y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a block": lambda: fx.symbolic_trace(Block(scaled=False)),
    "parts of a block": lambda: fx.symbolic_trace(Block()),
    "written-out attention": lambda: fx.symbolic_trace(Block(eager=True)),
    "inside a model": lambda: Holder(fx.symbolic_trace(Block(scaled=False))),
    "parts inside a model": lambda: Holder(fx.symbolic_trace(Block(eager=True))),
    "an MLP": NormMlp,
    "single Linears": lambda: fx.symbolic_trace(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))),
    "a norm among the results": lambda: fx.symbolic_trace(TwoResults()),
}


def through_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": through_pickle,
    "torch.save": through_torch_save,
    "deepcopy of what was pickled": lambda model: copy.deepcopy(through_pickle(model)),
    "pickled twice": lambda model: through_pickle(through_pickle(model)),
}


@cache
def converted(name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    original = perturb(MODELS[name]()).eval()
    result = te_convert.convert(original, (X,))
    assert result.report.parity.passed
    assert result.converted
    return original, result.model


def outputs(model: Any) -> list[Tensor]:
    with torch.no_grad():
        y = model(X)
    return list(y) if isinstance(y, tuple) else [y]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(type(b) is Tensor and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_copy_computes_the_same_and_has_everything(name: str, copied: str) -> None:
    original, model = converted(name)
    twin = COPIES[copied](model)
    assert same(outputs(model), outputs(twin))
    assert [n for n, _ in twin.named_modules()] == [n for n, _ in model.named_modules()]
    assert list(twin.state_dict()) == list(model.state_dict())
    assert type(te_convert.autocast(twin)) is type(te_convert.autocast(model))
    assert twin.__dict__["_te_convert_plan"] == model.__dict__["_te_convert_plan"]
    one, other = te_convert.original_state_dict(model), te_convert.original_state_dict(twin)
    assert list(one) == list(other) == list(original.state_dict())
    assert all(torch.equal(one[key], other[key]) for key in one)
    if copied == "copy":
        return  # it shares everything
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(torch.equal(te_convert.original_state_dict(model)[key], one[key]) for key in one)
    assert not same(outputs(model), outputs(twin))
    back = te_convert.revert(twin)
    assert all(bool((value == 0).all()) for value in back.state_dict().values())


def test_the_graph_of_an_unpickled_model_can_be_edited() -> None:
    _, model = converted("parts of a block")
    twin = through_pickle(model)
    assert [(n.op, n.target) for n in twin.graph.nodes if n.op == "call_module"] == [
        (n.op, n.target) for n in model.graph.nodes if n.op == "call_module"
    ]
    (result,) = (node for node in twin.graph.nodes if node.op == "output")
    with twin.graph.inserting_before(result):
        result.args = (twin.graph.call_function(torch.neg, (result.args[0],)),)
    twin.recompile()
    assert same([-y for y in outputs(model)], outputs(twin))


@pytest.mark.parametrize("name", ["a block", "parts of a block", "inside a model"])
def test_a_reverted_model_is_copied_by_torch_again(name: str) -> None:
    original, model = converted.__wrapped__(name)  # changed here, so not the others'
    back = te_convert.revert(model)
    graphs = [module for module in back.modules() if isinstance(module, fx.GraphModule)]
    assert graphs
    assert all(type(module).__deepcopy__ is fx.GraphModule.__deepcopy__ for module in graphs)
    assert all(type(module).__reduce_ex__ is object.__reduce_ex__ for module in graphs)
    for each in (back, copy.deepcopy(back), through_pickle(back)):
        assert torch.allclose(outputs(each)[0], outputs(original)[0], atol=1e-5)


def test_another_conversion_of_a_converted_graph_changes_nothing() -> None:
    _, model = converted("a block")
    again = te_convert.convert(model, (X,))
    assert again.report.parity.passed
    assert same(outputs(model), outputs(again.model))
