"""What the rules for blocks and fusions said about one module while a plan was made; nothing is kept unless somebody asks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from te_convert.capture.run import describe_error
from te_convert.match.blocks import Block
from te_convert.match.groups import Found, Group
from te_convert.match.readers import Readers
from te_convert.reasons import Reason

CLAIMED, REFUSED, PASSED, NOT_ASKED = "claimed", "refused", "not its case", "not asked"


@dataclass(frozen=True)
class Attempt:
    """What one rule said.

    Attributes:
        rule: its id.
        about: the modules that it looked at.
        result: "claimed", "refused", "not its case" or "not asked".
        reasons: refusals and advices about them.
        miss: what its case lacked, in words.
    """

    rule: str
    about: tuple[str, ...]
    result: str
    reasons: tuple[Reason, ...] = ()
    miss: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "rule": self.rule,
            "about": list(self.about),
            "result": self.result,
            "reasons": [reason._asdict() for reason in self.reasons],
            "miss": self.miss,
        }


@dataclass
class Trace:
    """Collects what is said about the module ``fqn`` and the modules around it.

    Attributes:
        attempts: in the order in which they were made.
    """

    fqn: str
    attempts: list[Attempt] = field(default_factory=list)

    def block(self, rule: Any, block: Block, found: Found) -> None:
        """A block rule was asked about a module; those around the traced one count only where the rule looked closer."""
        name = block.site.fqn
        around = name != self.fqn and (not name or self.fqn.startswith(f"{name}."))
        if name != self.fqn and not around:
            return
        looked = said(lambda: str(rule.looks_like(block))) == "True"
        if not looked and (around or next(block.site.module.children(), None) is None):
            return
        miss = said(lambda: rule.miss(block)).rstrip(": ") if looked else looks_for(rule)
        self._add(rule.id, (name,), found, miss)

    def readers(self, norm: str, readers: Readers, obstacle: Reason | None) -> None:
        """The readers of a norm were looked up; ``obstacle`` keeps them apart."""
        if self.fqn not in (norm, *readers.linears):
            return
        about = (norm, *readers.linears)
        if not readers.linears:
            found = ", ".join(readers.others[:3]) or "nothing"
            self.attempts.append(Attempt("norm-linear", about, PASSED, miss=f"no Linear reads the norm; read by {found}"))
        elif obstacle is not None:
            self.attempts.append(Attempt("norm-linear", about, REFUSED, (obstacle,)))

    def group(self, rule: Any, group: Group, found: Found) -> None:
        """A fusion rule was asked about Linears that read one tensor."""
        names = (*(() if group.norm is None else (group.norm.fqn,)), *(linear.fqn for linear in group.linears))
        if self.fqn in names:
            self._add(rule.id, names, found, said(lambda: rule.miss(group)))

    def _add(self, rule: str, about: tuple[str, ...], found: Found, miss: str) -> None:
        reasons = tuple(reason for fqn in found.advices for reason in found.advices[fqn])
        mine = any(self.fqn in (member.fqn for member in fusion.members) for fusion in found.fusions)
        result = CLAIMED if mine else REFUSED if reasons and not found.fusions else PASSED
        others = ", ".join(fusion.fqn for fusion in found.fusions)
        if result == PASSED and others:
            miss = f"it took others of them: {others}"
        self.attempts.append(Attempt(rule, about, result, reasons, miss if result == PASSED else ""))


def looks_for(rule: Any) -> str:
    """What a rule wants to see before it looks closer."""
    lines: Sequence[str] = (inspect.getdoc(rule.looks_like) or "").splitlines()
    return f"it looks for: {lines[0].rstrip('.')}" if lines else ""


def said(ask: Callable[[], str]) -> str:
    """The answer, or how the question failed."""
    try:
        return ask()
    except Exception as error:  # an explanation must not fail where the plan did not
        return describe_error(error)
