"""A stretch of the recorded graph, evaluated on other values: what it computes, and what cannot be looked at alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from te_convert.capture.graph import Recording
from te_convert.capture.run import capture
from te_convert.capture.scenario import normalize_inputs
from te_convert.match.leaves import LeafPolicy
from te_convert.match.regions import MAX_NODES, Region, RegionError, find_region

WIDTH = 4
Function = Callable[[Any, Tensor], Any]


class Between(nn.Module):
    """Two Linears that read one tensor, a function of both, a Linear behind."""

    def __init__(self, function: Callable[..., Any], count: int = 1, **modules: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for name, module in modules.items():
            self.add_module(name, module)
        self.function, self.count = function, count

    def forward(self, x: Tensor) -> Any:
        values = (self.a(x), self.b(x))[: self.count]
        return self.out(self.function(self, *values))


def recorded(model: nn.Module, x: Tensor) -> Recording:
    found = capture(model, normalize_inputs((x,)), LeafPolicy())
    assert found.failures == ()
    return found.recordings[0]


def is_linear(node: fx.Node) -> bool:
    return node.op == "call_module" and node.target in ("a", "b", "out")


def region_of(function: Callable[..., Any], count: int = 1, **modules: nn.Module) -> tuple[Region, dict[str, nn.Module]]:
    model = Between(function, count, **modules)
    recording = recorded(model, torch.randn(3, WIDTH))
    out = next(node for node in recording.graph.nodes if node.op == "call_module" and node.target == "out")
    return find_region(out.all_input_nodes[0], is_linear), dict(model.named_modules())


X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
Y = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))

FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], int]] = {
    "function": (lambda m, a: F.silu(a), F.silu, 1),
    "method": (lambda m, a: a.tanh().mul(2), lambda a: a.tanh() * 2, 1),
    "operators": (lambda m, a: a * torch.sigmoid(1.702 * a), lambda a: a * torch.sigmoid(1.702 * a), 1),
    "two inputs": (lambda m, a, b: F.silu(a) * b, lambda a, b: F.silu(a) * b, 2),
    "in graph order": (lambda m, a, b: b - a, lambda a, b: b - a, 2),
    "halves": (lambda m, a: torch.cat(a.chunk(2, -1)[::-1], -1), lambda a: a.roll(2, -1), 1),
    "in place": (lambda m, a: a.mul_(2).add_(1), lambda a: a * 2 + 1, 1),
    "casts": (lambda m, a: F.gelu(a.to(torch.bfloat16)).float(), F.gelu, 1),
    "keywords": (lambda m, a: F.gelu(input=a, approximate="tanh"), lambda a: F.gelu(a, approximate="tanh"), 1),
}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_it_computes_what_was_recorded(name: str) -> None:
    function, expected, count = FUNCTIONS[name]
    region, modules = region_of(function, count)
    assert [str(node.target) for node in region.inputs] == ["a", "b"][:count]
    values = [X, Y][:count]
    before = [value.clone() for value in values]
    torch.testing.assert_close(region.evaluate(modules, values), expected(*values), rtol=1e-6, atol=1e-6)
    assert all(torch.equal(value, old) for value, old in zip(values, before, strict=True))


def test_dropouts_are_off_and_named() -> None:
    region, modules = region_of(lambda m, a: m.drop(F.relu(a)), drop=nn.Dropout(0.5))
    assert [str(node.target) for node in region.dropouts(modules)] == ["drop"]
    assert torch.equal(region.evaluate(modules, [X]), X.relu())
    region, modules = region_of(lambda m, a: F.dropout(F.relu(a), 0.5, training=True))
    assert len(region.dropouts(modules)) == 1
    assert torch.equal(region.evaluate(modules, [X]), X.relu())


def test_modules_without_parameters_run() -> None:
    region, modules = region_of(lambda m, a: m.act(a), act=nn.GELU())
    assert torch.equal(region.evaluate(modules, [X]), F.gelu(X))


def test_what_cannot_be_evaluated() -> None:
    region, modules = region_of(lambda m, a: m.act(a), act=nn.PReLU())
    with pytest.raises(RegionError, match="act has parameters"):
        region.evaluate(modules, [X])
    region, modules = region_of(lambda m, a: a.view(3, 2, 2).flatten(1))
    with pytest.raises(RegionError, match="fails on other values: RuntimeError"):
        region.evaluate(modules, [torch.randn(5, WIDTH)])
    region, modules = region_of(lambda m, a: F.relu(a))
    chunked = Region(region.inputs, region.output, region.nodes)
    with pytest.raises(ValueError, match="argument"):
        chunked.evaluate(modules, [X, Y])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, a: a * m.gain, "it also uses gain"),
        (lambda m, a: a * m.a.weight[0], "it also uses a.weight"),
    ],
)
def test_tensors_of_the_model_end_the_search(function: Function, message: str) -> None:
    class Gain(Between):
        def __init__(self) -> None:
            super().__init__(function)
            self.register_buffer("gain", torch.ones(WIDTH))

    recording = recorded(Gain(), X)
    out = next(node for node in recording.graph.nodes if node.op == "call_module" and node.target == "out")
    with pytest.raises(RegionError, match=message):
        find_region(out.all_input_nodes[0], is_linear)


def test_an_input_of_the_model_and_too_many_steps_end_the_search() -> None:
    recording = recorded(nn.Sequential(nn.ReLU(), nn.Tanh()), X)
    last = [node for node in recording.graph.nodes if node.op != "output"][-1]
    with pytest.raises(RegionError, match="it also uses"):
        find_region(last, is_linear)

    def long(m: Any, a: Tensor) -> Tensor:
        for _ in range(MAX_NODES + 1):
            a = a + 1
        return a

    with pytest.raises(RegionError, match=f"more than {MAX_NODES}"):
        region_of(long)


def test_keys_are_equal_for_equal_functions_only() -> None:
    def key(function: Callable[..., Any], count: int = 1, **modules: nn.Module) -> Any:
        region, found = region_of(function, count, **modules)
        return region.key(found)

    assert key(lambda m, a: F.silu(a) * 2) == key(lambda m, a: F.silu(a) * 2)
    assert hash(key(lambda m, a: F.silu(a))) == hash(key(lambda m, a: F.silu(a)))
    different = [
        key(lambda m, a: F.silu(a)),
        key(lambda m, a: F.relu(a)),
        key(lambda m, a: F.silu(a) * 2),
        key(lambda m, a: F.silu(a) * 3),
        key(lambda m, a: F.gelu(a)),
        key(lambda m, a: F.gelu(a, approximate="tanh")),
        key(lambda m, a, b: F.silu(a) * b, 2),
        key(lambda m, a, b: F.silu(b) * a, 2),
        key(lambda m, a: m.act(a), act=nn.GELU()),
        key(lambda m, a: m.act(a), act=nn.GELU(approximate="tanh")),
    ]
    assert len(set(different)) == len(different)


def test_evaluation_leaves_the_random_state_and_gradients_alone() -> None:
    region, modules = region_of(lambda m, a: F.relu(a) + torch.rand_like(a))
    state = torch.get_rng_state()
    assert not region.evaluate(modules, [X.clone().requires_grad_()]).requires_grad
    assert torch.equal(torch.get_rng_state(), state)
