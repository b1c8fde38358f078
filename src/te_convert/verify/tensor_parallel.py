"""The model that is divided among ranks, compared on those ranks with the same model before it was divided.

All ranks run it together.  Compared are the outputs, and the gradient of every parameter: each rank's part with its part of the
whole model's gradient.  1-D parameters are moved first: a bias that each rank adds would not show while it is zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from te_convert.capture.preserve import copy_inputs
from te_convert.capture.run import describe_error
from te_convert.capture.scenario import Scenario
from te_convert.capture.tensors import iter_tensors
from te_convert.match.parallel_regions import divide
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.rewrite.tensor_parallel import Wholes, parallel_modules, unsplit_model
from te_convert.runtime.mesh import Ranks
from te_convert.verify.compare import MISMATCH, compare, worst_of
from te_convert.verify.model import Figures, ScenarioParity
from te_convert.verify.perturb import AMOUNT
from te_convert.verify.reference import low_precision_dtype
from te_convert.verify.run import Setting, in_eval, prepared
from te_convert.verify.tolerance import judge_float32, judge_gradient

_FLOOR = 1e-3
"""Gradients smaller than this share of the largest are compared on its scale: some are zero in theory (key biases)."""


@dataclass(frozen=True)
class _Run:
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def compare_parallel(
    model: nn.Module, scenarios: Sequence[Scenario], ranks: Ranks, split: Callable[[], Wholes]
) -> tuple[ScenarioParity, ...]:
    """Run the model, divide it with ``split``, run it again, and compare; every rank gets the same verdicts.

    Where a comparison fails, the model is whole again.  Parameters have their values of before afterwards, or this rank's part.
    """
    scenarios = [in_eval(scenario) for scenario in scenarios]
    moved = _move(model)
    try:
        whole = [_attempt(model, scenario) for scenario in scenarios]
        wholes = split()
        parts = [_attempt(model, scenario) for scenario in scenarios]
        verdicts: list[ScenarioParity] = []
        low = low_precision_dtype(model) is not None
        for scenario, before, after in zip(scenarios, whole, parts, strict=True):
            verdicts += _judge(model, f"{scenario.name}[{ranks.size} ranks]", before, after, ranks, low)
        if not all(verdict.passed for verdict in verdicts):
            unsplit_model(model, wholes)
    finally:
        cuts = _cuts(model)
        with torch.no_grad():
            for parameter, value in moved:
                dim, segments = cuts.get(id(parameter), (0, None))
                parameter.copy_(value if segments is None else divide(value, dim, segments, ranks.rank, ranks.size))
    return tuple(verdicts)


def _move(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Add seeded noise to every 1-D parameter; what they were before."""
    saved = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and parameter.is_floating_point() and parameter.numel():
                saved.append((parameter, parameter.detach().clone()))
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * AMOUNT
                parameter.add_(noise.to(parameter.device, parameter.dtype))
    return saved


def _cuts(model: nn.Module) -> dict[int, tuple[int, tuple[tuple[int, int], ...]]]:
    """id of a divided parameter → its dimension and segments."""
    found = {}
    for _, module in parallel_modules(model):
        for name, cut in module.__dict__[SITE_ATTRIBUTE].cuts.items():
            found[id(module._parameters[name])] = cut
    return found


def _attempt(model: nn.Module, scenario: Scenario) -> _Run | str:
    """A run, or what it raised: the ranks compute the same shapes, so they fail at the same place."""
    held = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in held:
        parameter.grad = None
    wide = torch.float32 if low_precision_dtype(model) is not None else None
    try:
        args, kwargs = copy_inputs((scenario.args, scenario.kwargs))
        with prepared(model, scenario, Setting(False, wide)), torch.enable_grad():
            outputs = dict(iter_tensors(model(*args, **kwargs)))
            first = next((t for t in outputs.values() if t.requires_grad and t.is_floating_point() and t.numel()), None)
            if first is not None:
                weights = torch.randn(first.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float32).to(first.device)
                (first.float() * weights).mean().backward()
            gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
            return _Run({path: tensor.detach() for path, tensor in outputs.items()}, gradients)
    except Exception as error:
        return describe_error(error)
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


def _judge(
    model: nn.Module, name: str, before: _Run | str, after: _Run | str, ranks: Ranks, low: bool
) -> tuple[ScenarioParity, ...]:
    if isinstance(before, str) or isinstance(after, str):
        error = before if isinstance(before, str) else after
        return (_agreed(name, MISMATCH, f"it raises {error}", False, "runs", ranks),)
    same = before.outputs.keys() == after.outputs.keys()
    outputs = [(path, _compare_part(t, after.outputs[path], ranks)) for path, t in before.outputs.items()] if same else []
    where, figures = worst_of(outputs) if same else ("the outputs have another structure", MISMATCH)
    verdict = judge_float32(figures)
    found = [_agreed(name, figures, where, verdict.passed, verdict.bound, ranks)]
    if before.gradients or after.gradients:
        where, figures = _compare_gradients(model, before.gradients, after.gradients, ranks)
        verdict = judge_gradient(figures, low)
        found.append(_agreed(f"{name}[gradients]", figures, where, verdict.passed, verdict.bound, ranks))
    return tuple(found)


def _compare_part(whole: Tensor, part: Tensor, ranks: Ranks) -> Figures:
    """An output that is whole, or this rank's heads of one (a cache)."""
    if whole.shape != part.shape and whole.dim() == part.dim():
        different = [dim for dim in range(whole.dim()) if whole.shape[dim] != part.shape[dim]]
        if len(different) == 1 and whole.shape[different[0]] == part.shape[different[0]] * ranks.size:
            length = whole.shape[different[0]]
            whole = divide(whole, different[0], ((length, 1),), ranks.rank, ranks.size)
    return compare(whole, part)


def _compare_gradients(model: nn.Module, before: dict[str, Tensor], after: dict[str, Tensor], ranks: Ranks) -> tuple[str, Figures]:
    """The worst parameter, by the largest difference over the largest value of the whole gradient."""
    if before.keys() != after.keys():
        return "other parameters have gradients", MISMATCH
    cuts = _cuts(model)
    parameters = dict(model.named_parameters())
    floor = _FLOOR * max(float(gradient.abs().max()) for gradient in before.values() if gradient.numel())
    worst, where, exact, count = 0.0, "", True, 0
    for name, whole in before.items():
        dim, segments = cuts.get(id(parameters[name]), (0, None))
        expected = whole if segments is None else divide(whole, dim, segments, ranks.rank, ranks.size)
        found = after[name]
        if expected.shape != found.shape:
            return name, MISMATCH
        difference = float((expected - found).abs().max()) if found.numel() else 0.0
        error = difference / max(float(whole.abs().max()), floor, torch.finfo(torch.float32).tiny)
        exact, count = exact and difference == 0.0, count + found.numel()
        if not error <= worst:  # also of NaN
            worst, where = error, name
    return where, Figures(-20 * torch.log10(torch.tensor(worst)).item() if worst else float("inf"), worst, exact, count)


def _agreed(name: str, figures: Figures, where: str, passed: bool, bound: str, ranks: Ranks) -> ScenarioParity:
    """The verdict of the rank with the worst figures, on all ranks."""
    mine = ScenarioParity(name, "float32", True, figures, None, bound, passed, where)
    said: list[ScenarioParity] = ranks.all_of(mine)
    return min(said, key=lambda verdict: (verdict.passed, verdict.figures.sqnr_db))
