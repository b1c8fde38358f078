"""What makes a module's input, and why others that read the same are or are not part of one fusion with it."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from te_convert.capture.graph import Recording
from te_convert.explain.graph import nodes_of, where_of
from te_convert.match.readers import node_name
from te_convert.plan.model import Decision, Plan
from te_convert.replacements.specs import LinearSpec


def describe_source(recording: Recording, plan: Plan, fqn: str) -> str:
    """``layers.0.norm (RMSNorm, FUSED)``, ``add in layers.0``, or "" for a module that is no leaf."""
    nodes = nodes_of(recording, fqn)
    if len(nodes) != 1 or not nodes[0].all_input_nodes:
        return ""
    source = nodes[0].all_input_nodes[0]
    if source.op == "placeholder":
        return f"the model's input {source.name}"
    decision = _decision(plan, source)
    if decision is not None:
        return f"{source.target} ({decision.kind}, {decision.outcome})"
    return f"{node_name(source)} in {where_of(source) or 'the root'}"


def companions(recording: Recording, plan: Plan, fqn: str, modules: dict[str, nn.Module]) -> dict[str, str]:
    """Other Linears that read the same tensor, each with why it is or is not joined with this one."""
    mine = next((decision for decision in plan if decision.fqn == fqn), None)
    nodes = nodes_of(recording, fqn)
    if mine is None or not _is_linear(mine) or len(nodes) != 1 or len(nodes[0].all_input_nodes) != 1:
        return {}
    others = (_decision(plan, user) for user in nodes[0].all_input_nodes[0].users if user.op == "call_module")
    known = {other.fqn: other for other in others if other is not None and other.fqn != fqn and _is_linear(other)}
    return {name: _why(mine, other, _differences(modules[fqn], modules[name])) for name, other in known.items()}


def _why(mine: Decision, other: Decision, differences: str) -> str:
    if other.fused_into is not None and other.fused_into == mine.fused_into:
        return f"joined with it in {mine.fused_into}"
    for side, name in ((other, "it"), (mine, "this one")):
        if not side.converts:
            codes = ", ".join(why.code for why in side.reasons if not why.is_advice)
            return f"not joined: {name} is {side.outcome}" + (f" ({codes})" if codes else "")
    if differences:
        return f"not joined: they differ in {differences}"
    if mine.fqn.rpartition(".")[0] != other.fqn.rpartition(".")[0]:
        return "not joined: they are children of different modules"
    if other.fused_into is not None:
        return f"not joined: it is part of {other.fused_into}"
    return "not joined: the rules below say why"


def _differences(mine: nn.Module, other: nn.Module) -> str:
    """What two Linears that become one matrix must have in common (``LinearSite.flags``), where these two do not."""
    sides = [list(module.parameters(recurse=False)) for module in (mine, other)]
    found: dict[str, list[Any]] = {
        "bias or none": [len(side) for side in sides],
        "requires_grad": [[parameter.requires_grad for parameter in side] for side in sides],
        "dtype": [{parameter.dtype for parameter in side} for side in sides],
        "class": [type(module) for module in (mine, other)],
    }
    if found["bias or none"][0] != found["bias or none"][1]:
        del found["requires_grad"]
    return ", ".join(name for name, (left, right) in found.items() if left != right)


def _is_linear(decision: Decision) -> bool:
    return decision.kind in ("Linear", "Conv1D") or isinstance(decision.spec, LinearSpec)


def _decision(plan: Plan, node: fx.Node) -> Decision | None:
    if node.op != "call_module":
        return None
    return next((decision for decision in plan if decision.fqn == node.target), None)
