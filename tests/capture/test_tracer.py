"""The patches of a recording are gone afterwards, and nothing that it watched is kept alive."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from te_convert.capture.leaves import is_builtin_leaf
from te_convert.capture.run import capture, record
from te_convert.capture.scenario import normalize_inputs
from te_convert.capture.tracer import ConcreteTracer
from tests.capture.small_models import Double, X, make_model


def patched() -> tuple[Any, Any]:
    return nn.Module.__call__, torch.autograd.Function.__dict__["apply"]


def fail(m: Any, x: Tensor) -> Any:
    m.fc(Double.apply(x))
    raise KeyboardInterrupt


def test_patches_are_removed_after_a_run_and_after_any_exception() -> None:
    before = patched()
    seen: list[tuple[Any, Any]] = []

    def forward(m: Any, x: Tensor) -> Any:
        seen.append(patched())
        return m.fc(Double.apply(x))

    record(make_model(forward), normalize_inputs(X)[0], is_builtin_leaf)
    assert patched() == before
    assert seen[0][0] is not before[0]
    assert seen[0][1] is not before[1]
    with pytest.raises(KeyboardInterrupt):
        record(make_model(fail), normalize_inputs(X)[0], is_builtin_leaf)
    assert patched() == before
    assert torch.overrides._get_current_function_mode() is None
    assert torch.is_grad_enabled()


def test_a_recording_inside_a_recording() -> None:
    inside: list[Any] = []

    def forward(m: Any, x: Tensor) -> Any:
        y = m.fc(x)
        inside.append(record(m.inner, normalize_inputs(x)[0], is_builtin_leaf))
        return m.out(Double.apply(y))

    before = patched()
    model = make_model(forward, inner=nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    recording = record(model, normalize_inputs(X)[0], is_builtin_leaf)
    assert recording.call_counts() == {"": 1, "fc": 1, "out": 1, "inner": 1, "inner.0": 1, "inner.1": 1}
    assert inside[0].call_counts() == {"": 1, "0": 1, "1": 1}
    assert patched() == before


def test_other_threads_can_use_other_models_meanwhile() -> None:
    other = nn.Linear(8, 8)
    expected = other(X)
    results: list[Tensor] = []

    def forward(m: Any, x: Tensor) -> Any:
        thread = threading.Thread(target=lambda: results.append(Double.apply(other(X))))
        thread.start()
        thread.join()
        return m.fc(x)

    recording = record(make_model(forward), normalize_inputs(X)[0], is_builtin_leaf)
    assert torch.equal(results[0], expected * 2)
    assert results[0].grad_fn is not None
    assert recording.call_counts() == {"": 1, "fc": 1}


def test_two_threads_can_record_at_once() -> None:
    counts: list[Any] = []

    def work() -> None:
        for _ in range(5):
            model = make_model(lambda m, x: m.out(m.fc(x)))
            counts.append(record(model, normalize_inputs(X)[0], is_builtin_leaf).call_counts())

    before = patched()
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [{"": 1, "fc": 1, "out": 1}] * 15
    assert patched() == before


def test_it_is_an_fx_tracer() -> None:
    model = make_model(lambda m, x: m.out(m.fc(x)))
    graph = ConcreteTracer(is_builtin_leaf).trace(model, {"x": X})
    assert isinstance(graph, fx.Graph)
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["fc", "out"]
    with pytest.raises(TypeError, match="got function"):
        ConcreteTracer(is_builtin_leaf).trace(lambda x: x)


@pytest.mark.parametrize("fails", [False, True])
def test_activations_die_with_the_run(fails: bool) -> None:
    watched: list[weakref.ref[Tensor]] = []

    def forward(m: Any, x: Tensor) -> Any:
        hidden = m.fc(x)
        row = hidden[0]
        row.add_(1)
        outcome = m.out(Double.apply(hidden))
        watched.extend(map(weakref.ref, (x, hidden, row, outcome)))
        if fails:
            raise ValueError
        return outcome

    model = make_model(forward)
    found = capture(model, normalize_inputs(X), is_builtin_leaf)
    gc.collect()
    assert found.has_graph is not fails
    assert [reference() for reference in watched] == [None] * 4


class Watch(TorchDispatchMode):
    """Largest number of large tensors that are alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() >= 64 * 32:
            key = out.untyped_storage()._cdata
            if key not in self.alive:
                self.alive.add(key)
                weakref.finalize(out, self.alive.discard, key)
            self.peak = max(self.peak, len(self.alive))
        return out


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = (layer(x) * 2).relu()
        return x


def peak(depth: int) -> int:
    watch = Watch()
    with watch:
        record(Deep(depth), normalize_inputs(torch.ones(64, 32))[0], is_builtin_leaf)
    return watch.peak


def test_the_peak_does_not_grow_with_depth() -> None:
    assert 2 <= peak(20) <= peak(3)


def test_without_a_recording_the_watch_sees_what_is_kept() -> None:
    with Watch() as watch:
        kept = [torch.ones(64, 32) * index for index in range(5)]
    assert len(kept) == 5
    assert watch.peak >= 5


def test_compiled_parts_are_seen() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].compile(backend="eager")
    recording = record(model, normalize_inputs(X)[0], is_builtin_leaf)
    assert recording.call_counts() == {"": 1, "0": 1, "1": 1}
    assert "torch._dynamo" in sys.modules
