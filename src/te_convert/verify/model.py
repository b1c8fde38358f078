"""What a parity check found, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figures:
    """How far a converted result is from the original's.

    Attributes:
        sqnr_db: 10·log10(Σ original² / Σ (original − converted)²); infinite when bit-equal.
        max_rel: max |original − converted| / max |original|.
        bit_equal: every element equal, bit for bit.
        numel: number of elements compared.
    """

    sqnr_db: float
    max_rel: float
    bit_equal: bool
    numel: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what is not finite becomes a string."""
        return {
            "sqnr_db": json_number(self.sqnr_db),
            "max_rel": json_number(self.max_rel),
            "bit_equal": self.bit_equal,
            "numel": self.numel,
        }


def json_number(value: float | None) -> float | str | None:
    """JSON has no inf and no NaN: they become the strings "inf", "-inf" and "nan"."""
    return value if value is None or math.isfinite(value) else str(value)


@dataclass(frozen=True)
class ScenarioParity:
    """One run of the whole model compared with the original's.

    Attributes:
        name: scenario, for instance "inputs" or "inputs[batch doubled]".
        dtype: the dtype in which both ran ("float32", "bfloat16", "float64" when rounding was told from error).
        perturbed: True when every 1-D parameter was moved away from its value on both sides.
        figures: worst output; against the original in the same precision.
        error_ratio: low precision only: rms error of the converted model against the float32 original divided by the
            original's own; None otherwise.
        bound: the bound that was applied, in words and numbers.
        passed: whether it held.
    """

    name: str
    dtype: str
    perturbed: bool
    figures: Figures
    error_ratio: float | None
    bound: str
    passed: bool
    output: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "perturbed": self.perturbed,
            **self.figures.to_dict(),
            "error_ratio": json_number(self.error_ratio),
            "bound": self.bound,
            "passed": self.passed,
            "output": self.output,
        }


@dataclass(frozen=True)
class SiteParity:
    """One converted site compared with its original module on the same input (worst of its calls)."""

    fqn: str
    dtype: str
    figures: Figures
    calls: int
    bound: str
    passed: bool
    error_ratio: float | None = None
    random_input: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "fqn": self.fqn,
            "dtype": self.dtype,
            **self.figures.to_dict(),
            "error_ratio": json_number(self.error_ratio),
            "calls": self.calls,
            "bound": self.bound,
            "passed": self.passed,
            "random_input": self.random_input,
        }


@dataclass(frozen=True)
class RevertedSite:
    """A site that was put back because parity failed, with the figures that condemned it."""

    fqn: str
    why: str
    figures: Figures | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"fqn": self.fqn, "why": self.why, "figures": None if self.figures is None else self.figures.to_dict()}


@dataclass(frozen=True)
class Interaction:
    """Sites that are right alone and wrong together, as bisection found them.

    Attributes:
        fqns: the sites; alone converted, with every other site as it was, they miss the bound.
        scenario: the run that they fail.
        figures: of that run with these sites alone converted.
        bound: the bound that they miss.
        runs: how many runs the search took.
        minimal: without any one of them the run passes; False when the search ran out of runs before that was shown.
    """

    fqns: tuple[str, ...]
    scenario: str
    figures: Figures
    bound: str
    runs: int
    minimal: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "fqns": list(self.fqns),
            "scenario": self.scenario,
            **self.figures.to_dict(),
            "bound": self.bound,
            "runs": self.runs,
            "minimal": self.minimal,
        }


@dataclass(frozen=True)
class Parity:
    """The verdict of a verification.

    Attributes:
        status: "passed", "failed", "not-verified" (nothing could be run), "sites-only" (each site alone, not the model) or "slice"
            (a shallow model with the weights of some layers).
        backend: what the converted side ran on: "reference" (twins on this machine) or "te".
        device: device type of the run.
        scenarios: whole-model comparisons.
        sites: per-site comparisons.
        reverted: sites put back during verification.
        executed: per converted site, how often its replacement ran during verification.
        fallbacks: per fusion, how often a member ran its original forward instead in those runs.
        notes: what limits the verdict, one sentence each (not reproducible, output ignores its input, ...).
        interactions: with bisection, the sets of sites that made the model as a whole fail.
    """

    status: str
    backend: str
    device: str = "cpu"
    scenarios: tuple[ScenarioParity, ...] = ()
    sites: tuple[SiteParity, ...] = ()
    reverted: tuple[RevertedSite, ...] = ()
    executed: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    interactions: tuple[Interaction, ...] = ()

    @property
    def passed(self) -> bool:
        """True when everything that was compared held its bound and the whole model was compared."""
        return self.status == "passed"

    def __bool__(self) -> bool:
        return self.passed

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "status": self.status,
            "backend": self.backend,
            "device": self.device,
            "scenarios": [scenario.to_dict() for scenario in self.scenarios],
            "sites": [site.to_dict() for site in self.sites],
            "reverted": [site.to_dict() for site in self.reverted],
            "executed": dict(self.executed),
            "fallbacks": dict(self.fallbacks),
            "notes": list(self.notes),
            **({"interactions": [found.to_dict() for found in self.interactions]} if self.interactions else {}),
        }
