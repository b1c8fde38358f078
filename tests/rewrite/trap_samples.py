"""Small models whose norms fuse, and a strict way to compare a converted one with its untouched original."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_convert
from te_convert.plan.model import Outcome
from te_convert.report.model import Report
from te_convert.rewrite.fused import FusedRecord, fused_record, get_fused
from te_convert.rewrite.lazy import LazyNorm
from te_convert.rewrite.state import converted_modules

WIDTH, HEADS, FFN = 16, 4, 24
CLOSE = 2e-5
"""Largest difference relative to the largest value; float32 rounding stays an order of magnitude below it."""


def x_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*(shape or (2, 5, WIDTH)), generator=torch.Generator().manual_seed(seed))


def perturb(model: nn.Module, seed: int = 5) -> nn.Module:
    """Norm weights, norm biases and biases away from 1 and 0, so that a lost one is seen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.2).to(parameter.dtype))
    return model


class Attention(nn.Module):
    """q, k, v and out, with a weighting that TE lacks, so that no attention and no block is fused as a whole.

    ``project`` and ``weigh`` are for paths that nobody recorded.
    """

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.project: Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]] = in_order
        self.weigh: Callable[[Tensor], Tensor] = torch.sigmoid

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*t.shape[:-1], self.heads, -1).transpose(-2, -3) for t in self.project(self, x))
        y = self.weigh(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5) @ v
        out: Tensor = self.out(y.transpose(-2, -3).flatten(-2))
        return out


def in_order(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The recorded use of an attention's projections."""
    return m.q_proj(x), m.k_proj(x), m.v_proj(x)


class MLP(nn.Module):
    def __init__(self, width: int = WIDTH, ffn: int = FFN, inside: float = 0.0, after: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.act = nn.GELU(approximate="tanh")
        self.inner, self.outer = nn.Dropout(inside), nn.Dropout(after)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.fc2(self.inner(self.act(self.fc1(x)))))
        return out


class Block(nn.Module):
    """Pre-norm block; ``around`` runs a child and may be replaced after the conversion (by a checkpoint, for instance)."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm, mlp: Callable[[], nn.Module] = MLP) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm(WIDTH), Attention(), norm(WIDTH), mlp()
        self.around: dict[str, Callable[..., Any]] = {}

    def run(self, name: str, *args: Any) -> Any:
        around: Any = self.around.get(name, call)
        return around(getattr(self, name), *args)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.run("attn", self.run("norm1", x))
        out: Tensor = x + self.run("mlp", self.run("norm2", x))
        return out


class Net(nn.Module):
    """Blocks in a ModuleList, a final norm and a head."""

    def __init__(self, blocks: int = 2, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7)
        self.around: Callable[..., Any] = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = self.around(block, x)
        out: Tensor = self.head(self.norm(x))
        return out


class One(nn.Module):
    """One norm with Linears a and b (and c) behind it; ``use`` is what forward does with them."""

    def __init__(
        self, use: Callable[[Any, Tensor], Any] | None = None, norm: nn.Module | None = None, **modules: nn.Module
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = norm if norm is not None else nn.LayerNorm(WIDTH)
        self.a, self.b = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6)
        for name, module in modules.items():
            self.add_module(name, module)
        self.use = use or both

    def forward(self, x: Tensor) -> Any:
        return self.use(self, x)


def both(m: Any, x: Tensor) -> Tensor:
    """The recorded use: the norm's output goes to a and b alone."""
    n = m.norm(x)
    out: Tensor = m.a(n) * m.b(n)
    return out


def call(module: Any, *args: Any) -> Any:
    return module(*args)


def reentrant(module: Any, *args: Any) -> Any:
    return checkpoint(module, *args, use_reentrant=True)


def replayed(module: Any, *args: Any) -> Any:
    return checkpoint(module, *args, use_reentrant=False)


@dataclass
class Pair:
    """An original and its converted copy."""

    original: Any
    model: Any
    report: Report

    def record(self, fqn: str) -> FusedRecord:
        return get_fused(self.model.get_submodule(fqn))

    @property
    def fused(self) -> list[str]:
        """Names of the fusions of norms and Linears (an attention is one too, and none of theirs)."""
        records = [(name, fused_record(module)) for name, module in converted_modules(self.model)]
        return [name for name, record in records if record is not None and (record.norm is not None or record.readers)]

    def reset(self) -> None:
        """Counters to zero: what follows is counted, not what verification did."""
        for fqn in self.fused:
            self.record(fqn).executed = self.record(fqn).fallbacks = 0

    def use(self, use: Callable[[Any, Tensor], Any]) -> Pair:
        """Another forward of a :class:`One`, which nobody recorded, in both models."""
        self.original.use = self.model.use = use
        return self

    def counts(self, fqn: str) -> tuple[int, int]:
        """(how often the TE module ran, how often a member ran its own forward) since the last reset."""
        return self.record(fqn).executed, self.record(fqn).fallbacks

    def both(self) -> tuple[Any, Any]:
        return self.original, self.model


def pair(model: nn.Module, *inputs: Any, fused: int | None = None, perturbed: bool = False, **options: Any) -> Pair:
    """Perturb, keep a copy, convert in place; ``fused`` is the number of fusions that there have to be."""
    if not perturbed:
        perturb(model)
    original = copy.deepcopy(model)
    example = inputs[0] if inputs and isinstance(inputs[0], dict) else inputs or (x_of(),)
    result = te_convert.convert(model, example, backend="reference", inplace=True, **options)
    assert result.report.parity.passed, result.report
    assert not result.report.parity.reverted, result.report
    made = Pair(original, result.model, result.report)
    assert fused is None or len(made.fused) == fused, (made.fused, str(result.plan))
    assert made.fused
    assert result.report.count(Outcome.FUSED) > 0
    made.reset()
    return made


def relative_error(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    scale = max(float(expected.detach().abs().max()) if expected.numel() else 0.0, floor)
    error = float((found.detach() - expected.detach()).abs().max()) if expected.numel() else 0.0
    return error / scale if scale else error


def assert_near(found: Any, expected: Any, bound: float = CLOSE) -> None:
    """Nested outputs agree; nothing lazy is left in them."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other, bound)
        return
    assert type(found) is Tensor
    assert (found.shape, found.dtype, found.requires_grad) == (expected.shape, expected.dtype, expected.requires_grad)
    assert relative_error(found, expected) <= bound


Gradients = dict[str, Tensor | None]


def gradients(model: nn.Module) -> Gradients:
    """Gradients under the original's names; a converted model is reverted for that."""
    return {name: parameter.grad for name, parameter in te_convert.revert(model).named_parameters()}


def assert_same_gradients(found: Gradients, expected: Gradients, bound: float = CLOSE, unused: str = "") -> None:
    """Present where the original has one, absent where it has none, equal up to rounding.

    The floor is for gradients that are zero in theory (a key's bias).  ``unused`` is a Linear that did not run: its part of a joint
    parameter has zeros where a parameter of its own has None.
    """
    assert list(found) == list(expected)
    for name in (f"{unused}.weight", f"{unused}.bias") if unused else ():
        gradient = found[name]
        assert expected[name] is None
        assert gradient is None or not gradient.any()
        found = {**found, name: None}
    missing = [name for name, value in expected.items() if (value is None) != (found[name] is None)]
    assert not missing, f"a gradient is there in one model only: {missing}"
    floor = 1e-3 * max((float(g.abs().max()) for g in expected.values() if g is not None and g.numel()), default=0.0)
    for name, value in expected.items():
        other = found[name]
        if value is not None and other is not None:
            error = relative_error(other, value, floor)
            assert error <= bound, f"gradient of {name}: {error:.1e}"


def loss_of(output: Any) -> Tensor:
    """A number on which every element of every output tensor acts differently."""
    tensors = [output] if isinstance(output, Tensor) else list(output.values() if isinstance(output, dict) else output)
    total = torch.zeros((), dtype=tensors[0].dtype)
    for tensor in tensors:
        weights = torch.linspace(0.5, 1.5, tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape)
        total = total + (tensor * weights).sum() + tensor.square().mean()
    return total


def assert_trains_alike(
    made: Pair, x: Tensor | None = None, bound: float = CLOSE, run: Callable[[Any, Tensor], Any] = call, unused: str = ""
) -> None:
    """Outputs, the input's gradient and all parameter gradients of one step; the converted model is reverted at the end."""
    outputs, given = [], []
    for model in made.both():
        model.zero_grad()
        leaf = (x_of() if x is None else x).clone().requires_grad_()
        outputs.append(run(model, leaf))
        loss_of(outputs[-1]).backward()
        given.append(leaf.grad)
    assert_near(outputs[1], outputs[0], bound)
    assert given[0] is not None
    assert given[1] is not None
    assert relative_error(given[1], given[0]) <= bound
    assert_same_gradients(gradients(made.model), gradients(made.original), bound, unused)


def lazies_of(norm: nn.Module) -> list[weakref.ref[Tensor]]:
    """Fills with a weak reference to every lazy tensor that a norm returns from now on."""
    seen: list[weakref.ref[Tensor]] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        assert type(output) is LazyNorm
        seen.append(weakref.ref(output))

    norm.register_forward_hook(keep)
    return seen
