"""User include and exclude patterns over fully qualified names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from te_convert.match.candidate import Candidate
from te_convert.plan.model import Decision
from te_convert.reasons import Reason, ReasonCode, reason


def _matches(names: tuple[str, ...], pattern: str) -> bool:
    """A glob over the name of the module or of one that contains it: ``encoder.layer.[01]`` takes two whole subtrees."""
    return any(fnmatchcase(part, pattern) for name in names for part in _with_parents(name))


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def excluded(site: Candidate, include: tuple[str, ...], exclude: tuple[str, ...]) -> Reason | None:
    """Why the caller does not want this site, or None."""
    names = (site.fqn, *site.aliases)
    for pattern in exclude:
        if _matches(names, pattern):
            return reason(ReasonCode.USER_EXCLUDED, f"matches exclude {pattern!r}")
    if include and not any(_matches(names, pattern) for pattern in include):
        return reason(ReasonCode.USER_NOT_INCLUDED, f"matches none of {', '.join(map(repr, include))}")
    return None


def unused_patterns(decisions: Sequence[Decision], include: tuple[str, ...], exclude: tuple[str, ...]) -> tuple[str, ...]:
    """One sentence per pattern that names no site: most likely a misspelling."""
    sites = [(decision.fqn, *decision.aliases) for decision in decisions]
    named = [*(("include", pattern) for pattern in include), *(("exclude", pattern) for pattern in exclude)]
    return tuple(f"{what} {pattern!r} matches no site" for what, pattern in named if not any(_matches(s, pattern) for s in sites))
