"""Each converted site against its original module, on the inputs that the converted model really gives it, in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from te_convert.rewrite.apply import restore_parameters
from te_convert.rewrite.site import get_record
from te_convert.verify.compare import MISMATCH, compare, error_ratio
from te_convert.verify.model import Figures, SiteParity
from te_convert.verify.precision import Widen
from te_convert.verify.tolerance import judge_float32, judge_float64, judge_ratio

_LOW = (torch.bfloat16, torch.float16)


@contextmanager
def original_of(site: nn.Module) -> Iterator[nn.Module]:
    """The site's original module with the current weights, for the time being; a transposed weight is a copy."""
    original = restore_parameters(site)
    delegate = original.__dict__.pop("forward", None)
    try:
        yield original
    finally:
        if delegate is not None:
            original.__dict__["forward"] = delegate
        for name in original._parameters:
            original._parameters[name] = None


def run_original(site: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The original module's own forward on ``x``, without hooks."""
    with original_of(site) as original:
        result: torch.Tensor = type(original).forward(original, x)
    return result


@dataclass
class SiteRecorder:
    """Counts the calls of converted sites and compares each with its original.

    Attributes:
        compare: False only counts.
        calls: per site, how often the converted forward ran.
        figures: per site, the worst comparison so far in float32 (or in the run's own precision on TE).
        ratios: per site, the worst (error ratio, elements) in low precision.
    """

    compare: bool = True
    calls: dict[str, int] = field(default_factory=dict)
    figures: dict[str, Figures] = field(default_factory=dict)
    ratios: dict[str, tuple[float, int]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    inside: bool = False

    def observe(self, fqn: str, site: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the converted forward and compare it; errors of the original's side are kept, never raised."""
        (x,) = (*args, *kwargs.values())
        before = x.detach().clone() if self.compare else x
        y = forward(*args, **kwargs)
        if self.inside:
            return y
        self.calls[fqn] = self.calls.get(fqn, 0) + 1
        if self.compare:
            self.inside = True
            try:
                self._compare(fqn, site, forward, before, y)
            except Exception as error:
                self.errors[fqn] = f"{type(error).__name__}: {error}"
                self.figures[fqn] = MISMATCH
            finally:
                self.inside = False
        return y

    def _compare(self, fqn: str, site: nn.Module, forward: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        low = x.dtype in _LOW
        reference = get_record(site).backend == "reference"
        own = run_original(site, x.clone())
        self.dtypes[fqn] = str(x.dtype).removeprefix("torch.")
        if not low:
            self._keep(fqn, _without_rounding(compare(own, y), site, forward, x))
            return
        with Widen(torch.float32):
            exact = run_original(site, x.clone())
            wide = forward(x.clone()) if reference else None
        self._keep(fqn, compare(own, y) if wide is None else compare(exact, wide))
        ratio = error_ratio([("", exact)], [("", own)], [("", y)], x.dtype)
        if ratio[0] >= self.ratios.get(fqn, (-1.0, 0))[0]:
            self.ratios[fqn] = ratio

    def _keep(self, fqn: str, figures: Figures) -> None:
        worst = self.figures.get(fqn)
        if worst is None or figures.sqnr_db < worst.sqnr_db:
            self.figures[fqn] = figures

    def verdict(self, fqn: str, site: nn.Module, random_input: bool = False) -> SiteParity:
        """The site's comparison with its verdict."""
        figures, dtype = self.figures[fqn], self.dtypes.get(fqn, "unknown")
        ratio = self.ratios.get(fqn)
        exact = judge_float32(figures)
        passed, bound = exact.passed, exact.bound
        if ratio is not None:
            judged = judge_ratio(*ratio)
            on_te = get_record(site).backend == "te"
            passed = judged.passed and (on_te or exact.passed)
            bound = judged.bound if on_te else f"{exact.bound}; {judged.bound}"
        return SiteParity(fqn, dtype, figures, self.calls.get(fqn, 0), bound, passed, ratio[0] if ratio else None, random_input)


def _without_rounding(figures: Figures, site: nn.Module, forward: Any, x: torch.Tensor) -> Figures:
    """The figures, or those of the same comparison in float64 when that shows that a missed float32 bound was rounding."""
    if judge_float32(figures).passed or get_record(site).backend != "reference":
        return figures
    with Widen(torch.float64):
        wide = compare(run_original(site, x.clone()), forward(x.clone()))
    return wide if judge_float64(wide).passed else figures


@contextmanager
def observed(sites: dict[str, nn.Module], recorder: SiteRecorder) -> Iterator[None]:
    """Route the forward of every site through the recorder for the time being (instance attribute, no hooks)."""
    try:
        for fqn, site in sites.items():
            site.__dict__["forward"] = _Observer(fqn, site, recorder)
        yield
    finally:
        for site in sites.values():
            site.__dict__.pop("forward", None)


class _Observer:
    def __init__(self, fqn: str, site: nn.Module, recorder: SiteRecorder) -> None:
        self.fqn, self.site, self.recorder = fqn, site, recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.site).forward.__get__(self.site)
        return self.recorder.observe(self.fqn, self.site, forward, args, kwargs)


@contextmanager
def as_original(sites: list[nn.Module]) -> Iterator[None]:
    """Let these sites run their original forward for the time being, to find which site makes a difference."""
    try:
        for site in sites:
            site.__dict__["forward"] = _OriginalForward(site)
        yield
    finally:
        for site in sites:
            site.__dict__.pop("forward", None)


class _OriginalForward:
    def __init__(self, site: nn.Module) -> None:
        self.site = site

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        (x,) = (*args, *kwargs.values())
        return run_original(self.site, x)


def random_site_parity(fqn: str, site: nn.Module, shape: tuple[int, ...] | None) -> SiteParity:
    """Compare one site alone on seeded random input: [shape], or [4, width] when no call was recorded."""
    parameter = next(iter(site.parameters()))
    width = int(getattr(site, "in_features", 0)) or int(parameter.shape[-1])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape or (4, width), generator=generator).to(parameter.device, parameter.dtype)
    recorder = SiteRecorder()
    with torch.no_grad():
        recorder.observe(fqn, site, type(site).forward.__get__(site), (x,), {})
    return recorder.verdict(fqn, site, random_input=True)
