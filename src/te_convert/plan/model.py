"""The plan: one decision per site, as plain data with a schema version."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from te_convert.errors import LoadError
from te_convert.match.fusion import Fusion
from te_convert.reasons import Reason
from te_convert.replacements.specs import Spec, spec_from_dict, spec_to_dict
from te_convert.weights.ops import WeightMap, weight_map_from_dict, weight_map_to_dict

PLAN_SCHEMA = 2
SITE_ATTRIBUTE = "_te_convert"
"""Where a converted module keeps its record (in ``__dict__``, so it is neither a submodule nor in the state dict)."""

PLAN_ATTRIBUTE = "_te_convert_plan"
"""Where a converted root keeps its plan, for autocast() and save()."""
MEMBER_ATTRIBUTE = "_te_convert_member"
"""Where a member of a fusion keeps its decision."""


class Outcome(str, Enum):
    """What happened to a site."""

    CONVERTED = "CONVERTED"
    FUSED = "FUSED"
    REFUSED = "REFUSED"
    NO_MATCH = "NO_MATCH"
    EXCLUDED = "EXCLUDED"

    def __str__(self) -> str:
        return self.value


CONVERTING = (Outcome.CONVERTED, Outcome.FUSED)


@dataclass(frozen=True)
class CallShape:
    """Shapes and dtype of one recorded call: the first tensor argument and the first tensor result."""

    input: tuple[int, ...]
    output: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Decision:
    """What is planned for one site (a module, or a functional use of parameters).

    Attributes:
        fqn: fully qualified name of the module ("" for the root); for a functional use, that of the parameter.
        aliases: the other names of the same module object.
        kind: "Linear", "Conv1D", "LayerNorm", "RMSNorm", or the class name when nothing was recognised.
        class_name: the module's class.
        rule: id of the rule that decided, or None.
        calls: recorded calls over all scenarios.
        shapes: distinct recorded calls.
        params: number of parameter elements of the site.
        flops: floating-point operations of the recorded calls of the first scenario.
        precision: "recipe" or "high" (the recipe cannot be used here).
        fused_into: for a site that became part of a larger TE module, where that module is (see :class:`Fusion`).
    """

    fqn: str
    kind: str
    class_name: str
    outcome: Outcome
    aliases: tuple[str, ...] = ()
    rule: str | None = None
    spec: Spec | None = None
    weights: WeightMap | None = None
    reasons: tuple[Reason, ...] = ()
    calls: int = 0
    shapes: tuple[CallShape, ...] = ()
    params: int = 0
    flops: int = 0
    precision: str = "recipe"
    fused_into: str | None = None

    @property
    def converts(self) -> bool:
        """True when the rewrite will touch this site."""
        return self.outcome in CONVERTING

    @property
    def replacement(self) -> str | None:
        """TE's name of the replacement, for instance ``"te.Linear"``."""
        return self.spec.name if self.spec is not None and self.converts else None

    def to_dict(self) -> dict[str, Any]:
        """The decision as plain JSON values."""
        return {
            "fqn": self.fqn,
            "kind": self.kind,
            "class_name": self.class_name,
            "outcome": self.outcome.value,
            "aliases": list(self.aliases),
            "rule": self.rule,
            "spec": None if self.spec is None else spec_to_dict(self.spec),
            "weights": None if self.weights is None else weight_map_to_dict(self.weights),
            "reasons": [reason._asdict() for reason in self.reasons],
            "calls": self.calls,
            "shapes": [{"input": list(s.input), "output": list(s.output), "dtype": s.dtype} for s in self.shapes],
            "params": self.params,
            "flops": self.flops,
            "precision": self.precision,
            "fused_into": self.fused_into,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Decision:
        """The inverse of :meth:`to_dict`; raises KeyError, TypeError or ValueError on damaged data."""
        spec, weights = data["spec"], data["weights"]
        return cls(
            fqn=data["fqn"],
            kind=data["kind"],
            class_name=data["class_name"],
            outcome=Outcome(data["outcome"]),
            aliases=tuple(data["aliases"]),
            rule=data["rule"],
            spec=None if spec is None else spec_from_dict(spec),
            weights=None if weights is None else weight_map_from_dict(weights),
            reasons=tuple(Reason(**reason) for reason in data["reasons"]),
            calls=data["calls"],
            shapes=tuple(CallShape(tuple(s["input"]), tuple(s["output"]), s["dtype"]) for s in data["shapes"]),
            params=data["params"],
            flops=data["flops"],
            precision=data["precision"],
            fused_into=data["fused_into"],
        )


@dataclass(frozen=True)
class Plan:
    """Every site of a model with its decision.

    Attributes:
        model_class: class name of the model.
        decisions: one per site, in module order.
        scenarios: names of the recorded runs, for instance ("inputs", "inputs[train]"); empty when none ran.
        recipe: the recipe asked for, or None.
        params_total: parameter elements of the model, each counted once.
        flops_total: floating-point operations recorded in the first scenario (see facts/flops.py for what is counted).
        notes: what could not be observed, one sentence each.
        fusions: the TE modules that replace several sites each.
    """

    model_class: str
    decisions: tuple[Decision, ...]
    scenarios: tuple[str, ...] = ()
    recipe: str | None = None
    params_total: int = 0
    flops_total: int = 0
    notes: tuple[str, ...] = ()
    fusions: tuple[Fusion, ...] = ()

    @property
    def sites(self) -> tuple[Decision, ...]:
        """The decisions under the name that reports use."""
        return self.decisions

    @property
    def converting(self) -> tuple[Decision, ...]:
        """The decisions that the rewrite will carry out."""
        return tuple(decision for decision in self.decisions if decision.converts)

    @property
    def swaps(self) -> tuple[Decision, ...]:
        """The decisions that replace one module by one TE module."""
        return tuple(decision for decision in self.converting if decision.fused_into is None)

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.decisions)

    def __str__(self) -> str:
        lines = [f"{self.model_class}: {len(self.converting)} of {len(self.decisions)} sites would be converted"]
        for decision in self.decisions:
            reasons = "; ".join(f"{r.code}: {r.detail}" for r in decision.reasons)
            what = decision.replacement or decision.kind
            lines.append(
                f"  {decision.outcome.value:10} {decision.fqn or '(root)'}  {what}" + (f"  [{reasons}]" if reasons else "")
            )
        return "\n".join(lines)

    def get(self, fqn: str) -> Decision:
        """The decision of a site, by its name or one of its aliases.

        Raises:
            KeyError: no such site.
        """
        for decision in self.decisions:
            if fqn == decision.fqn or fqn in decision.aliases:
                return decision
        raise KeyError(fqn)

    def refuse(self, fqn: str, why: Reason) -> Plan:
        """A copy in which a site, or a fusion with all its members (named by its place or by a member), has one more refusal.

        The spec is kept for explanation only.

        Raises:
            KeyError: no such site or fusion.
        """
        fusion = next((fusion for fusion in self.fusions if fusion.fqn == self._place(fqn)), None)
        rest = tuple(other for other in self.fusions if other is not fusion)
        sites = [d for d in self.decisions if d.fused_into == fusion.fqn] if fusion is not None else [self.get(fqn)]
        changed = {id(site): _leave_fusion(site, rest, why) for site in sites}
        return replace(self, decisions=tuple(changed.get(id(d), d) for d in self.decisions), fusions=rest)

    def keep_high(self, fqn: str, why: Reason) -> Plan:
        """A copy in which a converted site, or a fusion with all its members, stays in high precision, and says why.

        A norm of a fusion says nothing: it always computes in float32.

        Raises:
            KeyError: no such site or fusion.
        """
        fusion = next((fusion for fusion in self.fusions if fusion.fqn == fqn), None)
        norms = {member.fqn for member in fusion.members if member.role == "norm"} if fusion is not None else set()
        sites = [d for d in self.decisions if d.fused_into == fqn] if fusion is not None else [self.get(fqn)]
        changed = {id(d): replace(d, precision="high", reasons=d.reasons if d.fqn in norms else (*d.reasons, why)) for d in sites}
        return replace(
            self,
            decisions=tuple(changed.get(id(d), d) for d in self.decisions),
            fusions=tuple(replace(f, precision="high") if f is fusion else f for f in self.fusions),
        )

    def _place(self, fqn: str) -> str | None:
        """Name of the fusion that ``fqn`` is, or is part of."""
        if any(fusion.fqn == fqn for fusion in self.fusions):
            return fqn
        return next((d.fused_into for d in self.decisions if fqn == d.fqn or fqn in d.aliases), None)

    def refuse_all(self, why: Reason) -> Plan:
        """A copy that converts nothing."""
        decisions = tuple(
            replace(d, outcome=Outcome.REFUSED, reasons=(*d.reasons, why), fused_into=None) if d.converts else d
            for d in self.decisions
        )
        return replace(self, decisions=decisions, fusions=())

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values with ``"schema"``."""
        return {
            "schema": PLAN_SCHEMA,
            "model_class": self.model_class,
            "scenarios": list(self.scenarios),
            "recipe": self.recipe,
            "params_total": self.params_total,
            "flops_total": self.flops_total,
            "notes": list(self.notes),
            "decisions": [decision.to_dict() for decision in self.decisions],
            "fusions": [fusion.to_dict() for fusion in self.fusions],
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as indented JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """The inverse of :meth:`to_dict`.

        Raises:
            LoadError: an unknown schema version, or data that is not a plan.
        """
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != PLAN_SCHEMA:
            raise LoadError(f"the plan has schema {schema!r}; this version reads {PLAN_SCHEMA}", "use the te_convert that wrote it")
        try:
            return cls(
                model_class=data["model_class"],
                decisions=tuple(Decision.from_dict(entry) for entry in data["decisions"]),
                scenarios=tuple(data["scenarios"]),
                recipe=data["recipe"],
                params_total=data["params_total"],
                flops_total=data["flops_total"],
                notes=tuple(data["notes"]),
                fusions=tuple(Fusion.from_dict(entry) for entry in data["fusions"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LoadError(f"the plan is damaged: {type(error).__name__}: {error}", "convert the model again") from None


def _leave_fusion(site: Decision, others: tuple[Fusion, ...], why: Reason) -> Decision:
    """A norm that several fusions read stays in the next of them; any other site is refused."""
    other = next((fusion for fusion in others if site.fqn in {member.fqn for member in fusion.members}), None)
    if site.fused_into is not None and other is not None:
        return replace(site, fused_into=other.fqn, spec=other.spec)
    return replace(site, outcome=Outcome.REFUSED, reasons=(*site.reasons, why), fused_into=None)
