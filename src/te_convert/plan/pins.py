"""User include and exclude patterns over fully qualified names."""

from __future__ import annotations

from fnmatch import fnmatchcase

from te_convert.match.candidate import Candidate
from te_convert.reasons import Reason, ReasonCode, reason


def _matches(names: tuple[str, ...], pattern: str) -> bool:
    """A glob over the whole name; a plain prefix of a name ("encoder.layer.0") takes its whole subtree."""
    return any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for name in names)


def excluded(site: Candidate, include: tuple[str, ...], exclude: tuple[str, ...]) -> Reason | None:
    """Why the caller does not want this site, or None."""
    names = (site.fqn, *site.aliases)
    for pattern in exclude:
        if _matches(names, pattern):
            return reason(ReasonCode.USER_EXCLUDED, f"matches exclude {pattern!r}")
    if include and not any(_matches(names, pattern) for pattern in include):
        return reason(ReasonCode.USER_NOT_INCLUDED, f"matches none of {', '.join(map(repr, include))}")
    return None
