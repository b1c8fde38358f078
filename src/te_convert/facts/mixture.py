"""Which mixture a module with expert modules computes: found out on a copy with random weights, not by its name.

    y[t] = sum_k w[t, k] * expert_e(x[t]),  (w, e) = router(gate(x))
    expert(x) = down(act(gate(x)) * up(x)), or fc2(act(fc1(x)))

The copy runs in float64, with gradients, on tokens that reach every expert, on tokens that all want one (an expert with a capacity
drops some), on a few far ones, and in both modes.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.facts.activations import ACTIVATIONS
from te_convert.facts.experts import NotExperts
from te_convert.facts.routers import ROUTERS, mix, route, top_ks
from te_convert.facts.stand_in import brief, isolated

_TOLERANCE = 5e-6
_MAX_ELEMENTS = 1 << 26
"""Larger mixtures are probed with weights of rank one that need no memory; the verification compares them on their own anyway."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class ExpertFormula:
    """``second(act(first[0](x)) [* first[1](x)])``: names of an expert's Linears, and the activation in ACTIVATIONS."""

    first: tuple[str, ...]
    second: str
    activation: str


@dataclass(frozen=True)
class MixtureFacts:
    """What a mixture computes; the fields after ``expert`` are those of replacements/specs.py's Routing."""

    expert: ExpertFormula
    router: str
    top_k: int
    flat: bool
    logits: bool
    eval_only: bool


class _UnlikeError(Exception):
    """What was seen instead of a mixture."""


@dataclass(frozen=True)
class _Run:
    """One run of the copy, the tensors that it gave, and the gradient of the input."""

    x: Tensor
    y: Tensor
    gradient: Tensor
    flat: bool
    logits: bool


@dataclass(frozen=True)
class _Parts:
    """The formula's own logits and the outputs of each token's first experts, as ``mix`` takes them, with their history."""

    x: Tensor
    logits: Tensor
    ranking: Tensor
    outputs: Tensor

    def result(self, router: str, top_k: int) -> Tensor:
        """What the mixture gives with a router."""
        weights, index = route(self.logits, router, top_k)
        return mix(weights, index, self.ranking, self.outputs).reshape(self.x.shape)


def probe_mixture(owner: nn.Module, container: str, gate: str, dims: int) -> MixtureFacts | NotExperts:
    """What a mixture computes for one tensor of ``dims`` dimensions, or what stands in the way; leaves it as it was."""
    try:
        with isolated(), torch.enable_grad():
            return _Probe(owner, container, gate, dims).facts()
    except _UnlikeError as error:
        return NotExperts(str(error))


class _Probe:
    def __init__(self, owner: nn.Module, container: str, gate: str, dims: int) -> None:
        self.owner, self.container, self.gate, self.dims = _copy(owner), container, gate, dims
        generator = torch.Generator().manual_seed(0)
        shapes = {name: parameter.shape for name, parameter in owner.named_parameters()}
        small = sum(shape.numel() for shape in shapes.values()) <= _MAX_ELEMENTS
        self.tensors = {n: _random(s, generator, small or n.startswith(f"{gate}.")) for n, s in shapes.items()}
        self.router_weight = self.tensors[f"{gate}.weight"]
        self.experts = len(self.router_weight)

    def facts(self) -> MixtureFacts:
        expert = self._expert()
        self.owner.eval()
        runs = [self._run(x) for x in self._inputs()]
        router, top_k = self._router(runs, expert)
        if len({(run.flat, run.logits) for run in runs}) > 1:
            raise _UnlikeError("its results differ in kind")
        return MixtureFacts(expert, router, top_k, runs[0].flat, runs[0].logits, self._differs_in_training(runs))

    def _weight(self, expert: int, name: str) -> Tensor:
        return self.tensors[f"{self.container}.{expert}.{name}.weight"]

    def _expert(self) -> ExpertFormula:
        """The formula of the first expert; the whole's comparison shows that it is that of all."""
        module = self.owner.get_submodule(f"{self.container}.0")
        names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        hidden = self.router_weight.shape[1]
        x = torch.randn(6, hidden, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        x = x * torch.tensor([1.0, 2.0, 3.0, 3.0, 10.0, 20.0], dtype=torch.float64).unsqueeze(-1)
        weights = {f"{name}.weight": self._weight(0, name) for name in names}
        try:
            y = torch.func.functional_call(module.eval(), weights, (x.clone(),))
        except Exception as error:  # whatever foreign code raises
            raise _UnlikeError(f"an expert does not run on tokens: {brief(error)}") from None
        for formula in _formulas(names):
            expected = self._apply(formula, 0, x)
            if isinstance(y, Tensor) and expected is not None and _error(y, expected) <= _TOLERANCE:
                return formula
        raise _UnlikeError("an expert computes something else than fc2(act(fc1(x))) or down(act(gate(x)) * up(x))")

    def _apply(self, formula: ExpertFormula, expert: int, x: Tensor) -> Tensor | None:
        first, second = [self._weight(expert, name) for name in formula.first], self._weight(expert, formula.second)
        fits = len({w.shape for w in first}) == 1 and first[0].shape == second.shape[::-1] and second.shape[0] == x.shape[-1]
        if not fits:
            return None
        inner = ACTIVATIONS[formula.activation](x @ first[0].t())
        out: Tensor = (inner * (x @ first[1].t()) if len(first) > 1 else inner) @ second.t()
        return out

    def _inputs(self) -> Iterator[Tensor]:
        """Tokens near each row of the router, all near one row, and far ones."""
        generator = torch.Generator().manual_seed(2)
        rows = self.router_weight.detach()
        near = rows.repeat(2, 1) / rows.norm(dim=-1).repeat(2).unsqueeze(-1) * rows.shape[1] ** 0.5
        for base, noise in ((near, 0.3), (near[:1].expand(4 * self.experts, -1), 0.1), (near[:2] * 0, 8.0)):
            x = base + noise * torch.randn(base.shape, generator=generator, dtype=torch.float64)
            yield x if self.dims == 2 else x.reshape(2, -1, x.shape[-1])

    def _run(self, x: Tensor) -> _Run:
        seen: list[tuple[Tensor, Tensor]] = []
        leaf = x.clone().requires_grad_()
        given = leaf.clone()
        handle = self.owner.get_submodule(self.gate).register_forward_hook(lambda _, args, y: seen.append((args[0], y)))
        before = _attributes(self.owner)
        try:
            result = torch.func.functional_call(self.owner, self.tensors, (given,))
        except Exception as error:  # whatever foreign code raises
            raise _UnlikeError(f"it does not run alone on {list(x.shape)}: {brief(error)}") from None
        finally:
            handle.remove()
        after = _attributes(self.owner)
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name, before) is not after.get(name, after))
        if changed:
            raise _UnlikeError(f"its forward sets {', '.join(changed[:3])}")
        if len(seen) != 1 or not torch.equal(seen[0][0].detach().reshape(x.shape), x) or not torch.equal(given.detach(), x):
            raise _UnlikeError(f"{self.gate} is not called once with the input")
        logits = seen[0][1]
        returns = isinstance(result, tuple) and len(result) == 2
        y = result[0] if returns else result
        if not isinstance(y, Tensor) or y.shape != x.shape or not y.requires_grad:
            raise _UnlikeError("its result does not have the shape of the input")
        if returns and not (isinstance(result[1], Tensor) and result[1].shape == logits.shape and torch.equal(result[1], logits)):
            raise _UnlikeError("its second result is not the logits")
        return _Run(x, y.detach(), _gradient(y, leaf), seen[0][0].dim() == 2, returns)

    def _router(self, runs: list[_Run], expert: ExpertFormula) -> tuple[str, int]:
        """The router that gives the least difference, if that is one of rounding, of results and of gradients."""
        numbers = top_ks(self.experts, {value for value in vars(self.owner).values() if type(value) is int})
        parts = [self._parts(run, expert, numbers[-1]) for run in runs]
        errors: dict[tuple[str, int], float] = {}
        for routing in itertools.product(ROUTERS, numbers):
            results = [part.result(*routing) for part in parts]
            errors[routing] = max(_error(run.y, y.detach()) for run, y in zip(runs, results, strict=True))
        best = min(errors, key=lambda routing: errors[routing])
        if not errors[best] <= _TOLERANCE:
            raise _UnlikeError(f"no softmax and top-k of {self.gate} give its results; the nearest differ by {errors[best]:.1e}")
        gradients = [_gradient(part.result(*best), part.x) for part in parts]
        error = max(_error(run.gradient, gradient) for run, gradient in zip(runs, gradients, strict=True))
        if not error <= _TOLERANCE:
            raise _UnlikeError(f"its gradients differ by {error:.1e} from those of {best[0]} with {best[1]} of {self.experts}")
        return best

    def _parts(self, run: _Run, expert: ExpertFormula, most: int) -> _Parts:
        x = run.x.clone().requires_grad_()
        tokens = x.reshape(-1, x.shape[-1])
        given = {n.removeprefix(f"{self.gate}."): t for n, t in self.tensors.items() if n.startswith(f"{self.gate}.")}
        logits = torch.func.functional_call(self.owner.get_submodule(self.gate), given, (tokens,))
        ranking = logits.detach().topk(most, dim=-1).indices
        outputs = tokens.new_zeros(*ranking.shape, tokens.shape[-1])
        for number in range(self.experts):
            token, rank = torch.where(ranking == number)
            output = self._apply(expert, number, tokens[token])
            if output is None:
                raise _UnlikeError("its experts have different shapes")
            outputs.index_put_((token, rank), output)
        return _Parts(x, logits, ranking, outputs)

    def _differs_in_training(self, runs: list[_Run]) -> bool:
        self.owner.train()
        try:
            again = [self._run(run.x) for run in runs]
        except _UnlikeError:
            return True
        pairs = [(run.y, other.y) for run, other in zip(runs, again, strict=True)]
        pairs += [(run.gradient, other.gradient) for run, other in zip(runs, again, strict=True)]
        return any(_error(found, expected) > _TOLERANCE for expected, found in pairs)


def _copy(owner: nn.Module) -> nn.Module:
    """The modules without their hooks, on the same tensors."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*owner.parameters(), *owner.buffers())}
    memo |= {id(vars(module)[name]): OrderedDict() for module in owner.modules() for name in _HOOKS}
    try:
        return copy.deepcopy(owner, memo)
    except Exception as error:  # whatever an attribute's own copying raises
        raise _UnlikeError(f"its attributes cannot be copied ({brief(error)})") from None


def _attributes(owner: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}" if path else name: value
        for path, module in owner.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE
    }


def _formulas(names: list[str]) -> Iterator[ExpertFormula]:
    for order in itertools.permutations(names):
        for activation in ACTIVATIONS:
            yield ExpertFormula(order[:-1], order[-1], activation)


def _random(shape: torch.Size, generator: torch.Generator, full: bool) -> Tensor:
    if full or len(shape) != 2:
        return torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])
    size = (1, shape[1]) if shape[0] > shape[1] else (shape[0], 1)
    return (torch.randn(size, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])).expand(shape)


def _gradient(y: Tensor, x: Tensor) -> Tensor:
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=y.dtype)
    (gradient,) = torch.autograd.grad(y, x, upstream, retain_graph=True)
    return gradient.detach()


def _error(found: Tensor, expected: Tensor) -> float:
    """Largest difference of a row over the row's largest value; infinity where it is not finite."""
    if found.shape != expected.shape:
        return float("inf")
    difference, size = (found - expected).abs().amax(-1), expected.abs().amax(-1).clamp_min(1e-30)
    error = float((difference / size).max())
    return error if error == error else float("inf")
