"""Each converted site against its original module, on the inputs that the converted model really gives it, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from te_convert.capture.run import describe_error
from te_convert.facts.sharing import find_parents
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.replacements.specs import LinearSpec
from te_convert.rewrite.apply import Applied, Own, restore_parameters
from te_convert.rewrite.fused import FusedRecord, Inputs, fused_record
from te_convert.rewrite.site import Delegate, Site, get_record
from te_convert.verify.compare import MISMATCH, compare, error_ratio
from te_convert.verify.model import Figures, SiteParity
from te_convert.verify.perturb import perturbed
from te_convert.verify.precision import Widen
from te_convert.verify.tolerance import is_rounding, judge_approximate, judge_float32, judge_float64, judge_ratio

Run = Callable[[], torch.Tensor]
_LOW = (torch.bfloat16, torch.float16)


@contextmanager
def original_of(site: nn.Module, own: Own | None = None) -> Iterator[nn.Module]:
    """The site's original module for the time being, with its ``own`` weights.

    Without them it gets the converted module's current ones (a transposed weight is a copy), which hides a wrong weight.
    """
    original = restore_parameters(site, own)
    delegate = original.__dict__.pop("forward", None)
    try:
        yield original
    finally:
        if delegate is not None:
            original.__dict__["forward"] = delegate
        for name in original._parameters:
            original._parameters[name] = None


def run_original(site: nn.Module, x: torch.Tensor, own: Own | None = None) -> torch.Tensor:
    """The original module's own forward on ``x``, without hooks; of a fusion, its members' one after the other."""
    fused = fused_record(site)
    if fused is not None:
        return fused.run_original(((x,), {}), own)
    with original_of(site, own) as original:
        result: torch.Tensor = type(original).forward(original, x)
    return result


@dataclass
class SiteRecorder:
    """Counts the calls of converted sites and compares each with its original.

    Attributes:
        taken: per site, the original's own Parameters where they are known.
        compare: False only counts.
        calls: per site, how often the converted forward ran.
        figures: per site, the worst comparison so far in float32 (or in the run's own precision on TE).
        inexact: per site, the comparison in float64 that shows a difference which is not rounding.
        ratios: per site, the worst (error ratio, elements) in low precision.
        void: per site, a comparison of outputs that have no finite value.
    """

    taken: Mapping[str, Own] = field(default_factory=dict)
    compare: bool = True
    calls: dict[str, int] = field(default_factory=dict)
    figures: dict[str, Figures] = field(default_factory=dict)
    inexact: dict[str, Figures] = field(default_factory=dict)
    ratios: dict[str, tuple[float, int]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    void: dict[str, Figures] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    inside: bool = False

    def observe(self, fqn: str, site: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the converted forward and compare it; errors of the original's side are kept, never raised."""
        (x,) = (*args, *kwargs.values())
        before = x.detach().clone() if self.compare else x
        y = forward(*args, **kwargs)
        weights = self.taken.get(fqn)
        self.ran(fqn, site, y, lambda: run_original(site, before.clone(), weights), lambda: forward(before.clone()))
        return y

    def ran(self, fqn: str, site: nn.Module, y: torch.Tensor, original: Run, converted: Run) -> None:
        """Count a run of a converted forward and compare its output.

        Args:
            fqn: name of the site.
            site: the converted module.
            y: what its forward returned.
            original: runs the original on the same inputs.
            converted: runs the converted forward again on the same inputs.
        """
        if self.inside:
            return
        self.calls[fqn] = self.calls.get(fqn, 0) + 1
        if self.compare:
            self.inside = True
            try:
                self._compare(fqn, site, y, original, converted)
            except Exception as error:
                self.failed(fqn, error)
            finally:
                self.inside = False

    def failed(self, fqn: str, error: Exception) -> None:
        """A comparison that raised."""
        self.errors[fqn] = describe_error(error)
        self.figures[fqn] = MISMATCH

    def _compare(self, fqn: str, site: nn.Module, y: torch.Tensor, original: Run, converted: Run) -> None:
        reference = site.__dict__[SITE_ATTRIBUTE].backend == "reference"
        own = original()
        low = own.dtype in _LOW
        if own.dtype is not y.dtype:
            self._keep(fqn, MISMATCH)
            return
        self.dtypes[fqn] = str(y.dtype).removeprefix("torch.")
        if not own.is_nested and not bool(torch.isfinite(own).any()):  # nothing, or NaN everywhere: no evidence, unless they differ
            keep = self._keep if compare(own, y) is MISMATCH else self.void.setdefault
            keep(fqn, compare(own, y))
            return
        if not low:
            self._keep(fqn, self._look_closer(fqn, site, (original, converted), (own, y)))
            return
        with Widen(torch.float32):
            exact = original()
            wide = converted() if reference else None
        self._keep(fqn, compare(own, y) if wide is None else self._look_closer(fqn, site, (original, converted), (exact, wide)))
        ratio = error_ratio([("", exact)], [("", own)], [("", y)], y.dtype)
        if ratio[0] >= self.ratios.get(fqn, (-1.0, 0))[0]:
            self.ratios[fqn] = ratio

    def _look_closer(self, fqn: str, site: nn.Module, runs: tuple[Run, Run], results: tuple[torch.Tensor, torch.Tensor]) -> Figures:
        """Figures in float32, or in float64, where a rounding difference vanishes and a wrong constant stays.

        float64 decides for a site that missed its float32 bound, and for every norm: at a variance of 1 an eps that is wrong by
        10⁻⁵ moves the result by less than that bound.

        Args:
            fqn: name of the site.
            site: the converted module.
            runs: run the original and the converted forward again.
            results: of the original and of the converted forward in float32 (on TE, in the run's own precision).
        """
        own, y = results
        figures = compare(own, y)
        missed = not judge_float32(figures).passed
        record = site.__dict__[SITE_ATTRIBUTE]
        if approximation_of(site):
            return figures
        is_norm = not isinstance(record.decision.spec, LinearSpec)
        if record.backend != "reference" or figures.bit_equal or not (missed or is_norm):
            return figures
        try:
            with Widen(torch.float64):
                exact, converted = runs[0](), runs[1]()
        except Exception:  # an operation without float64: the float32 verdict stands
            return figures
        wide = compare(exact, converted)
        if not judge_float64(wide).passed:
            self.inexact.setdefault(fqn, wide)
        elif missed and is_rounding(wide, error_ratio([("", exact)], [("", own)], [("", y)], torch.float32)[0]):
            return wide
        return figures

    def _keep(self, fqn: str, figures: Figures) -> None:
        worst = self.figures.get(fqn)
        if worst is None or figures.sqnr_db < worst.sqnr_db:
            self.figures[fqn] = figures

    def verdict(self, fqn: str, site: nn.Module, random_input: bool = False) -> SiteParity:
        """The site's comparison with its verdict."""
        figures = self.inexact.get(fqn) or self.figures.get(fqn) or self.void[fqn]
        dtype = self.dtypes.get(fqn, "unknown")
        ratio = self.ratios.get(fqn)
        approximation = approximation_of(site)
        exact = judge_float64(figures) if fqn in self.inexact else judge_float32(figures)
        exact = judge_approximate(figures, approximation) if approximation else exact
        passed, bound = exact.passed, exact.bound
        if ratio is not None:
            judged = judge_ratio(*ratio)
            on_te = site.__dict__[SITE_ATTRIBUTE].backend == "te"
            passed = judged.passed and (on_te or exact.passed)
            bound = judged.bound if on_te else f"{exact.bound}; {judged.bound}"
        return SiteParity(fqn, dtype, figures, self.calls.get(fqn, 0), bound, passed, ratio[0] if ratio else None, random_input)


@contextmanager
def observed(sites: dict[str, nn.Module], recorder: SiteRecorder) -> Iterator[None]:
    """Route the forward of every site through the recorder for the time being (instance attribute, no hooks)."""
    try:
        for fqn, site in sites.items():
            fused = fused_record(site)
            if fused is None:
                site.__dict__["forward"] = _Observer(fqn, site, recorder)
            else:
                fused.observer = _FusionObserver(fqn, recorder)
        yield
    finally:
        for site in sites.values():
            site.__dict__.pop("forward", None)
            fused = fused_record(site)
            if fused is not None:
                fused.observer = None


class _FusionObserver:
    def __init__(self, fqn: str, recorder: SiteRecorder) -> None:
        self.fqn, self.recorder = fqn, recorder

    def __call__(self, record: FusedRecord, inputs: Inputs, y: torch.Tensor) -> None:
        copies: dict[int, torch.Tensor] = {}  # one tensor given twice stays one tensor
        own, held = self.recorder.taken.get(self.fqn), tree_map(lambda value: _detached(value, copies), inputs)
        self.recorder.ran(self.fqn, record.module, y, lambda: record.run_original(held, own), lambda: record.run_again(held))


def _detached(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in copies:
        copies[id(value)] = value.detach().clone()
    return copies[id(value)]


class _Observer:
    def __init__(self, fqn: str, site: nn.Module, recorder: SiteRecorder) -> None:
        self.fqn, self.site, self.recorder = fqn, site, recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.site).forward.__get__(self.site)
        return self.recorder.observe(self.fqn, self.site, forward, args, kwargs)


@contextmanager
def as_original(applied: Applied, fqns: Collection[str]) -> Iterator[nn.Module]:
    """The model with the original modules of these sites in place for the time being, hooks and all; yields its root."""
    parents, root = find_parents(applied.model), applied.model
    with ExitStack() as stack:
        for fqn in fqns:
            site = applied.sites[fqn]
            fused = fused_record(site)
            if fused is not None:
                stack.enter_context(fused.off(applied.taken.get(fqn)))
                continue
            if not isinstance(get_record(site).original.__dict__.get("forward"), Delegate):
                continue  # an enclosing use has put it in place
            original = stack.enter_context(original_of(site, applied.taken.get(fqn)))
            for parent, name in parents[id(site)]:
                stack.callback(parent._modules.__setitem__, name, site)
                parent._modules[name] = original
            root = original if root is site else root
        yield root


def approximation_of(site: nn.Module) -> str:
    """What the caller allowed a site to compute approximately, or ""."""
    found: str = getattr(site.__dict__[SITE_ATTRIBUTE].decision, "approximation", "")
    return found


def takes_one_tensor(site: nn.Module) -> bool:
    """Whether a site can be compared on random input: it takes one tensor of a known width, or makes inputs itself."""
    fused = fused_record(site)
    if fused is not None and fused.sample_inputs() is not None:
        return True
    return isinstance(site, Site) and any(True for _ in site.parameters(recurse=False))


def random_site_parity(fqn: str, site: nn.Module, own: Own | None = None) -> SiteParity:
    """Compare one site alone on seeded random input [4, width], with its 1-D parameters perturbed."""
    fused = fused_record(site)
    inputs = None if fused is None else fused.sample_inputs()
    if fused is not None and inputs is not None:
        return _sampled_parity(fqn, fused, inputs)
    parameter = next(iter(site.parameters()))
    width = int(getattr(site, "in_features", 0)) or int(parameter.shape[-1])
    forward = getattr(site, "te_forward", None) if fused_record(site) is not None else None
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(parameter.device, parameter.dtype)
    recorder = SiteRecorder({} if own is None else {fqn: own})
    with torch.no_grad(), perturbed(site):
        try:
            recorder.observe(fqn, site, forward or type(site).forward.__get__(site), (x,), {})
        except Exception as error:
            recorder.failed(fqn, error)
    return recorder.verdict(fqn, site, random_input=True)


def _sampled_parity(fqn: str, fused: FusedRecord, inputs: Inputs) -> SiteParity:
    recorder = SiteRecorder()
    with torch.no_grad():
        try:
            y = fused.run_again(inputs)
            recorder.ran(fqn, fused.module, y, lambda: fused.run_original(inputs), lambda: fused.run_again(inputs))
        except Exception as error:
            recorder.failed(fqn, error)
    return recorder.verdict(fqn, fused.module, random_input=True)
