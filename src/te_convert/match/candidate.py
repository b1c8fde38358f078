"""A candidate site: one module with everything that was observed about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from te_convert.capture.graph import Capture, DirectUse, ModuleCall
from te_convert.config import Alignment
from te_convert.facts.parametrized import describe_parametrization
from te_convert.facts.sharing import find_parents, module_names, parameter_names


@dataclass(frozen=True)
class Candidate:
    """One module and what the capture and the module tree say about it.

    Attributes:
        fqn: canonical name; ``aliases`` are the module's other names.
        module: the module itself, never modified by rules or guards.
        calls: its recorded calls over all scenarios; empty without a graph.
        direct_uses: its parameters read past its own forward.
        ties: parameter name → the parameter's other names in the model.
        parents: modules that hold it.
        has_graph: whether anything was recorded at all.
        alignment: what the recipe asks for, or None.
        parametrization: what computes its weight, or None.
        probe_cache: shared by all candidates of one model, so identical modules are probed once.
    """

    fqn: str
    aliases: tuple[str, ...]
    module: nn.Module
    calls: tuple[ModuleCall, ...]
    direct_uses: tuple[DirectUse, ...]
    ties: dict[str, tuple[str, ...]]
    parents: tuple[nn.Module, ...]
    has_graph: bool
    alignment: Alignment | None
    parametrization: str | None
    probe_cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The module's own parameters by name."""
        return {name: p for name, p in self.module._parameters.items() if p is not None}

    @property
    def dtype(self) -> torch.dtype | None:
        """dtype of the first own parameter, or None."""
        return next((parameter.dtype for parameter in self.parameters.values()), None)

    @property
    def input_dtypes(self) -> set[torch.dtype]:
        """dtypes of the recorded inputs."""
        return {call.dtype for call in self.calls if call.dtype is not None}

    @property
    def width(self) -> int | None:
        """Last dimension of the first recorded input, or None."""
        return next((call.input_shape[-1] for call in self.calls if call.input_shape), None)


def find_candidates(model: nn.Module, capture: Capture, alignment: Alignment | None) -> list[Candidate]:
    """Every module of the model, in module order, as a candidate (each module once)."""
    names, parents = module_names(model), find_parents(model)
    ties = parameter_names(model)
    calls, uses = capture.calls_by_module(), capture.direct_uses_by_parameter()
    cache: dict[Any, Any] = {}
    candidates = []
    for fqn, module in model.named_modules():
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        prefix = f"{fqn}." if fqn else ""
        tied = {name: tuple(n for n in ties[id(p)] if n != prefix + name) for name, p in own.items()}
        candidates.append(
            Candidate(
                fqn=fqn,
                aliases=tuple(names[id(module)][1:]),
                module=module,
                calls=tuple(calls.get(fqn, ())),
                direct_uses=tuple(use for name, p in own.items() for use in uses.get(ties[id(p)][0], ())),
                ties={name: others for name, others in tied.items() if others},
                parents=tuple(parent for parent, _ in parents[id(module)]),
                has_graph=capture.has_graph,
                alignment=alignment,
                parametrization=describe_parametrization(module),
                probe_cache=cache,
            )
        )
    return candidates
