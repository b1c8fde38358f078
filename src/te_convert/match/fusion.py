"""A fusion: several modules that become one TE module, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from te_convert.replacements.specs import DotProductAttentionSpec, Spec, spec_from_dict, spec_to_dict
from te_convert.weights.ops import WeightMap, weight_map_from_dict, weight_map_to_dict


@dataclass(frozen=True)
class Member:
    """One module of a fusion and what it is there: "norm", "linear", "gate", "up", "fc1", "fc2", "attention", ...

    An "owner" leaves its place to the TE module; a "block" stays there and lets the TE module do all its work.
    """

    role: str
    fqn: str


@dataclass(frozen=True)
class Fusion:
    """Several modules that become one TE module.

    Attributes:
        fqn: where the TE module is registered, for instance ``layers.0.self_attn.layernorm_qkv``.
        scope: the module that holds all members; names in ``weights`` are relative to it.
        rule: id of the rule that found it.
        members: the modules in the order in which they run.
        spec: constructor facts of the TE module.
        weights: from the members' parameters to the TE module's.
        precision: "recipe" or "high" (the recipe cannot be used here).
        approximation: what the caller allowed to be computed approximately ("gelu-tanh"), or "".
        contiguous: the readers of the outputs need them contiguous (a slice of a larger matrix is not).
    """

    fqn: str
    scope: str
    rule: str
    members: tuple[Member, ...]
    spec: Spec
    weights: WeightMap
    precision: str = "recipe"
    contiguous: bool = False
    approximation: str = ""

    def member(self, role: str) -> str | None:
        """Name of the first member with a role, or None."""
        return next((member.fqn for member in self.members if member.role == role), None)

    @property
    def whole(self) -> str | None:
        """Name of the module all of whose work the TE module does, or None."""
        owner = self.member("owner")
        return self.member("block") if owner is None else owner

    @property
    def skips_padding(self) -> bool:
        """Its outputs at padded positions may be other ones."""
        return isinstance(self.spec, DotProductAttentionSpec) or self.member("block") is not None

    def to_dict(self) -> dict[str, Any]:
        """The fusion as plain JSON values."""
        return {
            "fqn": self.fqn,
            "scope": self.scope,
            "rule": self.rule,
            "members": [{"role": member.role, "fqn": member.fqn} for member in self.members],
            "spec": spec_to_dict(self.spec),
            "weights": weight_map_to_dict(self.weights),
            "precision": self.precision,
            "contiguous": self.contiguous,
            "approximation": self.approximation,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Fusion:
        """The inverse of :meth:`to_dict`; raises KeyError, TypeError or ValueError on damaged data."""
        return cls(
            fqn=data["fqn"],
            scope=data["scope"],
            rule=data["rule"],
            members=tuple(Member(**member) for member in data["members"]),
            spec=spec_from_dict(data["spec"]),
            weights=weight_map_from_dict(data["weights"]),
            precision=data["precision"],
            contiguous=data["contiguous"],
            approximation=data["approximation"],
        )
