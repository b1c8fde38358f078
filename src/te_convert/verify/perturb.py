"""Move every 1-D parameter away from its value: a norm that still has weight 1 and bias 0 hides a lost weight or bias."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from te_convert.match.groups import inside
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.rewrite.apply import Applied
from te_convert.rewrite.fused import fused_record
from te_convert.rewrite.loans import holder_of
from te_convert.rewrite.site import is_converted
from te_convert.weights.ops import Fill, Rows, Take, WeightOp

AMOUNT = 0.15
"""Standard deviation of what is added; large against rounding, small enough that models stay finite."""


@dataclass(frozen=True)
class OriginalParameters:
    """A parameter of a model, and what it was in the original.

    Attributes:
        names: names in the original model of what it is made of.
        op: how it is made of them; None for a parameter that is as it was.
    """

    parameter: nn.Parameter
    names: tuple[str, ...]
    op: WeightOp | None = None

    @property
    def is_vector(self) -> bool:
        """Whether the original tensors have one dimension (an entry of a stack has one less than the stack)."""
        return self.parameter.dim() + isinstance(self.op, Take) == 1

    def parts(self) -> list[torch.Tensor]:
        """The original tensors, without gradients."""
        whole = self.parameter.detach()
        return [whole] if self.op is None else self.op.inverse(whole)

    def put(self, parts: list[torch.Tensor]) -> None:
        """Set the parameter's values from those of the original tensors."""
        whole = self.op is None or isinstance(self.op, Take | Rows)
        self.parameter.copy_(parts[0] if self.op is None or whole else self.op.forward(parts))


def original_parameters(model: nn.Module) -> Iterator[OriginalParameters]:
    """Every distinct parameter with its names in the original model; constants that the conversion filled in are left out.

    A tied parameter has the name that comes first in the original, though fused modules stand last among their neighbours.
    """
    seen: set[int] = set()
    distinct: dict[int, OriginalParameters] = {}
    places = {name: place for place, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    inner = {id(part) for module in model.modules() if is_converted(module) for part in module.modules() if part is not module}
    for prefix, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # its parameters live behind another interface, and it is never converted
            continue
        found = _of_converted(prefix, module, seen) if is_converted(module) else _of_plain(prefix, module)
        for parameters in found:
            key = id(parameters.parameter)
            if key in seen:
                continue
            # A part of a TE module has a name there that the original does not know.
            known = key in distinct and (id(module) in inner or _place(parameters, places) >= _place(distinct[key], places))
            if not known:
                distinct[key] = parameters
    yield from distinct.values()


def _place(parameters: OriginalParameters, places: Mapping[str, int]) -> int:
    """Where the first holder stands in the model's order of modules; what is inside a TE module stands where that one does."""
    holder = parameters.names[0].rpartition(".")[0]
    while holder not in places:
        holder = holder.rpartition(".")[0]
    return places[holder]


def own_parameters(applied: Applied, fqns: Iterable[str]) -> list[OriginalParameters]:
    """The members' own Parameters of fusions that are off: their forwards use these instead of the fused ones."""
    names = {id(module): name for name, module in applied.model.named_modules()}
    found = []
    for fqn in fqns:
        module = applied.sites[fqn]
        if fused_record(module) is None:
            continue
        outer = outer_name(names.get(id(module), fqn), module)
        for source, parameter in applied.taken.get(fqn, {}).items():
            if parameter is not None:
                found.append(OriginalParameters(parameter, (f"{outer}.{source}" if outer else source,)))
    return found


def _of_plain(prefix: str, module: nn.Module) -> Iterator[OriginalParameters]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield OriginalParameters(parameter, (f"{prefix}.{name}" if prefix else name,))


def _of_converted(prefix: str, module: nn.Module, seen: set[int]) -> Iterator[OriginalParameters]:
    """By the weight map; what it does not make of the original's (filled constants) is marked as seen."""
    weights, outer = module.__dict__[SITE_ATTRIBUTE].decision.weights, outer_name(prefix, module)
    for op in weights.ops if weights is not None else ():
        holder, name = holder_of(module, op.dest)
        parameter = holder._parameters[name]
        if parameter is None or isinstance(op, Fill):
            seen.add(id(parameter))
            continue
        yield OriginalParameters(parameter, tuple(f"{outer}.{source}" if outer else source for source in op.sources), op)
    record = fused_record(module)
    for source, parameter in record.apart.items() if record is not None else ():  # the original's own, for comparisons with it
        yield OriginalParameters(parameter, (f"{outer}.{source}" if outer else source,))


def outer_name(prefix: str, module: nn.Module) -> str:
    """The module to which the source names of a converted module are relative."""
    record = fused_record(module)
    if record is None:
        return prefix
    return prefix.removesuffix(inside(record.decision.fqn, record.decision.scope)).rstrip(".")


def parameter_problems(applied: Applied) -> dict[str, str]:
    """Sites whose parameters are not the original's own: one that two of them hold apart, a constant that would be trained."""
    names = {id(module): name for name, module in applied.model.named_modules()}
    holders: dict[str, list[tuple[str, nn.Parameter]]] = {}
    problems: dict[str, str] = {}
    for fqn, module in applied.sites.items():
        weights, outer = module.__dict__[SITE_ATTRIBUTE].decision.weights, outer_name(names.get(id(module), fqn), module)
        for op in weights.ops if weights is not None else ():
            holder, name = holder_of(module, op.dest)
            parameter = holder._parameters[name]
            if parameter is None:
                continue
            if isinstance(op, Fill) and parameter.requires_grad:
                problems[fqn] = f"{op.dest} is a constant, and would be trained"
            for source in () if isinstance(op, Take | Rows) else op.sources:
                holders.setdefault(f"{outer}.{source}" if outer else source, []).append((fqn, parameter))
    for source, found in holders.items():
        if len({id(parameter) for _, parameter in found}) > 1:
            problems |= dict.fromkeys((fqn for fqn, _ in found), f"{source} became several parameters")
    return problems


@contextmanager
def perturbed(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Add seeded noise to every floating 1-D parameter for the time being; the same noise for the same original name.

    Values are put back bit for bit, also after an exception.
    """
    saved: list[tuple[nn.Parameter, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for found in original_parameters(model) if enabled else ():
                parameter = found.parameter
                if found.is_vector and parameter.is_floating_point() and parameter.numel() > 0:
                    saved.append((parameter, parameter.detach().clone()))
                    found.put([_moved(part, name, found.op) for part, name in zip(found.parts(), found.names, strict=True)])
        yield
    finally:
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)


def _moved(tensor: torch.Tensor, name: str, op: WeightOp | None) -> torch.Tensor:
    """With the noise that the original tensor gets, of which ``tensor`` may be some rows."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    size = op.total if isinstance(op, Rows) else tensor.shape[0]
    noise = torch.randn(size, generator=generator, dtype=torch.float32) * AMOUNT
    noise = op.forward([noise]) if isinstance(op, Rows) else noise
    return tensor + noise.to(tensor.device, tensor.dtype)
