"""Stable reason codes: why a site was not converted (refusal) or what a conversion does not give (advice).

A code is ``subject.cause`` and never changes its meaning; ``docs/reasons.md`` is generated from this table.
"""

from __future__ import annotations

from typing import NamedTuple

from te_convert.reasons.codes import ReasonCode, ReasonInfo, Severity
from te_convert.reasons.groups import GROUPS
from te_convert.reasons.sites import SITES

__all__ = ["REASONS", "Reason", "ReasonCode", "ReasonInfo", "Severity", "reason"]

REASONS: dict[ReasonCode, ReasonInfo] = {**SITES, **GROUPS}

_ADVICE_CODES = frozenset(code.value for code, info in REASONS.items() if info.severity is Severity.ADVICE)


class Reason(NamedTuple):
    """One reason of one site; unpacks as ``(code, detail, hint)``.

    Attributes:
        code: stable slug, one of :class:`ReasonCode`.
        detail: what was seen at this site, with figures.
        hint: what the user can do.
    """

    code: str
    detail: str
    hint: str

    @property
    def is_advice(self) -> bool:
        """True when the reason did not stop the conversion; a code that this version does not know is a refusal."""
        return self.code in _ADVICE_CODES


def reason(code: ReasonCode, detail: str, hint: str | None = None) -> Reason:
    """Build a :class:`Reason`, taking the code's default hint when none is given."""
    return Reason(code.value, detail, REASONS[code].hint if hint is None else hint)
