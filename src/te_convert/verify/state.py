"""What a verification knows while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from te_convert.rewrite.apply import Applied
from te_convert.verify.isolate import SiteRecorder
from te_convert.verify.model import Interaction, RevertedSite, SiteParity
from te_convert.verify.reference import Reference


@dataclass
class State:
    """A verification under way: the rewrite, what the original computed, and what was found so far."""

    applied: Applied
    reference: Reference
    recorder: SiteRecorder
    sites: dict[str, SiteParity] = field(default_factory=dict)
    reverted: list[RevertedSite] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    row_ratios: list[float] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    interactions: list[Interaction] = field(default_factory=list)


def put_back(state: State, fqn: str, why: str) -> None:
    """Undo one site and remember why."""
    state.applied.undo(fqn)
    parity = state.sites.get(fqn)
    state.reverted.append(RevertedSite(fqn, why, parity.figures if parity is not None else None))
