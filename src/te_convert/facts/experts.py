"""Which mixture of experts a module with stacked weights computes: found out on random weights, not by its name."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from te_convert.facts.activations import ACTIVATIONS
from te_convert.facts.stand_in import brief, has_no_shape, isolated

_TOLERANCE = 5e-6
_MAX_ELEMENTS = 1 << 26
"""Larger stacks are probed with one expert's weights for all; the verification compares them on their own weights anyway."""

_NAMES: dict[type[nn.Module], tuple[str, ...]] = {}


@dataclass(frozen=True)
class ExpertsFacts:
    """``sum_k w[t, k] * down[e] @ act(up[e] @ x[t])`` with ``e = index[t, k]``, for calls ``(x, index, w)``.

    Attributes:
        fc1: name of the stacked parameter [experts, rows, hidden_size]; rows are 2 * ffn_hidden_size when ``gated``.
        fc2: name of the stacked parameter [experts, hidden_size, ffn_hidden_size].
        gated: the first half of the rows is activated, the second multiplies.
        activation: name in ACTIVATIONS.
    """

    fc1: str
    fc2: str
    experts: int
    hidden_size: int
    ffn_hidden_size: int
    gated: bool
    activation: str


@dataclass(frozen=True)
class NotExperts:
    """Why a module with stacked weights is not taken for a mixture of experts."""

    detail: str


def looks_like_experts(module: nn.Module) -> bool:
    """Two 3-D parameters of equal length and no other."""
    own = [p for p in module._parameters.values() if p is not None and not has_no_shape(p)]
    all_own = len(own) == sum(1 for _ in module.parameters())
    return len(own) == 2 and all_own and all(p.dim() == 3 for p in own) and own[0].shape[0] == own[1].shape[0] > 1


def argument_names(cls: type[nn.Module]) -> tuple[str, ...]:
    """Names of the arguments that a class's forward takes by keyword as well as by position, in their order."""
    if cls not in _NAMES:
        both = inspect.Parameter.POSITIONAL_OR_KEYWORD
        _NAMES[cls] = tuple(p.name for p in inspect.signature(cls.forward).parameters.values() if p.kind is both)[1:]
    return _NAMES[cls]


def probe_experts(module: nn.Module, top_k: int) -> ExpertsFacts | NotExperts:
    """What a module computes for tokens [t, hidden], expert indices [t, top_k] and weights [t, top_k]."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    other = NotExperts("it computes something else than fc2(act(fc1(x))) per expert")
    problems: list[NotExperts] = []
    for fc1, fc2 in itertools.permutations(names):
        rows, hidden, ffn = module._parameters[fc1].shape[1], module._parameters[fc1].shape[2], module._parameters[fc2].shape[2]  # type: ignore[union-attr]
        if module._parameters[fc2].shape[1] != hidden or rows not in (ffn, 2 * ffn):  # type: ignore[union-attr]
            continue
        found = _probe(module, fc1, fc2, top_k)
        if isinstance(found, NotExperts):  # the shapes of a plain MLP also fit the other way round, which may not run
            problems.append(found)
        elif not found:
            problems.append(other)
        else:
            count = module._parameters[fc1].shape[0]  # type: ignore[union-attr]
            return ExpertsFacts(fc1, fc2, count, hidden, ffn, rows == 2 * ffn, found)
    return other if other in problems or not problems else problems[0]


def _probe(module: nn.Module, fc1: str, fc2: str, top_k: int) -> str | NotExperts:
    """Name of the activation with which the formula holds, "" when it does not."""
    shapes = {name: module._parameters[name].shape for name in (fc1, fc2)}  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([1.0, 2.0, 3.0, 3.0, 10.0, 20.0]).unsqueeze(-1)  # far points find clamps, near ones tell GELUs apart
    count, tokens, hidden = shapes[fc1][0], len(scales), shapes[fc1][2]
    stacked = {name: _stack(shape, generator) for name, shape in shapes.items()}
    x = torch.randn(tokens, hidden, generator=generator) * scales
    order = torch.rand(tokens, count, generator=generator).argsort(dim=-1)
    index, weights = order[:, :top_k].contiguous(), torch.rand(tokens, top_k, generator=generator) + 0.5
    try:
        with isolated():
            y = torch.func.functional_call(module, stacked, (x.clone(), index.clone(), weights.clone()))
    except Exception as error:  # whatever foreign code raises
        return NotExperts(f"it does not run on tokens, indices and weights: {brief(error)}")
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return NotExperts("its result does not have the shape of the tokens")
    for name, expected in _candidates(x, index, weights, stacked[fc1], stacked[fc2]):
        difference, size = (expected - y.double()).abs().amax(-1), expected.abs().amax(-1)
        if bool((difference <= _TOLERANCE * size).all()):
            return name
    return ""


def _stack(shape: torch.Size, generator: torch.Generator) -> Tensor:
    stacked: Tensor
    if shape.numel() <= _MAX_ELEMENTS:
        stacked = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    else:
        stacked = (torch.randn(shape[1:], generator=generator) / shape[-1] ** 0.5).expand(shape)
    return stacked


def _candidates(x: Tensor, index: Tensor, weights: Tensor, fc1: Tensor, fc2: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(activation, result in float64) for every known activation."""
    inner = torch.einsum("tkrh,th->tkr", fc1[index].double(), x.double())
    for name, function in ACTIVATIONS.items():
        gated = inner.shape[-1] == 2 * fc2.shape[-1]
        first, second = inner.chunk(2, -1) if gated else (inner, torch.ones(()))
        act = function(first) * second
        yield name, torch.einsum("tkf,tkhf,tk->th", act, fc2[index].double(), weights.double())
