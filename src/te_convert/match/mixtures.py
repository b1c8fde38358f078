"""Modules that look like a mixture of expert modules, and what stands against taking one for it before it is probed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from te_convert.match.blocks import Block
from te_convert.match.groups import CONTAINERS
from te_convert.match.guards import BEFORE_PROBES, executed, te_dtype
from te_convert.match.torch_layers import part_obstacles
from te_convert.reasons import Reason, ReasonCode, reason

NAME = "grouped"
"""Of the grouped products among the mixture's children."""

PROBED_ELEMENTS = 100_000_000
"""Most weights of a mixture that are probed: the probe holds random ones in float64, 0.8 GB at this size."""


@dataclass(frozen=True)
class Mixture:
    """Names of a mixture's two parts, and its experts."""

    gate: str
    container: str
    experts: tuple[nn.Module, ...]


def linears_of(expert: nn.Module) -> dict[str, nn.Linear]:
    """The Linears inside an expert by name."""
    return {name: part for name, part in expert.named_modules() if isinstance(part, nn.Linear) and name}


def find_mixture(module: nn.Module) -> Mixture | None:
    """A list of two or more modules of one class with two or three Linears each, and a gate that has a row for each; else None."""
    if isinstance(module, CONTAINERS):
        return None
    for container, held in module.named_children():
        experts = tuple(held) if isinstance(held, nn.ModuleList) else ()
        if len(experts) < 2 or None in experts or len(set(map(type, experts))) > 1 or len(linears_of(experts[0])) not in (2, 3):
            continue
        columns = {linear.in_features for linear in linears_of(experts[0]).values()}
        for gate, part in module.named_children():
            weight: Any = part._parameters.get("weight")
            if weight is not None and weight.dim() == 2 and weight.shape[0] == len(experts) and weight.shape[1] in columns:
                return Mixture(gate, container, experts)
    return None


def mixture_obstacles(block: Block, mixture: Mixture) -> Iterator[Reason]:
    """Every reason against grouped products that needs no probe."""
    module, site = block.site.module, block.site
    for guard in (*BEFORE_PROBES, te_dtype, executed):
        found = guard(site)
        if found is not None and not found.is_advice:
            yield found
    yield from part_obstacles(module.get_submodule(mixture.container), frozenset())
    known = (f"{mixture.gate}.", f"{mixture.container}.")
    others = [*module._buffers, *(name for name, _ in module.named_parameters() if not name.startswith(known))]
    if others:
        yield reason(ReasonCode.MOE_FORWARD, f"it also holds {', '.join(others[:3])}")
    if "forward" in vars(module) or NAME in {*module._modules, *vars(module)}:
        yield reason(ReasonCode.MOE_FORWARD, f"its forward was replaced on the instance, or it has something called {NAME}")
    if block.is_meta:
        yield reason(ReasonCode.MOE_FORWARD, "its weights are on the meta device, so its forward was not probed")
    size = sum(parameter.numel() for expert in mixture.experts for parameter in expert.parameters())
    if size > PROBED_ELEMENTS:
        yield reason(ReasonCode.MOE_FORWARD, f"its experts have {size:,} weights, and at most {PROBED_ELEMENTS:,} are probed")
    if any(call.n_positional + len(call.keywords) != 1 or call.given != ("tensor",) for call in site.calls):
        yield reason(ReasonCode.MOE_FORWARD, "it is called with more than one tensor")
    dims = {len(call.input_shape or ()) for call in site.calls}
    if site.calls and (len(dims) > 1 or not dims <= {2, 3}):
        yield reason(ReasonCode.MOE_FORWARD, f"called with tensors of {sorted(dims)} dimensions")
    yield from _parameter_obstacles(block, mixture)


def _parameter_obstacles(block: Block, mixture: Mixture) -> Iterator[Reason]:
    names = list(linears_of(mixture.experts[0]))
    expected = [(f"{name}.weight", p.shape, p.requires_grad) for name, p in _weights_of(mixture.experts[0], names)]
    for expert in mixture.experts:
        own = [(name, p.shape, p.requires_grad) for name, p in expert.named_parameters()]
        plain = all(type(part) is nn.Linear for part in linears_of(expert).values())
        if not plain or own != expected:
            yield reason(ReasonCode.MOE_FORWARD, "its experts are not all the same plain Linears without biases")
            return
    if len({flag for _, _, flag in expected}) > 1:
        yield reason(ReasonCode.MOE_FORWARD, "only some weights of an expert are frozen")
    holders = [id(p) for module in block.modules.values() for p in module._parameters.values() if p is not None]
    shared = [p for expert in mixture.experts for p in expert.parameters() if holders.count(id(p)) > 1]
    twice = len(set(map(id, mixture.experts))) < len(mixture.experts)
    if shared or twice:
        yield reason(ReasonCode.PARAMETER_TIED_LAYOUT, "an expert's weight is shared with another module")


def _weights_of(expert: nn.Module, names: list[str]) -> list[tuple[str, nn.Parameter]]:
    return [(name, expert.get_submodule(name)._parameters["weight"]) for name in names]  # type: ignore[misc]
