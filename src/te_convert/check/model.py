"""What a check found: the parity of one model, its failures on a line each, and the exit code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from te_convert.report.format import clean, format_db, format_error, format_figures, format_name, format_ratio, plural
from te_convert.report.summary import parity_words
from te_convert.rewrite.fallback import SiteFallback, fallback_words
from te_convert.verify.model import Figures, Parity, ScenarioParity, SiteParity

CHECK_SCHEMA = 1
EXIT_HOLDS, EXIT_NOTHING, EXIT_FAILED = 0, 1, 3
NOTHING_CONVERTED = "nothing was converted: 0 sites would run on Transformer Engine"


@dataclass(frozen=True)
class Failure:
    """One figure that missed its bound, or one thing that is not there.

    Attributes:
        kind: "scenario", "site", "golden" or "model".
        name: of the scenario or site.
        figure: what was measured.
        bound: what was asked for.
    """

    kind: str
    name: str
    figure: str
    bound: str

    @property
    def message(self) -> str:
        """Figure and bound."""
        return f"{self.figure}; bound: {self.bound}"

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.message}"

    def to_dict(self) -> dict[str, str]:
        """Plain JSON values."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class GoldenVerdict:
    """Figures compared with recorded ones, or just recorded.

    Attributes:
        path: the golden file, as it was named.
        updated: the figures were written; nothing was compared.
        compared: how many recorded entries were looked at.
        failures: what got worse or is missing.
        better: what got better or is new, one sentence each.
        notes: what else is not as it was, one sentence each.
        changes: what runs now that did not when the figures were recorded: name → (then, now).
    """

    path: str
    updated: bool = False
    compared: int = 0
    failures: tuple[Failure, ...] = ()
    better: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    changes: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)

    @property
    def changed(self) -> str:
        """``torch 2.13.0 → 2.14.1, transformers none → 5.0``; empty when nothing changed."""
        return ", ".join(f"{name} {clean(then or 'none')} → {clean(now or 'none')}" for name, (then, now) in self.changes.items())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "path": self.path,
            "updated": self.updated,
            "compared": self.compared,
            "failures": [failure.to_dict() for failure in self.failures],
            "better": list(self.better),
            "notes": list(self.notes),
            "changes": {name: {"recorded": then, "now": now} for name, (then, now) in self.changes.items()},
        }


@dataclass(frozen=True)
class CheckResult:
    """The parity of one model, and what a CI job wants to know besides.

    Attributes:
        target: what was checked, as it was named.
        kind: "directory" (written by te_convert), "model" (converted in memory) or "pair" (given by the caller).
        file: the file to which annotations point, or "".
        model_class: class name of the model.
        dtype: the model's own.
        converted: names of the original modules that run on a replacement.
        parity: what verification found.
        versions: of this package and of what it ran on.
        notes: what limits the verdict, one sentence each.
        fallbacks: what did not run as planned while it was checked, as :func:`te_convert.fallbacks` has it.
        golden: the comparison with recorded figures, if one was asked for.
        seconds: how long the check took.
    """

    target: str
    kind: str
    file: str
    model_class: str
    dtype: str
    converted: tuple[str, ...]
    parity: Parity
    versions: dict[str, str | None]
    notes: tuple[str, ...] = ()
    fallbacks: tuple[SiteFallback, ...] = ()
    golden: GoldenVerdict | None = None
    seconds: float = 0.0

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Everything that is not as it should be; empty when parity holds (or nothing was converted)."""
        return (*self.parity_failures, *(self.golden.failures if self.golden is not None else ()))

    @property
    def remarks(self) -> tuple[str, ...]:
        """All notes, those of the golden verdict and of the fallbacks included."""
        return (*self.notes, *fallback_words(self.fallbacks), *(self.golden.notes if self.golden is not None else ()))

    @property
    def parity_failures(self) -> tuple[Failure, ...]:
        """The failures that need no recorded figures."""
        found = tuple(_parity_failures(self.parity))
        if found or not self.converted:
            return found
        if self.parity.status in ("passed", "sites-only", "slice"):
            return ()
        why = "; ".join(map(clean, self.notes)) or "no scenario ran"
        return (Failure("model", clean(self.model_class), f"parity {self.parity.status}", why),)

    @property
    def exit_code(self) -> int:
        """0 parity holds, 1 nothing was converted, 3 something failed."""
        if self.failures:
            return EXIT_FAILED
        return EXIT_HOLDS if self.converted else EXIT_NOTHING

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        if self.exit_code == EXIT_NOTHING:
            return f"{NOTHING_CONVERTED} · {clean(self.target)} has nothing to compare"
        parity = self.parity
        compared = f"{plural(len(parity.scenarios), 'run')} and {plural(len(parity.sites), 'site')} compared"
        parts = [parity_words(parity), compared]
        if self.parity_failures and parity.status != "failed":
            parts.append(f"{plural(len(self.parity_failures), 'failure')}")
        if self.golden is not None:
            parts.append(_golden_words(self.golden))
        return " · ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values with ``"schema"``."""
        return {
            "schema": CHECK_SCHEMA,
            "target": self.target,
            "kind": self.kind,
            "passed": self.exit_code == EXIT_HOLDS,
            "exit_code": self.exit_code,
            "model_class": self.model_class,
            "dtype": self.dtype,
            "backend": self.parity.backend,
            "device": self.parity.device,
            "versions": dict(self.versions),
            "converted": list(self.converted),
            "failures": [failure.to_dict() for failure in self.failures],
            "notes": list(self.notes),
            "fallbacks": [dict(each.__dict__) for each in self.fallbacks],
            "golden": None if self.golden is None else self.golden.to_dict(),
            "parity": self.parity.to_dict(),
            "seconds": round(self.seconds, 3),
        }


def scenario_label(scenario: ScenarioParity) -> str:
    """``inputs (perturbed, bfloat16)``: the dtype where a low-precision run stands beside its float32 mapping."""
    marks = ["perturbed"] if scenario.perturbed else []
    marks += [scenario.dtype] if scenario.error_ratio is not None else []
    return clean(f"{scenario.name} ({', '.join(marks)})" if marks else scenario.name)


def figure_words(figures: Figures, error_ratio: float | None) -> str:
    """``SQNR 41.2 dB, max rel 3.0e-03, error ratio 1.900``."""
    if error_ratio is None:
        return format_figures(figures)
    equal = "bit-equal" if figures.bit_equal else f"SQNR {format_db(figures)} dB, max rel {format_error(figures.max_rel)}"
    return f"{equal}, error ratio {format_ratio(error_ratio)}"


def _parity_failures(parity: Parity) -> Iterable[Failure]:
    for site in parity.sites:
        if not site.passed:
            yield Failure("site", format_name(site.fqn), _site_words(site), clean(site.bound))
    for reverted in parity.reverted:
        figure = f"put back, {format_figures(reverted.figures)}"
        yield Failure("site", format_name(reverted.fqn), figure, clean(reverted.why))
    for run in parity.scenarios:
        if not run.passed:
            yield Failure("scenario", scenario_label(run), figure_words(run.figures, run.error_ratio), clean(run.bound))


def _site_words(site: SiteParity) -> str:
    return figure_words(site.figures, site.error_ratio) + (" on random input" if site.random_input else "")


def _golden_words(golden: GoldenVerdict) -> str:
    if golden.updated:
        return f"figures recorded in {clean(golden.path)}"
    if golden.failures:
        return f"{plural(len(golden.failures), 'figure')} WORSE than in {clean(golden.path)}"
    return f"as good as in {clean(golden.path)}"
