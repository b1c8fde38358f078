"""The report of a conversion: a plan, what verification found, and what was not verified."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from te_convert.plan.model import CallShape, Decision, Outcome, Plan
from te_convert.reasons import Reason
from te_convert.verify.model import Parity, SiteParity
from te_convert.verify.recipe_figures import RecipeFigures

REPORT_SCHEMA = 1


@dataclass(frozen=True)
class Site:
    """One site as the report shows it.

    Attributes:
        executed: how often the replacement ran in verification; None when the site was not converted or nothing ran.
        fallbacks: how often the original's forward ran instead of a fusion that the site is part of.
        fused_into: where the TE module is that the site is part of, or None.
        parity: the site's own comparison, if there was one.
    """

    fqn: str
    kind: str
    class_name: str
    outcome: Outcome
    replacement: str | None
    reasons: tuple[Reason, ...]
    aliases: tuple[str, ...]
    calls: int
    shapes: tuple[CallShape, ...]
    params: int
    flops: int
    precision: str
    executed: int | None
    parity: SiteParity | None
    fallbacks: int = 0
    fused_into: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "fqn": self.fqn,
            "kind": self.kind,
            "class_name": self.class_name,
            "outcome": self.outcome.value,
            "replacement": self.replacement,
            "reasons": [reason._asdict() for reason in self.reasons],
            "aliases": list(self.aliases),
            "calls": self.calls,
            "shapes": [{"input": list(s.input), "output": list(s.output), "dtype": s.dtype} for s in self.shapes],
            "params": self.params,
            "flops": self.flops,
            "precision": self.precision,
            "executed": self.executed,
            "fallbacks": self.fallbacks,
            "fused_into": self.fused_into,
            "parity": None if self.parity is None else self.parity.to_dict(),
        }


@dataclass(frozen=True)
class Coverage:
    """Converted share by sites, parameters and FLOPs; a total of 0 means that nothing was counted."""

    sites: int
    sites_total: int
    params: int
    params_total: int
    flops: int
    flops_total: int

    def to_dict(self) -> dict[str, int]:
        """Plain JSON values."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class Report:
    """Everything a conversion can say about itself.

    Attributes:
        model_class: class name of the model.
        converted: True when at least one site was converted and kept.
        sites: one entry per site, in module order.
        parity: the verdict of verification.
        coverage: converted share; ``sites_total`` counts the sites that a rule looked at (not NO_MATCH).
        recipe: the recipe asked for, or None.
        backend: "reference" or "te".
        backend_reason: why that backend was chosen.
        environment: versions and devices.
        not_verified: what nobody should believe was checked, one sentence each.
        notes: what could not be observed.
        warnings: what the reader must know first.
        recipe_figures: what emulating the recipe found; None without a recipe or without a run.
        command: the command line that made the report; "" when Python code did.
        doctor: the checks of this machine as plain data (``name``, ``ok``, ``fact``, ``consequence``, ``fix``); empty when
            nobody asked.
        estimate: what conversion would gain, as plain data; None when nobody asked.
    """

    model_class: str
    converted: bool
    sites: tuple[Site, ...]
    parity: Parity
    coverage: Coverage
    recipe: str | None
    backend: str
    backend_reason: str
    scenarios: tuple[str, ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)
    not_verified: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    timings_s: dict[str, float] = field(default_factory=dict)
    recipe_figures: RecipeFigures | None = None
    command: str = ""
    doctor: tuple[dict[str, Any], ...] = ()
    estimate: dict[str, Any] | None = None

    def site(self, fqn: str) -> Site:
        """The entry of a site, by its name or one of its aliases.

        Raises:
            KeyError: no such site.
        """
        for site in self.sites:
            if fqn == site.fqn or fqn in site.aliases:
                return site
        raise KeyError(fqn)

    def count(self, outcome: Outcome) -> int:
        """Number of sites with this outcome."""
        return sum(site.outcome is outcome for site in self.sites)

    def reasons_by_code(self) -> dict[str, list[tuple[Site, Reason]]]:
        """Reasons grouped by code, most frequent first."""
        pairs = [(site, reason) for site in self.sites for reason in site.reasons]
        order = [code for code, _ in Counter(reason.code for _, reason in pairs).most_common()]
        return {code: [pair for pair in pairs if pair[1].code == code] for code in order}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values with ``"schema"``."""
        return {
            "schema": REPORT_SCHEMA,
            "model_class": self.model_class,
            "converted": self.converted,
            "recipe": self.recipe,
            "backend": self.backend,
            "backend_reason": self.backend_reason,
            "scenarios": list(self.scenarios),
            "outcomes": {outcome.value: self.count(outcome) for outcome in Outcome},
            "coverage": self.coverage.to_dict(),
            "warnings": list(self.warnings),
            "not_verified": list(self.not_verified),
            "notes": list(self.notes),
            "parity": self.parity.to_dict(),
            "recipe_figures": None if self.recipe_figures is None else self.recipe_figures.to_dict(),
            "environment": dict(self.environment),
            "timings_s": dict(self.timings_s),
            **({"command": self.command} if self.command else {}),
            **({"doctor": list(self.doctor)} if self.doctor else {}),
            **({"estimate": self.estimate} if self.estimate is not None else {}),
            "sites": [site.to_dict() for site in self.sites],
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as indented JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def to_markdown(self) -> str:
        """The report as a Markdown page."""
        from te_convert.report.markdown import render_markdown

        return render_markdown(self)

    def to_html(self) -> str:
        """The report as one self-contained HTML page."""
        from te_convert.report.html import render_html

        return render_html(self)

    def __str__(self) -> str:
        from te_convert.report.text import render_text

        return render_text(self)


def build_sites(plan: Plan, parity: Parity) -> tuple[Site, ...]:
    """One report entry per decision, joined with what verification found."""
    figures = {site.fqn: site for site in parity.sites}
    ran = parity.status != "not-verified"
    return tuple(
        Site(
            fqn=d.fqn,
            kind=d.kind,
            class_name=d.class_name,
            outcome=d.outcome,
            replacement=d.replacement,
            reasons=d.reasons,
            aliases=d.aliases,
            calls=d.calls,
            shapes=d.shapes,
            params=d.params,
            flops=d.flops,
            precision=d.precision,
            executed=parity.executed.get(_place(d), 0) if ran and d.converts else None,
            parity=figures.get(_place(d)),
            fallbacks=parity.fallbacks.get(_place(d), 0) if d.converts else 0,
            fused_into=d.fused_into,
        )
        for d in plan.decisions
    )


def _place(decision: Decision) -> str:
    """Name under which verification knows a site: that of the TE module that it became a part of, or its own."""
    return decision.fqn if decision.fused_into is None else decision.fused_into


def measure_coverage(plan: Plan) -> Coverage:
    """The converted share of a plan."""
    looked_at: Sequence[Any] = [d for d in plan.decisions if d.outcome is not Outcome.NO_MATCH]
    return Coverage(
        sites=len(plan.converting),
        sites_total=len(looked_at),
        params=sum(d.params for d in plan.converting),
        params_total=plan.params_total,
        flops=sum(d.flops for d in plan.converting),
        flops_total=plan.flops_total,
    )
