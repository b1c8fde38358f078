"""Views, in-place changes and nested results: every reader depends on what it read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from te_convert.capture.graph import after_mutation, to_graph_module
from te_convert.capture.leaves import is_builtin_leaf
from te_convert.capture.run import record
from te_convert.capture.scenario import normalize_inputs
from tests.capture.small_models import Forward, X, make_model, record_case


def graph_of(forward: Forward) -> fx.Graph:
    return record(make_model(forward), normalize_inputs(X)[0], is_builtin_leaf).graph


def ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                todo.append(source)
    return found


def named(graph: fx.Graph, target: str) -> fx.Node:
    (found,) = (node for node in graph.nodes if target in (node.target, getattr(node.target, "__name__", None)))
    assert isinstance(found, fx.Node)
    return found


def view_of_base(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y[0].mul_(3)
    return m.out(y)


def base_of_view(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    row = y[0]
    y.mul_(3)
    return m.out(row)


def sibling_view(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    first, second = y[0], y.view(-1)
    first.mul_(3)
    return m.out(second.view(2, 8))


def through_data(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y.data.mul_(3)
    return m.out(y)


def buffer_through_view(m: Any, x: Tensor) -> Any:
    m.table[2:4].mul_(x[0, :2])
    return m.out(m.table)


def attribute_through_view(m: Any, x: Tensor) -> Any:
    m.plain.view(2, 4).mul_(m.fc(x)[:, :4])
    return m.out(m.plain)


def set_item(m: Any, x: Tensor) -> Any:
    y = torch.zeros(2, 8)
    y[:, 2] = m.fc(x).mul_(1.0)[:, 2]
    return m.out(y)


def out_argument(m: Any, x: Tensor) -> Any:
    y = torch.empty(2, 8)
    torch.mul(m.fc(x), 2, out=y)
    return m.out(y)


@pytest.mark.parametrize(
    "forward",
    [view_of_base, base_of_view, sibling_view, buffer_through_view, attribute_through_view, through_data],
    ids=lambda forward: forward.__name__,
)
def test_a_change_reaches_every_reader_of_the_memory(forward: Forward) -> None:
    graph = graph_of(forward)
    assert named(graph, "mul_") in ancestors(named(graph, "out"))


@pytest.mark.parametrize(("forward", "target"), [(set_item, "__setitem__"), (out_argument, "mul")])
def test_a_target_that_is_written_depends_on_the_writer(forward: Forward, target: str) -> None:
    graph = graph_of(forward)
    assert named(graph, target) in ancestors(named(graph, "out"))
    assert named(graph, "fc") in ancestors(named(graph, "out"))


def not_related(m: Any, x: Tensor) -> Any:
    y, z = m.fc(x), m.out(x)
    y.mul_(3)
    return y, z


def read_before(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    z = m.out(y)
    y.mul_(3)
    return z, y


def test_a_change_reaches_nobody_else() -> None:
    graph = graph_of(not_related)
    assert named(graph, "mul_") not in ancestors(named(graph, "out"))
    assert not any(node.target is after_mutation for node in graph.nodes)
    assert named(graph, "mul_") not in ancestors(named(graph_of(read_before), "out"))


def test_elements_of_nested_results_have_their_own_nodes() -> None:
    _, recording = record_case("structures")
    chunk = named(recording.graph, "chunk")
    assert [user.args[1] for user in chunk.users] == [0, 1]
    (output,) = (node for node in recording.graph.nodes if node.op == "output")
    assert len(output.args[0]) == 6


def test_constants_are_kept_when_small_and_refused_when_large() -> None:
    small, large = torch.randn(4, 8), torch.randn(1000, 8)

    def reads_small(m: Any, x: Tensor) -> Any:
        return m.fc(x).sum() + small.sum()

    def reads_large(m: Any, x: Tensor) -> Any:
        return m.fc(x).sum() + large.sum()

    model = make_model(reads_small)
    recording = record(model, normalize_inputs(X)[0], is_builtin_leaf)
    (kept,) = recording.constants.values()
    assert torch.equal(kept, small)
    assert kept is not small
    assert recording.unknown_tensors == 1

    model = make_model(reads_large)
    recording = record(model, normalize_inputs(X)[0], is_builtin_leaf)
    assert recording.constants == {}
    with pytest.raises(LookupError, match="_constant_0 is a tensor of unknown origin"):
        to_graph_module(model, recording)


def test_inputs_with_clashing_or_odd_names() -> None:
    def forward(m: Any, **batch: Any) -> Any:
        return m.fc(batch["a_b"]) + batch["a"]["b"][0] + batch["class"] * batch["a"]["b"][0]

    model = make_model(forward)
    inputs = {"a_b": X, "a": {"b": (X + 1,)}, "class": X + 2}
    recording = record(model, normalize_inputs(inputs)[0], is_builtin_leaf)
    names = [node.name for node in recording.graph.nodes if node.op == "placeholder"]
    assert len(set(names)) == 3
    with torch.no_grad():
        (actual,) = to_graph_module(model, recording)(X, X + 1, X + 2)
        assert torch.equal(actual, model(**inputs))


def test_one_tensor_given_twice_is_one_placeholder() -> None:
    model = make_model(lambda m, x, y: m.fc(x) + y)
    recording = record(model, normalize_inputs((X, X))[0], is_builtin_leaf)
    assert sum(node.op == "placeholder" for node in recording.graph.nodes) == 1
