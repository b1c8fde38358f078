"""Linears of one module that read the same tensor  ->  one te.Linear.

    [q k v] = x @ [W_q; W_k; W_v].T + [b_q; b_k; b_v]

For inputs that no norm of the module's own makes: BERT's q, k, v, a decoder's cross-attention k and v.
"""

from __future__ import annotations

from te_convert.match.fusion import Fusion
from te_convert.match.groups import (
    Found,
    Group,
    LinearSite,
    common_scope,
    joined_ops,
    members,
    place_beside,
    precision_of,
    short_name,
)
from te_convert.replacements.specs import LinearSpec
from te_convert.rules.base import FusionRule
from te_convert.weights.ops import WeightMap


class SharedLinearRule(FusionRule):
    """Linears with equal flags, two or more."""

    id = "shared-linear"

    def propose(self, group: Group) -> Found:
        """One fusion per set of Linears with equal flags; a Linear alone stays as it is."""
        if group.norm is not None:
            return Found()
        by_flags: dict[tuple[object, ...], list[LinearSite]] = {}
        for linear in group.linears:
            by_flags.setdefault((*linear.flags, linear.spec.in_features), []).append(linear)
        return Found(tuple(self._fusion(group, tuple(linears)) for linears in by_flags.values() if len(linears) > 1))

    def miss(self, group: Group) -> str:
        """The norm that others join them with, or how the Linears differ."""
        if group.norm is not None:
            return "a norm makes their input"
        names = ("layout", "dtype", "bias or none", "requires_grad", "a tied weight")
        columns = zip(*(linear.flags for linear in group.linears), strict=True)
        return f"they differ in {', '.join(name for name, values in zip(names, columns, strict=True) if len(set(values)) > 1)}"

    def _fusion(self, group: Group, linears: tuple[LinearSite, ...]) -> Fusion:
        names = tuple(linear.fqn for linear in linears)
        fqn = place_beside(group.modules, names, short_name(names))
        scope = common_scope([*names, fqn])
        first = linears[0].spec
        spec = LinearSpec(first.in_features, sum(linear.spec.out_features for linear in linears), first.bias, first.dtype)
        return Fusion(
            fqn=fqn,
            scope=scope,
            rule=self.id,
            members=members(None, linears),
            spec=spec,
            weights=WeightMap(joined_ops(linears, scope)),
            precision=precision_of(linears),
            contiguous=any(name in group.contiguous for name in names),
        )
