"""Find the MLP behind a norm: one or two Linears, an activation that a probe recognises, one Linear."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx, nn

from te_convert.capture.graph import Recording
from te_convert.match.groups import Group
from te_convert.match.regions import MAX_NODES, Region, RegionError, find_region
from te_convert.match.small_runs import MAX_ELEMENTS
from te_convert.reference.activations import ACTIVATION_NAMES, activate, is_gated

ERF = "-erf"
"""Suffix of the two activations that TE lacks: ``gelu-erf`` and ``geglu-erf``."""
_TOLERANCE = 2e-6
_FEW = 4
"""Size of each dimension but the last where a probe's numbers would be too many."""


@dataclass(frozen=True)
class MLP:
    """What a region between Linears computes.

    Attributes:
        inputs: names of the Linears behind the norm: (fc1,), or (gate, up) in this order.
        down: name of the last Linear.
        activation: TE's name, or ``gelu-erf`` / ``geglu-erf``.
        packed: "" for no packed halves, "first" when the first half of fc1's output is activated (TE's order), "second".
        region: the recorded operations between.
        last: the node of the last Linear.
    """

    inputs: tuple[str, ...]
    down: str
    activation: str
    packed: str
    region: Region
    last: fx.Node


def find_mlp(group: Group, recording: Recording, start: fx.Node, cache: dict[Hashable, tuple[str, str]]) -> MLP | str:
    """The MLP that begins at the node of one Linear, or why there is none.

    Args:
        group: the Linears that read the norm.
        recording: the run to which ``start`` belongs.
        start: a ``call_module`` node of one of them.
        cache: what regions like this one turned out to be.
    """
    linears = {linear.fqn for linear in group.linears}
    down = _next_linear(start, group)
    if down is None or down.target in linears:
        return "no second Linear follows"
    try:
        region = find_region(down.all_input_nodes[0], lambda node: node.op == "call_module" and node.target in group.all_linears)
        names = [str(node.target) for node in region.inputs]
        if start not in region.inputs or not set(names) <= linears or len(names) not in (1, 2):
            return "what is multiplied into it does not come from the same norm"
        key = region.key(group.modules)
        if key not in cache:
            cache[key] = _recognise(region, group, str(down.target))
    except RegionError as error:
        return str(error)
    activation, packed = cache[key]
    if activation == "":
        return packed
    ordered = tuple(reversed(names)) if packed == "swapped" else tuple(names)
    return MLP(ordered, str(down.target), activation, "" if packed == "swapped" else packed, region, down)


def _next_linear(start: fx.Node, group: Group) -> fx.Node | None:
    """The one Linear that every path from ``start`` leads to, within a few operations."""
    found: fx.Node | None = None
    waiting, seen = [start], {start}
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output":
                return None
            if user.op == "call_module" and user.target in group.all_linears:
                if found not in (None, user):
                    return None
                found = user
            elif user not in seen:
                seen.add(user)
                waiting.append(user)
                if len(seen) > MAX_NODES:
                    return None
    return found


def _erf_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


def _recognise(region: Region, group: Group, down: str) -> tuple[str, str]:
    """(activation, packing) of a region, or ("", why not)."""
    shape = tuple(region.inputs[0].meta["tensor_meta"].shape)
    ffn = group.all_linears[down].spec.in_features
    if any(tuple(node.meta["tensor_meta"].shape) != shape for node in region.inputs):
        return "", "its two inputs have different shapes"
    values, found = _evaluated(region, group, shape)
    for name, packed, expected in _candidates(values, ffn):
        if expected.shape == found.shape and _close(expected, found):
            return name, packed
    return "", "its activation is none of TE's"


def _evaluated(region: Region, group: Group, shape: tuple[int, ...]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Random inputs and the region's output; of large inputs a few rows, which show as much of a function of single elements.

    Raises:
        RegionError: it does not run on inputs of the recorded shape, or these were empty.
    """
    if math.prod(shape) == 0:
        raise RegionError("it was recorded on tensors without elements")
    generator = torch.Generator().manual_seed(0)

    def draw(sizes: tuple[int, ...]) -> list[torch.Tensor]:
        return [torch.randn(sizes, generator=generator) * scale for scale in (4.0, 2.0)[: len(region.inputs)]]

    if math.prod(shape) > MAX_ELEMENTS:
        values = draw((*(min(size, _FEW) for size in shape[:-1]), shape[-1]))
        with suppress(RegionError):  # it names the recorded sizes
            return values, region.evaluate(group.modules, values)
    values = draw(shape)
    return values, region.evaluate(group.modules, values)


def _candidates(values: list[torch.Tensor], ffn: int) -> Iterator[tuple[str, str, torch.Tensor]]:
    plain = [(name, _by_name(name)) for name in ACTIVATION_NAMES if not is_gated(name)]
    gated = [(name, _by_name(name)) for name in ACTIVATION_NAMES if is_gated(name)]
    if len(values) == 2:
        for packed, pair in (("", values), ("swapped", values[::-1])):
            for name, function in gated:
                yield name, packed, function(torch.cat(pair, -1))
            yield f"geglu{ERF}", packed, _erf_gelu(pair[0]) * pair[1]
        return
    (value,) = values
    if value.shape[-1] == ffn:
        for name, function in plain:
            yield name, "", function(value)
        yield f"gelu{ERF}", "", _erf_gelu(value)
    elif value.shape[-1] == 2 * ffn:
        for packed, halves in (("first", value), ("second", value.roll(ffn, -1))):
            for name, function in gated:
                yield name, packed, function(halves)
            first, second = halves.chunk(2, -1)
            yield f"geglu{ERF}", packed, _erf_gelu(first) * second


def _by_name(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: activate(name, x)


def _close(expected: torch.Tensor, found: torch.Tensor) -> bool:
    error = (expected - found).abs().max()
    return bool(error <= _TOLERANCE * expected.abs().max())


@dataclass(frozen=True)
class Owner:
    """The module that is the MLP: it takes the norm's output and returns the last Linear's.

    Attributes:
        fqn: its name.
        after: names of the dropouts between the last Linear and its output.
    """

    fqn: str
    after: tuple[str, ...]


def find_owner(recording: Recording, mlp: MLP, norm: str, modules: dict[str, nn.Module]) -> Owner | None:
    """The outermost module whose one argument is the norm's output and whose result is the MLP's."""
    tail, after = mlp.last, [mlp.last]
    while len(tail.users) == 1 and _is_dropout_module(next(iter(tail.users)), modules):
        tail = next(iter(tail.users))
        after.append(tail)
    found: Owner | None = None
    for place in sorted(place for node in after for place in recording.returned_by.get(node, ())):
        call = recording.calls[place]
        if call.leaf or not call.single or call.n_positional != 1 or call.keywords or len(call.args) != 1:
            continue
        if call.output is not None and call.fqn and _comes_from(call.args[0], norm):
            names = [str(node.target) for node in after[1 : after.index(call.output) + 1]]
            found = Owner(call.fqn, tuple(names))
    return found


def _is_dropout_module(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    return node.op == "call_module" and isinstance(modules.get(str(node.target)), nn.Dropout)


def _comes_from(node: fx.Node | None, norm: str) -> bool:
    return node is not None and node.op == "call_module" and node.target == norm
