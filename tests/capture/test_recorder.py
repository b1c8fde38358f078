"""One concrete run becomes a graph that computes the same bits, whatever the model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_convert.capture.leaves import is_builtin_leaf
from te_convert.capture.run import capture, other_mode, record
from te_convert.capture.scenario import normalize_inputs
from tests.capture.small_models import (
    CASES,
    X,
    assert_replay_is_equal,
    build,
    gradients,
    make_model,
    record_case,
    transforms,
)


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_graph_computes_the_same_bits(case: str) -> None:
    model, recording = record_case(case)
    recording.graph.lint()
    assert_replay_is_equal(model, recording)


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_node_says_what_it_is(case: str) -> None:
    model, recording = record_case(case)
    names = {name for name, _ in model.named_modules()}
    with_tensor = 0
    for node in recording.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        stack = node.meta["nn_module_stack"]
        assert stack == () or stack[0] == ""
        assert set(stack) <= names
        with_tensor += "tensor_meta" in node.meta
    assert with_tensor > 0
    placeholders = [node for node in recording.graph.nodes if node.op == "placeholder"]
    assert placeholders[0].meta["tensor_meta"].shape == X.shape
    assert placeholders[0].meta["tensor_meta"].dtype == torch.float32
    for index, node in ((node.meta["module_call"], node) for node in recording.graph.nodes if node.op == "call_module"):
        assert recording.calls[index].fqn == node.target
        assert recording.calls[index].output is node


EXPECTED_CALLS: dict[str, dict[str, int]] = {
    "in-place": {"fc": 1, "out": 1},
    "shared": {"fc": 2, "norm": 1},
    "keyword": {"fc": 1},
    "direct": {},
    "function with module": {"fc": 1, "out": 1},
    "raises and recovers": {"out": 1},
    "checkpoint reentrant": {"fc": 1, "out": 1},
    "checkpoint": {"fc": 1, "out": 1},
    "thread": {"fc": 1, "out": 1},
    "attention": {"mha": 1, "out": 1},
    "lstm": {"lstm": 1, "out": 1},
    "hooks": {"hooks": 1, "hooks.0": 1, "out": 1},
    "transformer layer": {
        **{f"layer.{name}": 1 for name in ("linear1", "linear2", "norm1", "norm2", "self_attn", "dropout", "dropout1", "dropout2")},
        "layer": 1,
    },
}


@pytest.mark.parametrize("case", sorted(EXPECTED_CALLS))
def test_calls_are_counted(case: str) -> None:
    _, recording = record_case(case)
    assert recording.call_counts() == {"": 1, **EXPECTED_CALLS[case]}


def test_a_call_has_its_facts() -> None:
    _, recording = record_case("keyword")
    (call,) = (call for call in recording.calls if call.fqn == "fc")
    assert (call.n_positional, call.keywords) == (0, ("input",))
    assert (call.input_shape, call.output_shape, call.dtype, call.output_dtype) == ((2, 8), (2, 8), torch.float32, torch.float32)
    assert call.leaf
    assert not call.raised
    (placeholder, *_) = recording.graph.nodes
    assert call.args == (placeholder,)


def test_calls_that_the_graph_cannot_show_have_shapes_all_the_same() -> None:
    for case in ("thread", "function with module"):
        _, recording = record_case(case)
        (call,) = (call for call in recording.calls if call.fqn == "fc")
        assert (call.args, call.input_shape, call.output_shape, call.leaf) == ((None,), (2, 8), (2, 8), True)
        assert recording.direct_uses == ()


def test_a_call_that_raised_is_kept_apart() -> None:
    _, recording = record_case("raises and recovers")
    (call,) = (call for call in recording.calls if call.fqn == "fc")
    assert call.raised
    assert "fc" not in {node.target for node in recording.graph.nodes}


def test_producers_and_consumers() -> None:
    _, recording = record_case("shared")
    first, norm, second = (node for node in recording.graph.nodes if node.op == "call_module")
    assert [node.target for node in (first, norm, second)] == ["fc", "norm", "fc"]
    assert norm.args == (first,)
    assert second.args == (norm,)
    assert list(norm.users) == [second]


def test_direct_uses() -> None:
    _, recording = record_case("direct")
    uses = {(use.parameter, use.function, use.where) for use in recording.direct_uses}
    assert uses == {("fc.weight", "linear", ""), ("out.weight", "T", ""), ("norm.weight", "add", "")}
    assert all(use.node is not None for use in recording.direct_uses)


@pytest.mark.parametrize("case", sorted(set(CASES) - {"direct", "attention", "transformer layer"}))
def test_a_module_that_reads_its_own_parameters_is_no_direct_use(case: str) -> None:
    _, recording = record_case(case)
    assert recording.direct_uses == ()


def test_multihead_attention_reads_its_projection() -> None:
    _, recording = record_case("attention")
    assert {use.parameter for use in recording.direct_uses} == {"mha.out_proj.weight", "mha.out_proj.bias"}


def metadata(m: Any, x: Tensor) -> Any:
    y = x.to(m.fc.weight.dtype).to(m.fc.weight).new_zeros(m.fc.weight.shape[0]).type_as(m.fc.weight)
    return m.out(x) + torch.zeros_like(m.fc.weight)[0] + y


def test_shape_and_dtype_of_a_weight_are_no_reads() -> None:
    recording = record(make_model(metadata), normalize_inputs(X)[0], is_builtin_leaf)
    assert recording.direct_uses == ()


def test_value_reads_are_counted() -> None:
    assert record_case("shared")[1].value_reads == 0
    assert record_case("branches")[1].value_reads >= 3


def test_transforms_run_and_their_modules_are_seen() -> None:
    for forward in (transforms, gradients):
        model = make_model(forward)
        recording = record(model, normalize_inputs(X)[0], is_builtin_leaf)
        recording.graph.lint()
        assert recording.call_counts() == {"": 1, "fc": 1, "out": 1}


def autocast_inside(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.out(m.fc(x))


def test_autocast_inside_the_model() -> None:
    recording = record(make_model(autocast_inside), normalize_inputs(X)[0], is_builtin_leaf)
    fc, out = (next(call for call in recording.calls if call.fqn == name) for name in ("fc", "out"))
    assert (fc.dtype, fc.output_dtype, out.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert not torch.is_autocast_enabled("cpu")


def test_scenarios_are_merged() -> None:
    def forward(m: Any, x: Tensor, other: bool = False) -> Any:
        return m.out(x) if other or m.training else m.fc(x)

    model = make_model(forward)
    scenarios = normalize_inputs([(X,), ((X[:1],), {"other": True}), (X[:, :3],)])
    found = capture(model, [*scenarios, other_mode(scenarios[0], training=True)], is_builtin_leaf)
    assert [recording.scenario.name for recording in found.recordings] == ["inputs[0]", "inputs[1]", "inputs[0][train]"]
    assert found.call_counts() == {"": 3, "fc": 1, "out": 2}
    assert [call.input_shape for call in found.calls_of("out")] == [(1, 8), (2, 8)]
    ((name, error),) = found.failures
    assert name == "inputs[2]"
    assert error.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert not model.training


def test_recording_twice_gives_the_same_graph() -> None:
    for case in sorted(CASES):
        model, scenario = build(case)
        first, second = (record(model, scenario, is_builtin_leaf) for _ in range(2))
        assert str(first.graph) == str(second.graph), case
        assert [call.fqn for call in first.calls] == [call.fqn for call in second.calls]


def test_a_root_that_is_one_leaf() -> None:
    model = nn.Linear(8, 4)
    recording = record(model, normalize_inputs(X)[0], is_builtin_leaf)
    assert recording.call_counts() == {"": 1}
    assert recording.direct_uses == ()
    assert [node.op for node in recording.graph.nodes] == ["placeholder", "call_module", "output"]
