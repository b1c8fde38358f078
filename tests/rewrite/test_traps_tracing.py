"""Traps 9 and 10: functorch transforms, torch.compile, export, jit.trace and fx over a converted model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, grad, jvp, vmap

from te_convert.rewrite.lazy import LazyNorm
from te_convert.verify.perturb import original_parameters
from tests.rewrite.trap_samples import (
    CLOSE,
    MLP,
    WIDTH,
    Net,
    One,
    Pair,
    assert_near,
    assert_trains_alike,
    pair,
    relative_error,
    x_of,
)

JOINT = "layernorm_a_b"


def net() -> Pair:
    return pair(Net(1), fused=3)


# ---- 9: functorch ----------------------------------------------------------------------------------------------------
def test_trap_09_vmap_over_a_converted_model() -> None:
    made = net()
    found, expected = (vmap(model)(x_of(4, 3, WIDTH)) for model in made.both())
    assert_near(found.detach(), expected.detach())


def test_trap_09_grad_with_respect_to_the_input() -> None:
    made = net()
    found, expected = (grad(lambda x, model=model: model(x).square().sum())(x_of()) for model in made.both())
    assert relative_error(found, expected) <= CLOSE


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_trap_09_forward_mode() -> None:
    made = net()
    found, expected = (jvp(model, (x_of(),), (x_of(seed=2),))[1] for model in made.both())
    assert relative_error(found, expected) <= CLOSE


def _per_sample(model: nn.Module) -> dict[str, Tensor]:
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(model, parameters, (x.unsqueeze(0),))
        return out.square().sum()

    found: dict[str, Tensor] = vmap(grad(loss), (None, 0))(parameters, x_of(3, 5, WIDTH))
    return found


def test_trap_09_per_sample_gradients_through_functional_call() -> None:
    made = net()
    found, expected = _per_sample(made.model), _per_sample(made.original)
    names = {id(parameter): name for name, parameter in made.model.named_parameters()}
    seen = set()
    for entry in original_parameters(made.model):
        gradients = found[names[id(entry.parameter)]]
        for sample, gradient in enumerate(gradients):
            parts = [gradient] if entry.op is None else entry.op.inverse(gradient)
            for name, part in zip(entry.names, parts, strict=True):
                seen.add(name)
                assert relative_error(part, expected[name][sample], 1e-2) <= 1e-4, name
    assert seen == set(expected)


def test_trap_09_functional_call_uses_the_parameters_given_on_the_fused_path_too() -> None:
    made = pair(One(), fused=1)
    doubled = {name: p.detach() * 2 for name, p in made.model.named_parameters()}
    expected = functional_call(made.original, {name: p.detach() * 2 for name, p in made.original.named_parameters()}, (x_of(),))
    assert_near(functional_call(made.model, doubled, (x_of(),)), expected)
    assert made.counts(JOINT) == (1, 0)


def test_trap_09_double_backward() -> None:
    made = net()
    results = []
    for model in made.both():
        x = x_of().requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        results.append(x.grad)
    assert results[0] is not None
    assert results[1] is not None
    assert relative_error(results[1], results[0]) <= 1e-4


# ---- 10: compile, export, trace --------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.report("NVIDIA/TransformerEngine#705", "NVIDIA/TransformerEngine#1241", "NVIDIA/TransformerEngine#2590")
def test_trap_10_compile_without_a_graph_break(backend: str) -> None:
    torch._dynamo.reset()
    made = net()
    compiled: Any = torch.compile(made.model, backend=backend, fullgraph=True)
    assert_near(compiled(x_of()).detach(), made.original(x_of()).detach())
    assert_near(compiled(x_of(3, 2, WIDTH)).detach(), made.original(x_of(3, 2, WIDTH)).detach())
    made.original.zero_grad()
    results = []
    for model in (made.original, compiled):
        x = x_of().requires_grad_()
        model(x).square().sum().backward()
        results.append(x.grad)
    assert results[0] is not None
    assert results[1] is not None
    assert relative_error(results[1], results[0]) <= CLOSE
    assert made.counts("blocks.0.attn.layernorm_qkv")[0] == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_trap_10_a_compiled_part_in_an_eager_model() -> None:
    torch._dynamo.reset()
    made = net()
    for model in made.both():
        model.blocks[0].attn = torch.compile(model.blocks[0].attn, backend="eager")
        model.blocks[0].mlp.compile(backend="eager")
    x = x_of()
    outputs = [model(x) for model in made.both()]
    assert_near(outputs[1], outputs[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_trap_10_eager_fuses_again_after_a_compiled_run() -> None:
    torch._dynamo.reset()
    made = net()
    compiled: Any = torch.compile(made.model, backend="eager", fullgraph=True)
    compiled(x_of())
    made.reset()
    assert_near(made.model(x_of()), made.original(x_of()))
    assert made.counts("blocks.0.attn.layernorm_qkv") == (1, 0)


def test_trap_10_export() -> None:
    made = net()
    program = torch.export.export(made.model.eval(), (x_of(),), strict=False)
    assert_near(program.module()(x_of(seed=3)).detach(), made.original(x_of(seed=3)).detach())


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_trap_10_jit_trace() -> None:
    made = net()
    trace: Any = torch.jit.trace
    traced = trace(made.model, (x_of(),), check_trace=False)
    assert_near(traced(x_of(seed=3)).detach(), made.original(x_of(seed=3)).detach())


class Stack(nn.Module):
    """What fx can trace: no proxies in control flow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()
        self.last, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        n = self.last(x + self.mlp(self.norm(x)))
        out: Tensor = self.a(n) * self.b(n)
        return out


def test_trap_10_fx_with_the_members_as_leaves_still_fuses() -> None:
    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, qualified_name: str) -> bool:
            return qualified_name != ""

    made = pair(Stack(), fused=2)
    traced = fx.GraphModule(made.model, Tracer().trace(made.model))
    assert_near(traced(x_of()), made.original(x_of()))
    assert made.counts(JOINT) == (1, 0)
    assert made.counts("mlp") == (1, 0)


def test_trap_10_a_fake_tensor_is_not_deferred() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    made = pair(One(), fused=1)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = made.model(mode.from_tensor(x_of()))
    assert tuple(y.shape) == (2, 5, 6)
    assert made.counts(JOINT) == (0, 2)


class Marked(Tensor):
    pass


def test_trap_10_another_tensor_subclass_is_not_deferred() -> None:
    made = pair(One(), fused=1)
    outputs = [model(x_of().as_subclass(Marked)) for model in made.both()]
    assert type(outputs[0]) is type(outputs[1]) is Marked
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    assert made.counts(JOINT) == (0, 2)


OPS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda n: n + 1,
    "radd": lambda n: 1 + n,
    "matmul": lambda n: n @ n.transpose(-1, -2),
    "index": lambda n: n[0, 1:],
    "mask": lambda n: n[n > 0],
    "permute": lambda n: n.permute(2, 0, 1).contiguous(),
    "view over the last": lambda n: n.view(2, 5, 4, 4).sum(-1),
    "flatten": lambda n: n.flatten(),
    "cat": lambda n: torch.cat([n, n], -1),
    "stack": lambda n: torch.stack((n, n)),
    "einsum": lambda n: torch.einsum("bth,bsh->bts", n, n),
    "chunk": lambda n: n.chunk(4, -1)[1],
    "to double": lambda n: n.to(torch.float64),
    "type": lambda n: n.double(),
    "float": lambda n: n.float() * 1,
    "to same": lambda n: n.to(torch.float32) * 1,
    "to other": lambda n: n.to(torch.zeros(1)) * 1,
    "copy": lambda n: n.to(torch.float32, copy=True),
    "contiguous": lambda n: n.contiguous() * 1,
    "clone": lambda n: n.clone(),
    "detach": lambda n: n.detach(),
    "softmax": lambda n: torch.softmax(n, -1),
    "sdpa": lambda n: nn.functional.scaled_dot_product_attention(n, n, n),
    "conv": lambda n: nn.functional.conv1d(n, torch.ones(3, 5, 1)),
    "aten": lambda n: torch.ops.aten.mul.Tensor(n, n),
    "new": lambda n: n.new_ones(n.shape[1:]) * n.new_tensor([1.0]),
    "like": lambda n: torch.zeros_like(n) + torch.empty_like(n).fill_(2),
    "where": lambda n: torch.where(n > 0, n, -n),
    "item": lambda n: torch.tensor(n.sum().item()),
    "list": lambda n: torch.tensor(n.tolist()),
    "iterate": lambda n: sum(row.sum() for row in n),
    "unpack": lambda n: next(iter(n)),
    "numpy": lambda n: torch.from_numpy(n.detach().numpy() * 1),
    "max": lambda n: n.max(-1)[0],
    "topk": lambda n: torch.topk(n, 2).values,
    "nested": lambda n: torch.nested.nested_tensor([n[0], n[1]]).to_padded_tensor(0.0),
    "dropout": lambda n: nn.functional.dropout(n, 0.5, False) * 1,
    "functional norm": lambda n: nn.functional.layer_norm(n, (WIDTH,)),
    "deepcopy": lambda n: __import__("copy").deepcopy(n.detach()),
    "pickle": lambda n: __import__("pickle").loads(__import__("pickle").dumps(n.detach())),
    "repr": lambda n: torch.tensor(len(repr(n.detach()))),
    "bool": lambda n: torch.tensor(float(bool((n > -9).all()))),
    "shape": lambda n: torch.tensor([*n.shape, n.dim(), n.size(-1), n.numel(), len(n), *n.stride()]),
    "set": lambda n: torch.zeros(2, 5, WIDTH).copy_(n),
    "index put": lambda n: torch.zeros(2, 5, WIDTH).index_put((torch.tensor([0]),), n[:1]),
    "checkpointed slice": lambda n: torch.utils.checkpoint.checkpoint(lambda t: t.sin(), n, use_reentrant=False),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("grad", [True, False])
def test_trap_06_any_other_operation_gets_the_value_and_gives_the_gradient(name: str, grad: bool) -> None:
    made = pair_of_one()
    results, leaves = [], []
    for model in made.both():
        x = x_of().requires_grad_(grad)
        model.zero_grad()
        with torch.set_grad_enabled(grad):
            y = OPS[name](model.norm(x))
        results.append(y)
        if y.requires_grad:
            (y * y).sum().backward()
        leaves.append((x.grad, model.norm.weight.grad))
    assert type(results[1]) is Tensor
    assert type(made.model.norm(x_of())) is LazyNorm
    assert_near(results[1], results[0])
    for found, expected in zip(leaves[1], leaves[0], strict=True):
        assert (found is None) == (expected is None)
        if expected is not None and found is not None:
            assert relative_error(found, expected, 1e-3) <= 1e-4


_ONE: list[Pair] = []


def pair_of_one() -> Pair:
    """Converted once: only its norm is called."""
    if not _ONE:
        _ONE.append(pair(One(), fused=1))
    return _ONE[0]


def test_trap_06_two_threads_share_a_converted_model() -> None:
    from concurrent.futures import ThreadPoolExecutor

    made = pair(One(), fused=1)
    inputs = [x_of(seed=seed) for seed in range(8)]
    expected = [made.original(x).detach() for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: made.model(x).detach(), inputs))
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other)
    assert_trains_alike(made)
