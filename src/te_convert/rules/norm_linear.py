"""A norm and the Linears that alone read it  ->  te.LayerNormLinear, one matrix for all of them.

    q, k, v = Linear_q(norm(x)), Linear_k(norm(x)), Linear_v(norm(x))
    [q k v] = norm(x) @ [W_q; W_k; W_v].T + [b_q; b_k; b_v]

Linears that differ in bias, requires_grad or layout, and tied ones, get a matrix of their own; all share the norm's Parameters.
"""

from __future__ import annotations

from te_convert.match.fusion import Fusion
from te_convert.match.groups import (
    Found,
    Group,
    LinearSite,
    NormSite,
    common_scope,
    joined_ops,
    members,
    norm_ops,
    place_beside,
    precision_of,
    short_name,
)
from te_convert.replacements.specs import LayerNormLinearSpec
from te_convert.rules.base import FusionRule
from te_convert.weights.ops import WeightMap


class NormLinearRule(FusionRule):
    """Every Linear of the group, in as few matrices as their flags allow."""

    id = "norm-linear"

    def propose(self, group: Group) -> Found:
        """One fusion per set of Linears with equal flags."""
        if group.norm is None:
            return Found()
        by_flags: dict[tuple[object, ...], list[LinearSite]] = {}
        for linear in group.linears:
            by_flags.setdefault(linear.flags, []).append(linear)
        return Found(tuple(self._fusion(group, group.norm, tuple(linears)) for linears in by_flags.values()))

    def miss(self, group: Group) -> str:
        """The norm that is not there."""
        return "" if group.norm is not None else "no norm that is read by Linears alone makes their input"

    def _fusion(self, group: Group, norm: NormSite, linears: tuple[LinearSite, ...]) -> Fusion:
        names = tuple(linear.fqn for linear in linears)
        fqn = place_beside(group.modules, names, f"layernorm_{short_name(names)}")
        scope = common_scope([norm.fqn, *names, fqn])
        spec = LayerNormLinearSpec(
            in_features=linears[0].spec.in_features,
            out_features=sum(linear.spec.out_features for linear in linears),
            bias=linears[0].spec.bias,
            eps=norm.facts.eps,
            normalization=norm.facts.kind,
            zero_centered_gamma=norm.facts.zero_centered_gamma,
            dtype=linears[0].spec.dtype,
        )
        return Fusion(
            fqn=fqn,
            scope=scope,
            rule=self.id,
            members=members(norm, linears),
            spec=spec,
            weights=WeightMap((*norm_ops(norm, scope), *joined_ops(linears, scope))),
            precision=precision_of(linears),
            contiguous=len(linears) > 1 and any(name in group.contiguous for name in names),
        )
