"""bench(): build the variants, measure them in turns, compare their outputs, and put it all into one table."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.bench.compare import compare_with, read_recorded, refuse_other_setting
from te_convert.bench.measure import calls_per_sample, extra_bytes, held_bytes, time_ms
from te_convert.bench.model import ORIGINAL, BenchResult, Row, check_bounds
from te_convert.bench.subject import Subject, choose_device, open_subject
from te_convert.bench.variants import COMPILED, Variant, find_variants
from te_convert.bench.work import Job, describe_inputs
from te_convert.capture.run import describe_error
from te_convert.capture.scenario import Scenario
from te_convert.check.run import converted_names
from te_convert.config import Progress, patterns
from te_convert.errors import InputError
from te_convert.rewrite.fallback import fallback_words, fallbacks
from te_convert.runtime.backend import choose_backend
from te_convert.runtime.probe import describe_environment
from te_convert.verify.compare import Outputs, compare_outputs
from te_convert.verify.run import Setting, in_eval, run

_CACHES = "past_key_values"
"""Outputs that only the model itself reads."""


@dataclass
class _Runner:
    """One variant while it is measured; with a ``reason`` it is over."""

    variant: Variant
    job: Job
    device: str
    model: nn.Module | None = None
    calls: int = 1
    rounds_ms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    outputs: Outputs = ()
    tokens: Tensor | None = None
    reason: str = ""

    def guarded(self, step: Callable[[], None]) -> None:
        """A variant that fails is a row with a reason; the others go on."""
        if self.reason:
            return
        try:
            step()
        except Exception as error:  # whatever a model, a compiler or a kernel raises
            self.reason = describe_error(error)
            self.model, self.outputs = None, ()

    def work(self) -> Any:
        """One call."""
        model = self.model
        assert model is not None
        return self.job.once(model, lambda: self.variant.enter(model))

    def prepare(self, warmup: int) -> None:
        """Build, warm up, and see how long a call takes, how much it allocates and what it gives."""
        self.model = self.variant.build()
        self.outputs = self._run()
        self.job.prepare(self.model)
        for _ in range(warmup):
            self.tokens = self.work()
        self.calls = calls_per_sample(time_ms(self.work, self.device))
        self.model.zero_grad(set_to_none=True)
        self.peak_bytes = held_bytes(self.model) + extra_bytes(self.work, self.device)

    def sample(self) -> None:
        """One measured round."""
        self.rounds_ms.append(time_ms(self.work, self.device, self.calls))

    def _run(self) -> Outputs:
        assert self.model is not None
        with self.variant.enter(self.model):
            return _floating(run(self.model, in_eval(self.job.scenario), Setting(hide_padding=True)))


def bench(
    target: str | Path | nn.Module,
    example_inputs: Any = None,
    *,
    training: bool = True,
    generate: int = 0,
    recipes: Sequence[str] | None = None,
    compiler: str | None = "inductor",
    dtype: str | None = None,
    device: str | None = None,
    backend: str = "auto",
    rounds: int = 20,
    warmup: int = 3,
    weights: str | Path | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    allow: str | Sequence[str] = (),
    compare: str | Path | None = None,
    max_slowdown: float = 1.1,
    progress: Progress | None = None,
) -> BenchResult:
    """Measure a model before and after conversion: time, tokens per second, peak memory and error, in one table.

    The rounds of all variants alternate, so that a machine that gets slower does so for each of them.  A variant that fails is a
    row with a reason.  On a CPU the twins are measured, which says nothing about a GPU.

    Args:
        target: a directory written by te-convert, a source as for :func:`te_convert.open_model`, or a model, which is copied.
        example_inputs: as for :func:`te_convert.convert`, the first scenario is used; None for the model's own or derived ones.
        training: forward and backward in training mode; otherwise a forward in eval mode.
        generate: measure ``model.generate()`` of so many tokens instead.
        recipes: which to measure where they run; None for all.
        compiler: backend of torch.compile for the compiled original, None to leave it out.
        dtype: cast the original to "float32", "bfloat16" or "float16" first.
        device: "cpu" or "cuda"; None takes the GPU where there is one.
        backend: what the conversion runs on, as for :func:`te_convert.convert`.
        rounds: measured rounds of each variant, 2 or more.
        warmup: calls before them, 1 or more.
        weights: weights to load into a model's source first.
        include: see :func:`te_convert.convert`.
        exclude: see :func:`te_convert.convert`.
        allow: see :func:`te_convert.convert`.
        compare: a recorded measurement (the JSON of :meth:`BenchResult.to_dict`) of the same machine and setting.
        max_slowdown: the largest time now over time then that is accepted.
        progress: called with (stage, done, total).

    Raises:
        InputError: bad arguments, a model that fails on its inputs, or a recorded measurement of another machine or setting.
        EnvironmentLacksError: ``device="cuda"`` or ``backend="te"`` where there is no such thing.
        LoadError: a damaged directory.
    """
    check_bounds(rounds, warmup, generate, max_slowdown)
    recorded = None if compare is None else read_recorded(Path(compare))
    place = choose_device(device)
    chosen = choose_backend(backend, place)
    subject = open_subject(
        target, example_inputs, place, dtype, None if weights is None else Path(weights), patterns(include, exclude, allow)
    )
    job = Job(subject.scenario, training and not generate, generate)
    job.prepare(subject.original)
    runners = [_Runner(v, job, place, reason=v.lacking) for v in find_variants(subject, chosen, place, recipes, compiler)]
    found = BenchResult(
        target=subject.name,
        model_class=type(subject.original).__name__,
        work=job.words,
        inputs=describe_inputs(subject.scenario),
        items=job.items,
        dtype=_dtype_of(subject.original),
        device=place,
        backend=chosen.name,
        backend_reason=chosen.reason,
        converted_sites=0,
        rounds=rounds,
        warmup=warmup,
        environment=_machine(),
        rows=(),
    )
    if recorded is not None:
        refuse_other_setting(Path(str(compare)), recorded, found)
    exact, note = _reference(subject)
    _measure(runners, rounds, warmup, progress or (lambda stage, done, total: None))
    converted = next((r.model for r in runners if r.model is not None and r.variant.name not in (ORIGINAL, COMPILED)), None)
    past = [f"{r.variant.name}: {words}" for r in runners if r.model is not None for words in fallback_words(fallbacks(r.model))]
    notes = (*past, *subject.notes, *((note,) if note else ()))
    result = BenchResult(
        **{
            **found.__dict__,
            "rows": tuple(_row(runner, runners[0], exact, job.items[1]) for runner in runners),
            "converted_sites": 0 if converted is None else len(converted_names(converted)),
            "notes": notes,
        }
    )
    return result if recorded is None else result.with_comparison(compare_with(Path(str(compare)), recorded, result, max_slowdown))


def _measure(runners: list[_Runner], rounds: int, warmup: int, progress: Progress) -> None:
    """Prepare each, then take turns, each round beginning with another one.

    Raises:
        InputError: the original itself fails.
    """
    for index, runner in enumerate(runners):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice of compilers and kernels about speed is not this table's business
            runner.guarded(lambda runner=runner: runner.prepare(warmup))  # type: ignore[misc]
        if runner.variant.name == ORIGINAL and runner.reason:
            raise InputError(f"the original fails: {runner.reason}", "pass inputs that it takes; --inference needs no backward")
        progress("prepare", index + 1, len(runners))
    gc.collect()
    for index in range(rounds):
        start = index % len(runners)
        for runner in (*runners[start:], *runners[:start]):
            runner.guarded(runner.sample)
        if runners[0].reason:
            raise InputError(f"the original fails in round {index + 1}: {runners[0].reason}", "measure a smaller input")
        progress("rounds", index + 1, rounds)


def _row(runner: _Runner, original: _Runner, exact: Outputs, items: int) -> Row:
    variant = runner.variant
    if runner.reason:
        return Row(variant.name, variant.recipe, reason=runner.reason)
    seconds = statistics.median(runner.rounds_ms) / 1e3
    paired = zip(original.rounds_ms, runner.rounds_ms, strict=True)
    figures = compare_outputs(exact, runner.outputs)[1] if exact else None
    same = None
    if runner.tokens is not None and original.tokens is not None and runner.tokens.shape == original.tokens.shape:
        same = float((runner.tokens == original.tokens).float().mean())
    return Row(
        name=variant.name,
        recipe=variant.recipe,
        rounds_ms=tuple(round(each, 6) for each in runner.rounds_ms),
        items_per_s=items / seconds,
        peak_bytes=runner.peak_bytes,
        sqnr_db=None if figures is None else figures.sqnr_db,
        max_rel=None if figures is None else figures.max_rel,
        tokens_equal=same,
        speedup=statistics.median(own / other for own, other in paired),
    )


def _reference(subject: Subject) -> tuple[Outputs, str]:
    """Outputs of the original computed in float32, or why there are none."""
    scenario: Scenario = in_eval(subject.scenario)
    low = any(p.dtype in (torch.bfloat16, torch.float16) for p in subject.original.parameters())
    setting = Setting(widen=torch.float32 if low else None, hide_padding=True)
    try:
        return _floating(run(subject.original, scenario, setting)), ""
    except Exception as error:
        return (), f"no errors are known, since the original does not run in float32: {describe_error(error)}"


def _floating(outputs: Outputs) -> Outputs:
    """Floating outputs in float32 on the CPU, without caches."""
    return [(path, t.float().cpu()) for path, t in outputs if t.is_floating_point() and not t.is_nested and _CACHES not in path]


def _dtype_of(model: nn.Module) -> str:
    first = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return str(first).removeprefix("torch.")


def _machine() -> Mapping[str, Any]:
    """The environment of reports, and what decides about speed on a CPU."""
    name = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return {**describe_environment(), "cpu": name, "cpus": os.cpu_count(), "threads": torch.get_num_threads()}
