"""Carry out a plan on a model, in place, as a transaction: all sites or none, and undo for any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from te_convert.facts.sharing import find_parents
from te_convert.plan.model import SITE_ATTRIBUTE, Decision, Plan
from te_convert.replacements.build import constructor_arguments, parameter_names
from te_convert.rewrite.carry_over import carry_attributes, carry_hooks, disable_fast_path, reset_switches
from te_convert.rewrite.site import Delegate, SiteRecord, get_record, has_transposed, is_converted, site_class, tell_layout
from te_convert.weights.ops import Fill, Move, Transpose, WeightMap

Progress = Callable[[int, int], None]


@dataclass
class Applied:
    """A rewritten model and the log that undoes it.

    Attributes:
        model: the root; another object than before when the root itself was replaced.
        backend: "reference" or "te".
        sites: converted modules by FQN.
    """

    model: nn.Module
    backend: str
    sites: dict[str, nn.Module] = field(default_factory=dict)

    def undo(self, fqn: str) -> None:
        """Put the original module of one site back, with the values that the converted one has now."""
        self.model = restore_site(self.model, self.sites.pop(fqn))

    def undo_all(self) -> None:
        """Put every original module back."""
        for fqn in reversed(list(self.sites)):
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
    switched: dict[int, Any] = {}
    try:
        for index, decision in enumerate(plan.converting):
            module = modules[decision.fqn]
            if is_converted(module):
                done[decision.fqn] = module
                continue
            converted = _convert(module, decision, backend)
            get_record(converted).switches = disable_fast_path([parent for parent, _ in parents[id(module)]], switched)
            _replace(applied, parents[id(module)], module, converted)
            applied.sites[decision.fqn] = converted
            if progress is not None:
                progress(index + 1, len(plan.converting))
    except BaseException:
        applied.undo_all()
        raise
    applied.sites.update(done)
    _watch_loading(applied.model)
    return applied


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
    cls = site_class(spec, backend)
    args, kwargs = constructor_arguments(spec, cls.__mro__[2])
    converted = cls(*args, **kwargs)
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
        else:
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


def restore_parameters(converted: nn.Module) -> nn.Module:
    """Fill the original module of a site with the converted one's values (the same Parameter objects where possible)."""
    record = get_record(converted)
    original, weights = record.original, record.decision.weights
    assert weights is not None
    for op in weights.ops:
        if isinstance(op, Move):
            original._parameters[op.source] = converted._parameters[op.dest]
        elif isinstance(op, Transpose):
            original._parameters[op.source] = transposed(converted._parameters[op.dest])
    return original


def restore_site(root: nn.Module, converted: nn.Module) -> nn.Module:
    """Put the original module back in place of a converted one; returns the root (another object if it was the site)."""
    original = restore_parameters(converted)
    original.__dict__.pop("forward", None)
    carry_hooks(converted, original)
    original.training = converted.training
    for parent, name in find_parents(root)[id(converted)]:
        parent._modules[name] = original
    reset_switches(get_record(converted).switches, is_converted)
    stop_watching(root)
    return original if root is converted else root


def _watch_loading(model: nn.Module) -> None:
    """Register the hook that tells square transposed weights the layout of a state dict; once per root."""
    if any(map(has_transposed, model.modules())) and not _layout_hooks(model):
        model.register_load_state_dict_pre_hook(tell_layout)


def _layout_hooks(model: nn.Module) -> list[int]:
    hooks = model._load_state_dict_pre_hooks
    return [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is tell_layout]


def stop_watching(model: nn.Module) -> None:
    """Remove the load hook from a root that has no transposed site left."""
    if not any(map(has_transposed, model.modules())):
        for key in _layout_hooks(model):
            del model._load_state_dict_pre_hooks[key]
