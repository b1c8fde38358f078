"""Check results made by hand: one that passes, and the ways in which it can fail."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from te_convert.check.model import CheckResult
from te_convert.verify.gate import POOLED
from te_convert.verify.model import Figures, Parity, RevertedSite, ScenarioParity, SiteParity

EQUAL = Figures(math.inf, 0.0, True, 64)
BOUND = "SQNR >= 90 dB and max rel <= 2e-05"
VERSIONS = {"te_convert": "0.1.0", "torch": "2.14.1", "transformers": None, "transformer_engine": None}


def figures(sqnr_db: float, max_rel: float = 1e-7) -> Figures:
    return Figures(sqnr_db, max_rel, False, 64)


def scenario(name: str = "inputs", found: Figures = EQUAL, **changes: Any) -> ScenarioParity:
    return replace(ScenarioParity(name, "float32", True, found, None, BOUND, passed=True), **changes)


def one_draw(found: Figures, ratio: float) -> ScenarioParity:
    return scenario("inputs", found, dtype="bfloat16", error_ratio=ratio, bound=POOLED)


def site(fqn: str = "fc", found: Figures = EQUAL, **changes: Any) -> SiteParity:
    return replace(SiteParity(fqn, "float32", found, 2, BOUND, passed=True), **changes)


def result(
    scenarios: tuple[ScenarioParity, ...] = (), sites: tuple[SiteParity, ...] = (), status: str = "passed", **changes: Any
) -> CheckResult:
    """A check of the model Net in which everything that has figures is converted."""
    parity = Parity(status, "reference", scenarios=scenarios, sites=sites, executed={s.fqn: 1 for s in sites})
    found = CheckResult("net.py", "model", "net.py", "Net", "float32", tuple(s.fqn for s in sites), parity, dict(VERSIONS))
    return replace(found, **changes)


def passing() -> CheckResult:
    return result((scenario(found=figures(118.04, 4e-7)), scenario("inputs[train]")), (site(found=figures(131.0)), site("norm")))


def failing() -> CheckResult:
    """A site and a scenario below their bounds, and a site that was put back."""
    broken = site("fc", figures(41.26, 3e-3), passed=False)
    found = result((scenario(found=figures(39.94, 5e-3), passed=False),), (broken, site("norm")), "failed")
    reverted = (RevertedSite("head", "alone: raised ValueError", None),)
    return replace(found, parity=replace(found.parity, reverted=reverted), notes=("a note",))


def hostile() -> CheckResult:
    """Names that would break XML, workflow commands or Markdown if they were written as they are."""
    name = 'a]]>&<b>"\x1b[31m|::error file=x::,%0A\n`'
    return result((scenario(name, figures(10.0, 1.0), passed=False),), (site(name),), "failed", target=name)
