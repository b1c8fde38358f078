"""User include and exclude patterns over fully qualified names."""

from __future__ import annotations

from fnmatch import fnmatchcase

from te_convert.match.candidate import Candidate
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
