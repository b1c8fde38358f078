"""Which precision the converted modules of a model run in: the plan's word, told to each of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from te_convert.plan.model import MEMBER_ATTRIBUTE, SITE_ATTRIBUTE, Plan
from te_convert.rewrite.apply import Applied
from te_convert.rewrite.fused import fused_record


@contextmanager
def in_high_precision(applied: Applied, fqns: Collection[str]) -> Iterator[None]:
    """These sites stay out of every recipe for the time being."""
    records: list[Any] = [applied.sites[fqn].__dict__[SITE_ATTRIBUTE] for fqn in fqns]
    before = [record.decision for record in records]
    try:
        for record in records:
            record.decision = replace(record.decision, precision="high")
        yield
    finally:
        for record, decision in zip(records, before, strict=True):
            record.decision = decision


def tell_precision(applied: Applied, plan: Plan) -> None:
    """Give every converted module, and every member of a fusion, the precision and the reasons that a later plan has for it."""
    fusions = {fusion.fqn: fusion.precision for fusion in plan.fusions}
    decisions = {decision.fqn: decision for decision in plan.converting}
    for fqn, site in applied.sites.items():
        record: Any = site.__dict__[SITE_ATTRIBUTE]
        if fused_record(site) is not None:
            record.decision = replace(record.decision, precision=fusions.get(fqn, record.decision.precision))
        elif fqn in decisions:
            told = decisions[fqn]
            record.decision = replace(record.decision, precision=told.precision, reasons=told.reasons)
    for fqn, module in _members(applied):
        held = module.__dict__.get(MEMBER_ATTRIBUTE)
        if held is not None and fqn in decisions:
            module.__dict__[MEMBER_ATTRIBUTE] = replace(held, precision=decisions[fqn].precision, reasons=decisions[fqn].reasons)


def _members(applied: Applied) -> Iterator[tuple[str, nn.Module]]:
    """Members of fusions and the parts of those that became one TE module, by their names in the plan."""
    for site in applied.sites.values():
        record = fused_record(site)
        for (role, module), member in zip(record.members, record.decision.members, strict=True) if record is not None else ():
            yield member.fqn, module
            for name, part in module.named_modules() if role in ("owner", "block") else ():
                if name:
                    yield f"{member.fqn}.{name}" if member.fqn else name, part
