"""Small models, each with one habit that a tracer must survive, and helpers to record and replay them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from te_convert.capture.graph import Recording, to_graph_module
from te_convert.capture.leaves import is_builtin_leaf
from te_convert.capture.preserve import copy_inputs, preserve_model, seed_all
from te_convert.capture.run import SEED, record
from te_convert.capture.scenario import Scenario, normalize_inputs
from te_convert.capture.tensors import iter_tensors

Forward = Callable[..., Any]


class Model(nn.Module):
    """Two Linears, a norm and buffers, with the forward under test."""

    def __init__(self, forward: Forward, **modules: nn.Module) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("table", torch.randn(8))
        self.plain = torch.randn(8)
        for name, module in modules.items():
            self.add_module(name, module)
        self.run = forward
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Inside(torch.autograd.Function):
    """Calls a module in its forward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        return torch.sin(module(x))


class AddsInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1.0)


class Shift(TorchFunctionMode):
    """Replaces ``F.relu`` by a shifted one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return y + 1 if func is F.relu else y


@dataclass
class Output:
    hidden: Tensor
    parts: tuple[Tensor, Tensor]
    note: str = "text"


def in_place(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y += 1
    y.mul_(2)
    y[:, 0] = m.table[0]
    F.relu_(y)
    return m.out(y)


def views(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    row = y[0]
    row.add_(m.table)
    y.view(-1)[3:5].zero_()
    return m.out(y)


def buffer_view(m: Any, x: Tensor) -> Any:
    cache = m.table.clone()
    cache[2:4].copy_(x[0, :2])
    return m.out(x + cache)


def structures(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    low, high = y.chunk(2, dim=-1)
    top = torch.topk(y, 2, dim=-1)
    return {"a": (low, [high]), "b": Output(top.values, (y, x)), "c": OrderedDict(d=y.max(dim=0).values)}


def keyword(m: Any, x: Tensor, *, scale: Tensor, flag: bool = True, nested: Mapping[str, Any] | None = None) -> Any:
    y = m.fc(input=x) * scale
    return y + nested["list"][1] if flag and nested else y


def shared(m: Any, x: Tensor) -> Any:
    return m.fc(m.norm(m.fc(x)))


def factories(m: Any, x: Tensor) -> Any:
    position = torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)
    mask = torch.full((8, 8), float("-inf")).triu(1)
    values = torch.tensor([1.5, float("inf")]).clamp(max=2.0)
    noise = torch.zeros_like(x).new_ones(8) + torch.eye(8)[0] + torch.randn(8)
    return m.fc(x + position) + mask.exp().sum(0) + values.sum() + noise + m.plain


def from_numpy(m: Any, x: Tensor) -> Any:
    import numpy as np

    table = torch.from_numpy(np.linspace(0.0, 1.0, 8, dtype=np.float32))
    return m.fc(x * np.float32(2.0)) + table + x.reshape(np.int64(2), -1).sum() * np.int64(3)


def direct(m: Any, x: Tensor) -> Any:
    return F.linear(x, m.fc.weight) + x @ m.out.weight.T + m.norm.weight


def functions(m: Any, x: Tensor) -> Any:
    y = Double.apply(m.fc(x))
    return m.out(AddsInPlace.apply(y))


def function_with_module(m: Any, x: Tensor) -> Any:
    return m.out(Inside.apply(x, m.fc))


def raises_and_recovers(m: Any, x: Tensor) -> Any:
    try:
        m.fc(x[:, :3])
    except RuntimeError:
        return m.out(x)
    raise AssertionError("a Linear took the wrong width")


def branches(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    if y.sum() > -1e9 and y.shape[0] == 2:
        y = m.out(y)
    for _ in range(int(x.argmax()) % 3 + 1):
        y = y * 0.5
    count = (x > -10).sum()
    return y[: x.shape[0], : int(count) // 4], y[torch.nonzero(x[:, 0] > -100).flatten()], y[:, :: torch.tensor(2)]


def reentrant(m: Any, x: Tensor) -> Any:
    return m.out(checkpoint(lambda v: m.fc(v).sin(), x, use_reentrant=True))


def not_reentrant(m: Any, x: Tensor) -> Any:
    return m.out(checkpoint(lambda v: m.fc(v).sin(), x, use_reentrant=False))


def transforms(m: Any, x: Tensor) -> Any:
    mapped = torch.func.vmap(lambda row: m.fc(row) + m.table)(x)
    swapped = torch.func.functional_call(m.out, {"weight": m.fc.weight, "bias": m.fc.bias}, (x,))
    return mapped, swapped


def gradients(m: Any, x: Tensor) -> Any:
    slope: Tensor = torch.func.grad(lambda v: m.fc(v).sin().sum())(x)
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        (direct_slope,) = torch.autograd.grad(m.out(leaf).cos().sum(), leaf)
    return slope, direct_slope


def own_mode(m: Any, x: Tensor) -> Any:
    with Shift():
        y = F.relu(m.fc(x))
    return m.out(y)


def threaded(m: Any, x: Tensor) -> Any:
    results: list[Tensor] = []

    def work() -> None:
        with torch.no_grad():
            results.append(m.fc(x))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return m.out(results[0])


def attention(m: Any, x: Tensor) -> Any:
    tokens = x.view(2, 1, 8)
    attended, weights = m.mha(tokens, tokens, tokens)
    return m.out(attended), weights


def recurrent(m: Any, x: Tensor) -> Any:
    y, (h, c) = m.lstm(x.view(2, 1, 8))
    return m.out(y), h, c


def transformer(m: Any, x: Tensor) -> Any:
    return m.layer(x.view(2, 1, 8))


def hooked(m: Any, x: Tensor) -> Any:
    return m.out(m.hooks(x))


def _hooks() -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 8))
    module.register_forward_pre_hook(lambda hooked, args: (args[0] * 2,))
    module[0].register_forward_hook(lambda hooked, args, output: output.sin())
    return module


def embedding(m: Any, x: Tensor) -> Any:
    ids = (x.abs() * 3).long() % 5
    return m.out(m.table2(ids).mean(1)), m.bag(ids)


def scatter(m: Any, x: Tensor) -> Any:
    y = torch.zeros(2, 8).index_add_(0, torch.tensor([1, 0]), m.fc(x))
    y.scatter_(1, torch.tensor([[1], [2]]), 5.0)
    torch.add(y, 1, out=y)
    return m.out(y), torch.where(y > 0, y, -y), torch.stack([y, y]), torch.einsum("ij,kj->ik", y, x)


def alias_input(m: Any, x: Tensor) -> Any:
    x.mul_(0.5)
    return m.fc(x), x


def sdpa(m: Any, x: Tensor) -> Any:
    q = m.fc(x).view(1, 2, 2, 4)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True), q.softmax(-1)


X = torch.tensor([[0.3, -1.2, 0.8, 0.1, 2.0, -0.4, 0.9, -0.7], [1.1, 0.2, -0.6, 0.5, -1.5, 0.7, 0.05, 0.4]])

CASES: dict[str, tuple[Forward, dict[str, Callable[[], nn.Module]], Any]] = {
    "in-place": (in_place, {}, X),
    "views": (views, {}, X),
    "buffer view": (buffer_view, {}, X),
    "structures": (structures, {}, X),
    "keyword": (
        keyword,
        {},
        ((X,), {"scale": torch.tensor(2.0), "nested": {"list": [X + 1, X + 2], "number": 3}}),
    ),
    "shared": (shared, {}, X),
    "factories": (factories, {}, X),
    "from numpy": (from_numpy, {}, X),
    "direct": (direct, {}, X),
    "functions": (functions, {}, X),
    "function with module": (function_with_module, {}, X),
    "raises and recovers": (raises_and_recovers, {}, X),
    "branches": (branches, {}, X),
    "checkpoint reentrant": (reentrant, {}, X.clone().requires_grad_()),
    "checkpoint": (not_reentrant, {}, X),
    "own mode": (own_mode, {}, X),
    "thread": (threaded, {}, X),
    "attention": (attention, {"mha": lambda: nn.MultiheadAttention(8, 2)}, X),
    "lstm": (recurrent, {"lstm": lambda: nn.LSTM(8, 8, 2, bidirectional=False)}, X),
    "transformer layer": (transformer, {"layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0)}, X),
    "hooks": (hooked, {"hooks": _hooks}, X),
    "embedding": (embedding, {"table2": lambda: nn.Embedding(5, 8), "bag": lambda: nn.EmbeddingBag(5, 4)}, X),
    "scatter": (scatter, {}, X),
    "changes its input": (alias_input, {}, X),
    "sdpa": (sdpa, {}, X),
}


def build(case: str) -> tuple[Model, Scenario]:
    """The model of a case and its scenario."""
    forward, modules, inputs = CASES[case]
    model = Model(forward, **{name: make() for name, make in modules.items()})
    return model, normalize_inputs(inputs)[0]


def make_model(forward: Forward, **modules: nn.Module) -> Model:
    return Model(forward, **modules)


def record_case(case: str) -> tuple[Model, Recording]:
    model, scenario = build(case)
    return model, record(model, scenario, is_builtin_leaf)


def run_original(model: nn.Module, scenario: Scenario) -> list[Tensor]:
    """Output tensors of a plain run under the conditions of a recording."""
    with preserve_model(model), torch.no_grad():
        seed_all(SEED)
        return [tensor.clone() for _, tensor in iter_tensors(scenario.call(model))]


def replay(model: nn.Module, recording: Recording) -> list[Tensor]:
    """Output tensors of the recorded graph on the recorded inputs."""
    args, kwargs = copy_inputs((recording.scenario.args, recording.scenario.kwargs))
    inputs = {id(tensor): tensor for _, tensor in (*iter_tensors(args), *iter_tensors(kwargs))}
    module = to_graph_module(model, recording)
    with preserve_model(model), torch.no_grad():
        seed_all(SEED)
        outputs: tuple[Tensor, ...] = module(*inputs.values())
    return list(outputs)


def assert_replay_is_equal(model: nn.Module, recording: Recording) -> None:
    expected, actual = run_original(model, recording.scenario), replay(model, recording)
    assert expected
    assert len(expected) == len(actual)
    for position, (left, right) in enumerate(zip(expected, actual, strict=True)):
        assert left.dtype == right.dtype
        assert torch.equal(left, right), f"output {position} differs by {(left - right).abs().max()}"
