"""What keeps a recognised MLP from becoming one te.LayerNormMLP; all reasons at once."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from te_convert.match.groups import Group, LinearSite
from te_convert.match.mlp import MLP, Owner
from te_convert.match.readers import dropout_p
from te_convert.reasons import Reason, ReasonCode, reason

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def mlp_obstacles(group: Group, mlp: MLP, owner: Owner | None, parts: tuple[LinearSite, ...]) -> Iterator[Reason]:
    """Every reason against a fusion of the whole MLP."""
    *first, last = parts
    if owner is None:
        yield reason(ReasonCode.MLP_NO_OWNER, "no module takes the norm's output alone and returns the MLP's")
    if len({part.spec.bias for part in parts}) > 1:
        biased = [part.fqn for part in parts if part.spec.bias]
        yield reason(ReasonCode.MLP_BIAS, f"only {', '.join(biased)} has a bias; te.LayerNormMLP has one flag for all")
    if len(first) == 2 and first[0].flags != first[1].flags:
        yield reason(ReasonCode.MLP_FLAGS, f"{first[0].fqn} and {first[1].fqn} differ in requires_grad or layout, or one is tied")
    assert group.norm is not None  # the rule looks at norms alone
    if last.spec.out_features != group.norm.facts.width:
        sizes = f"{group.norm.facts.width} in, {last.spec.out_features} out"
        yield reason(ReasonCode.MLP_SHAPE, f"{sizes}; te.LayerNormMLP returns as many features as it takes")
    functional = [
        node for node in mlp.region.dropouts(group.modules) if node.op != "call_module" and dropout_p(node, group.modules)
    ]
    if functional:
        yield reason(ReasonCode.MLP_DROPOUT, "a dropout between the Linears is called as a function, its p cannot be watched")
    if owner is not None:
        yield from _owner_obstacles(group, owner, parts)


def _owner_obstacles(group: Group, owner: Owner, parts: tuple[LinearSite, ...]) -> Iterator[Reason]:
    module = group.modules[owner.fqn]
    own = {id(parameter) for part in parts for parameter in part.site.parameters.values()}
    others = [name for name, parameter in module.named_parameters() if id(parameter) not in own]
    if others:
        yield reason(ReasonCode.MLP_NO_OWNER, f"{owner.fqn} also holds {', '.join(others[:3])}")
    if module._buffers:
        yield reason(ReasonCode.MLP_NO_OWNER, f"{owner.fqn} has buffers of its own: {', '.join(module._buffers)}")
    outside = [part.fqn for part in parts if not part.fqn.startswith(f"{owner.fqn}.")]
    if outside:
        yield reason(ReasonCode.MLP_NO_OWNER, f"{', '.join(outside)} is not part of {owner.fqn}")
    hooked = [name for name, child in module.named_modules() if name and _has_hooks(child)]
    if hooked:
        yield reason(ReasonCode.MODULE_HOOKS, f"hooks on {', '.join(hooked[:3])} would not run")
    if "forward" in module.__dict__:
        yield reason(ReasonCode.MLP_NO_OWNER, f"the forward of {owner.fqn} was replaced on the instance")


def _has_hooks(module: nn.Module) -> bool:
    return any(module.__dict__.get(name) for name in _HOOKS)
