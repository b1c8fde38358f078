"""Carry out a plan on a model, in place, as a transaction: all sites or none, and undo for any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from te_convert.facts.sharing import find_parents
from te_convert.plan.model import SITE_ATTRIBUTE, Decision, Plan
from te_convert.replacements.build import new_module, parameter_names
from te_convert.rewrite.carry_over import (
    Known,
    Switch,
    carry_attributes,
    carry_hooks,
    disable_fast_path,
    has_fast_path,
    reset_switches,
)
from te_convert.rewrite.files import unwatch_files, watch_files
from te_convert.rewrite.fuse import fuse, restore_fusion
from te_convert.rewrite.fused import fused_record, get_fused, unwatch_root, watch_root
from te_convert.rewrite.graph_modules import unwatch_graphs, watch_graphs
from te_convert.rewrite.loans import is_borrower
from te_convert.rewrite.site import (
    Delegate,
    SiteRecord,
    get_record,
    is_converted,
    site_class,
)
from te_convert.weights.ops import Fill, Move, Transpose, WeightMap

Progress = Callable[[int, int], None]
Own = Mapping[str, Any]
"""The original Parameter objects (or None) of a site, by name."""


@dataclass
class Applied:
    """A rewritten model and the log that undoes it.

    Attributes:
        model: the root; another object than before when the root itself was replaced.
        backend: "reference" or "te".
        sites: converted modules by FQN.
        taken: the original Parameter objects of the sites that this rewrite made.  A converted module mostly holds the same
            objects, so they cost nothing but for transposed weights, which live twice as long as this log does.
    """

    model: nn.Module
    backend: str
    sites: dict[str, nn.Module] = field(default_factory=dict)
    taken: dict[str, Own] = field(default_factory=dict)

    def undo(self, fqn: str) -> None:
        """Put the original module of one site back as this rewrite found it, whatever became of the weights in between.

        A site of an earlier conversion gets the values that the converted module has now.
        """
        self.model = restore_site(self.model, self.sites.pop(fqn), self.taken.pop(fqn, None))

    def undo_all(self) -> None:
        """Put every original module back that this rewrite replaced; sites of an earlier conversion stay."""
        for fqn in reversed(list(self.taken)):
            self.undo(fqn)


def apply_plan(model: nn.Module, plan: Plan, backend: str, progress: Progress | None = None) -> Applied:
    """Replace every converting site of ``plan`` in ``model``; Parameter objects are re-used where the layout allows it.

    Sites that an earlier conversion already replaced are passed over (and listed in ``Applied.sites``).  On any exception the
    model is put back as it was before the exception is raised again.

    Raises:
        EnvironmentLacksError: backend "te" and it does not import.
        KeyError: the plan names a module that the model does not have.
    """
    applied = Applied(model, backend)
    modules = dict(model.named_modules())
    parents = find_parents(model)
    done: dict[str, nn.Module] = {}
    switched = known_switches(modules.values())
    total = len(plan.swaps) + len(plan.fusions)
    try:
        for index, decision in enumerate(plan.swaps):
            module = modules[decision.fqn]
            if is_converted(module):
                done[decision.fqn] = module
                continue
            own = dict(module._parameters)
            converted = _convert(module, decision, backend)
            applied.sites[decision.fqn], applied.taken[decision.fqn] = converted, own
            _replace(applied, parents[id(module)], module, converted)
            if progress is not None:
                progress(index + 1, total)
        decisions = {decision.fqn: decision for decision in plan.decisions if decision.fused_into is not None}
        for index, fusion in enumerate(plan.fusions):
            module = modules.get(fusion.fqn)
            if module is not None and is_converted(module):
                done[fusion.fqn] = module
                continue
            fused, taken = fuse(applied.model, fusion, decisions, backend, parents)
            applied.sites[fusion.fqn], applied.taken[fusion.fqn] = fused, taken
            if applied.model in get_fused(fused).role("owner"):
                applied.model = fused
            if progress is not None:
                progress(len(plan.swaps) + index + 1, total)
        _disable_fast_paths(applied, switched)
        watch_files(applied.model)
        watch_root(applied.model)
        watch_graphs(applied.model)
    except BaseException:
        applied.undo_all()
        raise
    applied.sites.update(done)
    return applied


def _disable_fast_paths(applied: Applied, known: Known) -> None:
    """Each site remembers the switches of the encoders that hold it."""
    for holder in filter(has_fast_path, list(applied.model.modules())):
        parts = [part for part in holder.modules() if part is not holder]
        if any(map(needs_slow_path, parts)):
            switches = disable_fast_path([holder], known)
            for part in filter(is_converted, parts):
                part.__dict__[SITE_ATTRIBUTE].switches += switches


def needs_slow_path(module: nn.Module) -> bool:
    """A converted module, or a member of a fusion: torch's fused encoder kernel would read its weights past it."""
    return is_converted(module) or is_borrower(module)


def known_switches(modules: Iterable[nn.Module]) -> Known:
    """Original values of what earlier conversions switched."""
    switches: list[Switch] = [s for module in modules if is_converted(module) for s in module.__dict__[SITE_ATTRIBUTE].switches]
    return {(id(module), name): value for module, name, value in switches}


def _replace(applied: Applied, holders: list[tuple[nn.Module, str]], old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` under every name that holds ``old``; a root is replaced by being returned."""
    if applied.model is old:
        applied.model = new
    for parent, name in holders:
        parent._modules[name] = new


def _convert(module: nn.Module, decision: Decision, backend: str) -> nn.Module:
    spec, weights = decision.spec, decision.weights
    if spec is None or weights is None:
        raise ValueError(f"{decision.fqn}: a converting decision needs a spec and a weight map")
    converted: nn.Module = new_module(site_class(spec, backend), spec, backend)
    _assign_parameters(module, converted, weights, parameter_names(spec))
    carry_hooks(module, converted)
    carry_attributes(module, converted)
    converted.training = module.training
    converted.__dict__[SITE_ATTRIBUTE] = SiteRecord(decision, module, backend)
    for name in module._parameters:
        module._parameters[name] = None
    module.__dict__["forward"] = Delegate(converted)
    return converted


def _assign_parameters(module: nn.Module, converted: nn.Module, weights: WeightMap, names: tuple[str, ...]) -> None:
    for op in weights.ops:
        if op.dest not in names:
            raise ValueError(f"{type(converted).__name__} has no parameter {op.dest!r}")
        if isinstance(op, Move):
            converted._parameters[op.dest] = module._parameters[op.source]
        elif isinstance(op, Transpose):
            converted._parameters[op.dest] = transposed(module._parameters[op.source])
        elif isinstance(op, Fill):
            like = next(p for p in module._parameters.values() if p is not None)
            converted._parameters[op.dest] = filled(op, like)


def transposed(parameter: nn.Parameter | None) -> nn.Parameter:
    """A new Parameter with the two dimensions swapped; its gradient, if any, is swapped too."""
    assert parameter is not None
    swapped = nn.Parameter(parameter.detach().t().contiguous(), requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        swapped.grad = parameter.grad.detach().t().contiguous()
    return swapped


def filled(op: Fill, like: torch.Tensor) -> nn.Parameter:
    """A frozen constant Parameter of the fill's length."""
    return nn.Parameter(torch.full((op.size,), op.value, dtype=like.dtype, device=like.device), requires_grad=False)


def restore_parameters(converted: nn.Module, own: Own | None = None) -> nn.Module:
    """Fill the original module of a site with its ``own`` Parameters, else with the converted one's values.

    Without ``own`` the Parameter objects are the converted module's, except where the layout differs.
    """
    record = get_record(converted)
    original, weights = record.original, record.decision.weights
    if own is not None:
        original._parameters.update(own)
        return original
    assert weights is not None
    for op in weights.ops:
        if isinstance(op, Move):
            original._parameters[op.source] = converted._parameters[op.dest]
        elif isinstance(op, Transpose):
            original._parameters[op.source] = transposed(converted._parameters[op.dest])
    return original


def restore_site(root: nn.Module, converted: nn.Module, own: Own | None = None) -> nn.Module:
    """Put the original module back in place of a converted one; returns the root (another object if it was the site).

    With its ``own`` Parameters it is exactly as it was; without, it takes over the converted module's values and hooks.
    """
    fused = fused_record(converted)
    if fused is not None:
        root = restore_fusion(root, fused, None if own is None else dict(own))
        reset_switches(fused.switches, needs_slow_path)
        unwatch_files(root)
        unwatch_root(root)
        unwatch_graphs(root)
        return root
    original = restore_parameters(converted, own)
    original.__dict__.pop("forward", None)
    if own is None:
        carry_hooks(converted, original)
    original.training = converted.training
    for parent, name in find_parents(root)[id(converted)]:
        parent._modules[name] = original
    reset_switches(get_record(converted).switches, needs_slow_path)
    unwatch_files(root)
    unwatch_graphs(root)
    return original if root is converted else root
