"""A model, its inputs and all random states are after a recording what they were before."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from te_convert.capture.leaves import is_builtin_leaf
from te_convert.capture.preserve import copy_inputs, mode, preserve_model, preserve_rng, seed_all
from te_convert.capture.run import capture, record, runs
from te_convert.capture.scenario import Scenario, normalize_inputs
from tests.capture.small_models import CASES, X, build

Outcome = str


class Stateful(nn.Module):
    """Changes everything that a forward can change, then returns or raises."""

    cache: Tensor
    temporary: Tensor

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails
        self.fc = nn.Linear(8, 8)
        self.bn = nn.BatchNorm1d(8)
        self.register_buffer("cache", torch.zeros(2, 8))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("resized", torch.arange(3.0))
        self.register_buffer("temporary", torch.full((2,), float("nan")), persistent=False)
        self.plain = torch.zeros(4)
        self.count = 0
        self.history: list[Any] = [1]
        self.statistics: dict[str, list[int]] = {"loss": [1]}
        self.seen: set[int] = {1}
        self.recent: deque[int] = deque([1, 2], maxlen=2)
        self.counter: Counter[str] = Counter(a=1)
        self.ordered = OrderedDict(a=1, b=2)
        self.caches = [torch.zeros(2)]
        self.handle: Any = None

    def forward(self, x: Tensor) -> Any:
        y = self.bn(self.fc(x))
        self.cache[:, 0].copy_(y[:, 0])
        self.replaced = torch.ones(5)
        self.resized.data = torch.ones(7)
        self.temporary.fill_(1.0)
        self.plain.add_(1)
        self.count += 1
        self.history.append(y)
        self.statistics["loss"].append(2)
        self.seen.add(2)
        self.recent.append(3)
        self.counter["b"] += 1
        self.ordered.move_to_end("a")
        self.caches[0].add_(1)
        self.extra = y
        self.new = nn.Linear(2, 2)
        self.fc.register_forward_hook(lambda module, args, output: None)
        self.register_parameter("late", nn.Parameter(torch.ones(1)))
        self.bn.eval()
        del self.handle
        with torch.enable_grad():
            self.fc(x).sum().backward()
        random.random()
        np.random.rand()
        torch.rand(1)
        x.zero_()
        if self.fails:
            raise ValueError("half way")
        return y


def describe(value: Any) -> Any:
    """A value that equality can compare, with the identity of mutable objects."""
    if isinstance(value, Tensor):
        return id(value), value.dtype, tuple(value.shape), np.asarray(value.detach().cpu()).tobytes()
    if isinstance(value, dict):
        return id(value), [(key, describe(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return id(value), [describe(item) for item in value]
    if isinstance(value, set):
        return id(value), sorted(map(repr, value))
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def snapshot(model: nn.Module) -> list[Any]:
    grads = [describe(parameter.grad) for parameter in model.parameters()]
    return [*((name, type(m), describe(dict(vars(m)))[1]) for name, m in model.named_modules()), grads]


def random_states() -> list[Any]:
    python, numpy_state = random.getstate(), np.random.get_state(legacy=False)
    return [python, repr(numpy_state), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("with_grad", [False, True])
def test_nothing_of_the_model_changes(fails: bool, with_grad: bool) -> None:
    model = Stateful(fails).train()
    if with_grad:
        model.fc(X).sum().backward()
    inputs = X.clone()
    before, states = snapshot(model), random_states()
    found = capture(model, normalize_inputs(inputs), is_builtin_leaf)
    assert found.has_graph is not fails
    assert [error for _, error in found.failures] == (["ValueError: half way"] if fails else [])
    assert snapshot(model) == before
    assert random_states() == states
    assert torch.equal(inputs, X)
    error = runs(model, normalize_inputs(inputs)[0])
    assert isinstance(error, ValueError) is fails
    assert snapshot(model) == before


def test_the_model_of_that_test_does_change_without_protection() -> None:
    model = Stateful(False).train()
    before, states = snapshot(model), random_states()
    model(X.clone())
    after = snapshot(model)
    assert after[0] != before[0]
    assert after[-1] != before[-1]
    assert random_states() != states


@pytest.mark.parametrize("case", sorted(CASES))
def test_small_models_are_untouched(case: str) -> None:
    model, scenario = build(case)
    before, states = snapshot(model), random_states()
    given = describe((scenario.args, scenario.kwargs))[1]
    record(model, scenario, is_builtin_leaf)
    assert snapshot(model) == before
    assert random_states() == states
    assert describe((scenario.args, scenario.kwargs))[1] == given


class Uncopied(dict[str, int]):
    """A dictionary that forbids ``copy.copy``."""

    def __copy__(self) -> Uncopied:
        raise RuntimeError("not to be copied")


def test_items_are_restored_in_a_container_that_cannot_be_copied() -> None:
    """Only its items are held: models have thousands of empty containers, and ``copy.copy`` is slow."""
    model, table = nn.Linear(2, 2), Uncopied(a=1)
    model.__dict__["table"] = table
    with preserve_model(model):
        table["b"] = 2
    assert (model.__dict__["table"] is table, dict(table)) == (True, {"a": 1})


def test_a_lazy_module_stays_lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyBatchNorm1d())
    keys, kinds = list(vars(model[0])), [type(module) for module in model.modules()]
    recording = record(model, normalize_inputs(X)[0], is_builtin_leaf)
    assert recording.call_counts()["0"] == 1
    assert [type(module) for module in model.modules()] == kinds
    assert list(vars(model[0])) == keys
    assert type(model[0].weight) is nn.UninitializedParameter
    assert type(model[2].running_mean) is nn.UninitializedBuffer
    assert model[0].in_features == 0
    assert model(X).shape == (2, 4)
    assert type(model[0]) is nn.Linear


def test_tensors_that_equality_cannot_compare() -> None:
    class Odd(nn.Module):
        sparse: Tensor
        inference: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sparse", torch.eye(2).to_sparse())
            with torch.inference_mode():
                self.register_buffer("inference", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.sparse.mul_(2)
            with torch.inference_mode():
                self.inference.add_(1)
            return x

    model = Odd()
    record(model, normalize_inputs(X)[0], is_builtin_leaf)
    assert torch.equal(model.sparse.to_dense(), torch.eye(2))
    assert torch.equal(model.inference, torch.zeros(2))


def test_train_flags_are_restored_one_by_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2)).train()
    model[1].eval()
    with mode(model, True):
        assert all(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False, True]

    def fail() -> None:
        with mode(model, False):
            assert not model.training
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_random_states_are_restored_after_an_exception() -> None:
    states = random_states()

    def fail() -> None:
        with preserve_rng():
            seed_all(3)
            first = (random.random(), np.random.rand(), float(torch.rand(1)))
            seed_all(3)
            assert (random.random(), np.random.rand(), float(torch.rand(1))) == first
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert random_states() == states


def test_parameters_and_hooks_keep_their_identity() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    handle = model[0].register_forward_hook(lambda module, args, output: None)
    parameters = [id(parameter) for parameter in model.parameters()]
    with preserve_model(model):
        model[0].weight = nn.Parameter(torch.ones(8, 8))
        model[0]._forward_hooks.clear()
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert len(model[0]._forward_hooks) == 1
    handle.remove()
    assert len(model[0]._forward_hooks) == 0


class Cache:
    """A mutable cache object, as decoders take."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = list(tensors)

    def update(self, x: Tensor) -> Tensor:
        self.tensors.append(x)
        self.tensors[0].mul_(2)
        return torch.cat(self.tensors)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        return cache.update(self.fc(x))


@pytest.mark.parametrize("history", [False, True])
def test_a_cache_of_the_caller_is_untouched(history: bool) -> None:
    model = Decoder()
    filled = model.fc(X) if history else torch.ones(2, 8)
    assert (filled.grad_fn is not None) is history
    cache, value = Cache(filled), filled.detach().clone()
    recording = record(model, normalize_inputs((X, cache))[0], is_builtin_leaf)
    assert recording.call_counts()["fc"] == 1
    assert len(cache.tensors) == 1
    assert cache.tensors[0] is filled
    assert torch.equal(filled, value)


def test_copies_of_inputs() -> None:
    leaf = torch.ones(2, requires_grad=True)
    made = leaf * 2
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    inputs = ((leaf, made, {"again": leaf}), {"cache": Cache(made), "generator": generator, "number": 3})
    (first, second, third), kwargs = copy_inputs(inputs)
    assert first is not leaf
    assert third["again"] is first
    assert kwargs["cache"].tensors[0] is second
    assert (first.requires_grad, second.requires_grad, second.grad_fn) == (True, True, None)
    assert torch.equal(second, made)
    torch.rand(3, generator=kwargs["generator"])
    assert torch.equal(generator.get_state(), state)
    assert kwargs["number"] == 3


def test_what_cannot_be_copied_is_passed_on() -> None:
    class Handle:
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            raise TypeError("no copies")

    handle = Handle()
    assert copy_inputs(((handle,), {}))[0][0] is handle


def test_each_call_of_a_scenario_gets_its_own_inputs() -> None:
    class Eats(nn.Module):
        def forward(self, items: list[Tensor]) -> Tensor:
            return items.pop().zero_()

    scenario = Scenario("inputs", ([X.clone()],), {})
    for _ in range(2):
        assert scenario.call(Eats()).abs().max() == 0
    assert torch.equal(scenario.args[0][0], X)


def test_deepcopy_is_as_before_afterwards() -> None:
    copy_inputs(((X,), {}))
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(torch.ones(2, requires_grad=True) * 2)
