"""A norm and the MLP module behind it  ->  te.LayerNormMLP, in the place of that module.

    y = fc2(act(fc1(norm(x))))      fc1_weight [ffn, hidden]
    y = down(act(gate(n)) * up(n))  fc1_weight [2 * ffn, hidden] = [gate; up], n = norm(x)

The activation is what a probe finds.  TE has no erf GELU: it is refused here (the norm and fc1 still fuse) unless allowed.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from te_convert.capture.graph import Recording
from te_convert.match.fusion import Fusion, Member
from te_convert.match.groups import Found, Group, LinearSite, NormSite, common_scope, inside, joined_ops, norm_ops, precision_of
from te_convert.match.mlp import ERF, MLP, Owner, find_mlp, find_owner
from te_convert.match.mlp_guards import mlp_obstacles
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.replacements.specs import LayerNormMLPSpec
from te_convert.rules.base import FusionRule
from te_convert.weights.ops import SwapHalves, WeightMap, WeightOp

_APPROXIMATION = "gelu-tanh"


class NormMLPRule(FusionRule):
    """The first MLP that the group's Linears begin."""

    id = "norm-mlp"

    def propose(self, group: Group) -> Found:
        """One fusion, or the reasons why the MLP stays in parts."""
        if group.norm is None:
            return Found()
        cache: dict[Hashable, tuple[str, str]] = group.probe_cache
        for linear in group.linears:
            found = _in_all_runs(group, group.norm, linear.fqn, cache)
            if isinstance(found, str):
                continue
            return _judge(group, group.norm, *found)
        return Found()

    def miss(self, group: Group) -> str:
        """Why no MLP begins at the Linears."""
        return "no norm makes their input" if group.norm is None else _missing(group, group.norm)


def _missing(group: Group, norm: NormSite) -> str:
    found = {linear.fqn: _in_all_runs(group, norm, linear.fqn, group.probe_cache) for linear in group.linears}
    return "; ".join(f"{fqn}: {why}" for fqn, why in found.items() if isinstance(why, str))


def _in_all_runs(
    group: Group, norm: NormSite, linear: str, cache: dict[Hashable, tuple[str, str]]
) -> tuple[MLP, Owner | None] | str:
    """The MLP that begins at a Linear in every recorded call, with the module that owns it in all of them."""
    seen: tuple[MLP, Owner | None] | None = None
    for recording in group.capture.recordings:
        for node in _calls(recording, linear):
            mlp = find_mlp(group, recording, node, cache)
            if isinstance(mlp, str):
                return mlp
            owner = find_owner(recording, mlp, norm.fqn, group.modules)
            if seen is not None and (_same(seen[0]), seen[1]) != (_same(mlp), owner):
                return "the recorded calls differ"
            seen = (mlp, owner)
    return "it never ran" if seen is None else seen


def _same(mlp: MLP) -> tuple[object, ...]:
    return mlp.inputs, mlp.down, mlp.activation, mlp.packed


def _calls(recording: Recording, fqn: str) -> list[fx.Node]:
    return recording.leaf_nodes.get(fqn, [])


def _judge(group: Group, norm: NormSite, mlp: MLP, owner: Owner | None) -> Found:
    parts = tuple(group.all_linears[name] for name in (*mlp.inputs, mlp.down))
    obstacles = [*mlp_obstacles(group, mlp, owner, parts)]
    activation = mlp.activation
    advice: tuple[Reason, ...] = ()
    if activation.endswith(ERF):
        activation = activation.removesuffix(ERF)
        if _APPROXIMATION in group.allow:
            advice = (reason(ReasonCode.ACTIVATION_APPROXIMATED, "erf GELU computed as tanh GELU"),)
        else:
            obstacles.append(
                reason(ReasonCode.ACTIVATION_GELU_ERF, f"the activation is GELU by erf; TE's {activation} is tanh GELU")
            )
    if obstacles or owner is None:
        return Found(advices={mlp.inputs[0]: tuple(obstacles)} if obstacles else {})
    fusion = _fusion(group, norm, mlp, owner, parts, activation, "gelu-tanh" if advice else "")
    return Found((fusion,), {mlp.inputs[0]: advice} if advice else {})


def _fusion(
    group: Group, norm: NormSite, mlp: MLP, owner: Owner, parts: tuple[LinearSite, ...], activation: str, approximation: str
) -> Fusion:
    *first, last = parts
    scope = common_scope([norm.fqn, f"{owner.fqn}.x"])
    roles = ("fc1",) if len(first) == 1 else ("gate", "up")
    dropouts = [str(node.target) for node in mlp.region.dropouts(group.modules) if node.op == "call_module"]
    inside_it = dict.fromkeys(str(node.target) for node in mlp.region.nodes if node.op == "call_module")
    members = (
        Member("norm", norm.fqn),
        Member("owner", owner.fqn),
        *(Member(role, linear.fqn) for role, linear in zip(roles, first, strict=True)),
        Member("fc2", last.fqn),
        *(Member("inside", name) for name in inside_it if name not in dropouts),
        *(Member("dropout-inside", name) for name in dropouts),
        *(Member("dropout-after", name) for name in owner.after),
    )
    spec = LayerNormMLPSpec(
        hidden_size=last.spec.out_features,
        ffn_hidden_size=last.spec.in_features,
        bias=last.spec.bias,
        eps=norm.facts.eps,
        normalization=norm.facts.kind,
        activation=activation,
        zero_centered_gamma=norm.facts.zero_centered_gamma,
        dtype=last.spec.dtype,
    )
    fc1 = _packed(first[0], scope) if mlp.packed == "second" else joined_ops(tuple(first), scope, "fc1_weight", "fc1_bias")
    weights = WeightMap((*norm_ops(norm, scope), *fc1, *joined_ops((last,), scope, "fc2_weight", "fc2_bias")))
    return Fusion(owner.fqn, scope, NormMLPRule.id, members, spec, weights, precision_of(parts), approximation=approximation)


def _packed(linear: LinearSite, scope: str) -> tuple[WeightOp, ...]:
    """fc1 whose second half is activated: TE wants it first."""
    prefix = inside(linear.fqn, scope)
    weight = SwapHalves(f"{prefix}.{linear.weight}", "fc1_weight", linear.transposed)
    return (weight, SwapHalves(f"{prefix}.{linear.bias}", "fc1_bias")) if linear.spec.bias else (weight,)
