"""What an explanation holds, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from te_convert.plan.model import Decision
from te_convert.plan.trace import Attempt

EXPLANATION_SCHEMA = 1


@dataclass(frozen=True)
class GraphLine:
    """One node of the recorded graph.

    Attributes:
        name: of the node.
        operation: a module's name, or a function's or method's.
        inputs: names of the nodes that it reads.
        shape: of its result; None where it gives no single tensor.
        dtype: of its result, or "".
        where: the module in whose forward it ran ("" is the root).
        readers: names of the nodes that read it.
        place: "before", "site" or "after".
    """

    name: str
    operation: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...] | None
    dtype: str
    where: str
    readers: tuple[str, ...]
    place: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        lists = {"inputs": list(self.inputs), "readers": list(self.readers)}
        return {**self.__dict__, **lists, "shape": None if self.shape is None else list(self.shape)}


@dataclass(frozen=True)
class Trial:
    """A run of the converted site on the recorded scenarios, with the twins or Transformer Engine.

    Attributes:
        backend: what ran.
        executed: how often the TE module ran.
        fallbacks: how often the original ran instead.
        why_not: causes of that and how often each was met, where the site keeps them.
        problem: why there was no run, or "".
    """

    backend: str
    executed: int = 0
    fallbacks: int = 0
    why_not: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**self.__dict__, "why_not": dict(self.why_not)}


@dataclass(frozen=True)
class Explanation:
    """Everything that is known about one module of a model.

    Attributes:
        fqn: its name ("" is the root); ``aliases`` are its other names.
        class_name: with its Python module.
        decision: what the plan says, or None for a module that owns nothing and that no rule had anything to say about.
        members: the modules of the fusion that it is part of, as (role, name).
        parameters: its own, as name → "float32 [64, 64]" and what else is to know.
        calls: recorded calls, by scenario.
        arguments: what its first recorded call was given, by kind: "tensor", a plain value, a class name.
        facts: what a probe found out.
        source: what makes its input, or "".
        companions: other modules that read the same input, and why each is joined or not.
        attempts: what each rule said, in the order in which they were asked.
        trial: for a site of a fusion, what happened when it ran.
        scenario: the run that ``graph`` is of, or "".
        graph: nodes around the site.
        hidden: nodes of the site itself that ``graph`` leaves out.
        notes: what could not be observed.
    """

    fqn: str
    aliases: tuple[str, ...]
    class_name: str
    decision: Decision | None
    members: tuple[tuple[str, str], ...]
    parameters: Mapping[str, str]
    calls: Mapping[str, int]
    arguments: tuple[str, ...]
    facts: Mapping[str, str]
    source: str
    companions: Mapping[str, str]
    attempts: tuple[Attempt, ...]
    trial: Trial | None
    scenario: str
    graph: tuple[GraphLine, ...]
    hidden: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values with ``"schema"``."""
        decision = None if self.decision is None else self.decision.to_dict()
        return {
            "schema": EXPLANATION_SCHEMA,
            "fqn": self.fqn,
            "aliases": list(self.aliases),
            "class_name": self.class_name,
            "decision": decision,
            "members": [{"role": role, "fqn": name} for role, name in self.members],
            "parameters": dict(self.parameters),
            "calls": dict(self.calls),
            "arguments": list(self.arguments),
            "facts": dict(self.facts),
            "source": self.source,
            "companions": dict(self.companions),
            "attempts": [attempt.to_dict() for attempt in self.attempts],
            "trial": None if self.trial is None else self.trial.to_dict(),
            "scenario": self.scenario,
            "graph": [line.to_dict() for line in self.graph],
            "hidden": self.hidden,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from te_convert.explain.text import render_explanation

        return render_explanation(self)
