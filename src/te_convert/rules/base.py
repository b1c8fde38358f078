"""The shape of a rule: recognise, guard, build, weights.  Rules are stateless, never touch the model and return values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from te_convert.match.blocks import Block
from te_convert.match.candidate import Candidate
from te_convert.match.groups import Found, Group
from te_convert.match.guards import ALWAYS, BEFORE_PROBES, Guard
from te_convert.reasons import Reason
from te_convert.replacements.specs import Spec
from te_convert.weights.ops import WeightMap

F = TypeVar("F")


@dataclass(frozen=True)
class NearMiss:
    """The rule looked at the module and says why it is not its case."""

    kind: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Proposal:
    """What one rule says about one site; a proposal without a spec is a refusal.

    Attributes:
        kind: what the site is, in reports.
        reasons: refusals (then the site stays) and advices, all of them.
        precision: "high" when the recipe cannot be used at this site.
    """

    rule: str
    kind: str
    spec: Spec | None
    weights: WeightMap | None
    reasons: tuple[Reason, ...]
    precision: str = "recipe"

    @property
    def refused(self) -> bool:
        """True when any reason forbids the conversion."""
        return self.spec is None or any(not r.is_advice for r in self.reasons)


class Rule(ABC, Generic[F]):
    """Base of all rules; ``F`` is what the rule's probe finds out.

    Subclasses set ``id`` (stable slug) and ``kind``, may extend ``guards``, and write the four methods.
    """

    id: ClassVar[str]
    kind: ClassVar[str]
    guards: ClassVar[tuple[Guard, ...]] = ALWAYS

    @abstractmethod
    def looks_like(self, site: Candidate) -> bool:
        """Cheap structural test: is this the rule's business at all?"""

    @abstractmethod
    def recognise(self, site: Candidate) -> F | NearMiss | None:
        """Find out what the module computes; None when another rule should look."""

    @abstractmethod
    def build(self, site: Candidate, facts: F) -> Spec:
        """The replacement's constructor facts."""

    @abstractmethod
    def weights(self, site: Candidate, facts: F) -> WeightMap:
        """Where each of the module's tensors goes."""

    def check(self, site: Candidate, facts: F) -> tuple[Reason, ...]:
        """Reasons that need the recognised facts; refusals and advices."""
        del site, facts
        return ()

    def miss(self, site: Candidate) -> str:
        """What :meth:`recognise` saw when it left the module to other rules, in words; only an explanation asks."""
        del site
        return ""

    def precision(self, site: Candidate, facts: F) -> str:
        """Either "recipe", or "high" when the recipe cannot be used at this site."""
        del site, facts
        return "recipe"

    def propose(self, site: Candidate) -> Proposal | None:
        """Run the rule on one candidate; None when it does not apply."""
        if not self.looks_like(site):
            return None
        blocked = _run(BEFORE_PROBES, site)
        if any(not r.is_advice for r in blocked):
            return Proposal(self.id, self.kind, None, None, _run(self.guards, site))
        found = self.recognise(site)
        if found is None:
            return None
        if isinstance(found, NearMiss):
            return Proposal(self.id, found.kind, None, None, (*found.reasons, *_run(self.guards, site)))
        reasons = (*_run(self.guards, site), *self.check(site, found))
        return Proposal(
            self.id, self.kind, self.build(site, found), self.weights(site, found), reasons, self.precision(site, found)
        )


class FusionRule(ABC):
    """Base of the rules that make one TE module of several; they look at a group of Linears that read the same tensor.

    A rule takes what it can; the next one gets the Linears that are left.
    """

    id: ClassVar[str]

    @abstractmethod
    def propose(self, group: Group) -> Found:
        """Fusions of the group's modules, and why others were not made."""

    def miss(self, group: Group) -> str:
        """What a group lacked of which nothing was said, in words; only an explanation asks."""
        del group
        return ""


class BlockRule(ABC):
    """Base of the rules that make one TE module of one module with everything inside it."""

    id: ClassVar[str]

    @abstractmethod
    def looks_like(self, block: Block) -> bool:
        """Cheap structural test: is this the rule's business at all?"""

    @abstractmethod
    def propose(self, block: Block) -> Found:
        """A fusion of the module, or why there is none."""

    def miss(self, block: Block) -> str:
        """What a module lacked of which nothing was said, in words; only an explanation asks."""
        del block
        return ""


def _run(guards: tuple[Guard, ...], site: Candidate) -> tuple[Reason, ...]:
    return tuple(found for guard in guards if (found := guard(site)) is not None)


AnyRule = Rule[Any]
