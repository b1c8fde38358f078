"""Gradients of a whole model, compared without keeping them: each is reduced to a few numbers as soon as it is there.

A gradient ``g`` becomes its norm and the products of ``g`` with a few fixed random vectors.  For a difference ``d`` between two
gradients, the products differ by numbers whose root mean square is about ``|d|``; so they measure the relative error, whatever it
looks like, in memory that does not grow with the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import nn

from te_convert.capture.preserve import copy_inputs
from te_convert.capture.scenario import Scenario, exits_are_errors
from te_convert.capture.tensors import iter_tensors
from te_convert.verify.compare import MISMATCH, Outputs
from te_convert.verify.model import Figures
from te_convert.verify.padding import hide_padding, padding_mask
from te_convert.verify.perturb import OriginalParameters, original_parameters
from te_convert.verify.run import Setting, prepared
from te_convert.weights.ops import Rows, Take

PERIOD = 8191
"""A prime: rows and blocks of a weight, whose sizes are mostly powers of two, fall on different weights."""
PRODUCTS = 8
_AT_ONCE = 512
"""Periods that are in memory in float32 at a time, of gradients that are as large as the largest weight."""
_FLOOR = 1e-3
"""Gradients smaller than this share of the largest are compared on its scale: some are zero in theory (key biases)."""


def gradient_outputs(model: nn.Module, scenario: Scenario, setting: Setting, extra: Iterable[OriginalParameters] = ()) -> Outputs:
    """(original parameter name, [norm², products]) for every gradient of a seeded loss over the outputs, and of float inputs.

    Args:
        model: an original or a converted model.
        scenario: how to call it.
        setting: perturbation, precision and padding.
        extra: parameters outside the model that its forward uses.

    Raises:
        Exception: whatever the model raises; RuntimeError when no output depends on a parameter.
    """
    sums: dict[str, torch.Tensor] = {}
    args, kwargs = copy_inputs((scenario.args, scenario.kwargs))
    inputs = [(path, t.requires_grad_()) for path, t in iter_tensors((args, kwargs)) if t.is_floating_point() and t.is_leaf]
    with ExitStack() as stack:
        for found in (*original_parameters(model), *extra):
            if found.parameter.requires_grad:
                handle = found.parameter.register_post_accumulate_grad_hook(lambda p, found=found: _take(found, p, sums))
                stack.callback(handle.remove)
        ready = stack.enter_context(prepared(model, scenario, setting))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(exits_are_errors())
        seeded_loss(model(*args, **kwargs), padding_mask(model, ready) if setting.hide_padding else None).backward()
    for path, tensor in inputs:
        if tensor.grad is not None:
            sums[f"input{path}"] = sketch(tensor.grad)
    return sorted(sums.items())


def seeded_loss(output: Any, padded: torch.Tensor | None) -> torch.Tensor:
    """A weighted mean with seeded weights over everything that has a gradient."""
    generator = torch.Generator().manual_seed(3)
    terms = []
    for _, tensor in iter_tensors(output):
        if tensor.requires_grad and tensor.is_floating_point() and tensor.numel():
            value = tensor if padded is None else hide_padding(tensor, padded)
            weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.device)
            terms.append((value.float() * weights).mean() if value.dtype is not torch.float64 else (value * weights).mean())
    if not terms:
        raise RuntimeError("no output has a gradient")
    return torch.stack(terms).sum()


def _take(found: OriginalParameters, parameter: torch.Tensor, sums: dict[str, torch.Tensor]) -> None:
    gradient = parameter.grad
    parameter.grad = None
    if gradient is None:
        return
    parts = [gradient] if found.op is None else found.op.inverse(gradient)
    offset = 0
    if isinstance(found.op, Take):
        offset = found.op.index * gradient.numel()
    elif isinstance(found.op, Rows):
        offset = found.op.start * (gradient.numel() // gradient.shape[0])
    for name, part in zip(found.names, parts, strict=True):
        piece = sketch(part, offset)
        sums[name] = sums[name] + piece if name in sums else piece


def sketch(gradient: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """[1 + PRODUCTS] in float64: squared norm, and products with fixed random vectors of period PERIOD.

    Args:
        gradient: any shape.
        offset: place of its first element in the flattened original, for a part of one.
    """
    flat = gradient.detach().reshape(-1)
    wide = torch.float64 if gradient.dtype is torch.float64 else torch.float32
    norm, folded = torch.zeros((), dtype=torch.float64), torch.zeros(PERIOD, dtype=torch.float64)
    for start in range(0, len(flat), _AT_ONCE * PERIOD):
        part = flat[start : start + _AT_ONCE * PERIOD].to(wide)
        norm += part.square().sum(dtype=torch.float64).cpu()
        folded += torch.nn.functional.pad(part, (0, -len(part) % PERIOD)).view(-1, PERIOD).sum(0).to(torch.float64).cpu()
    return torch.cat([norm[None], _vectors() @ folded.roll(offset % PERIOD)])


@cache
def _vectors() -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(PRODUCTS, PERIOD, generator=generator, dtype=torch.float64)


def compare_gradients(original: Outputs, converted: Outputs) -> tuple[str, Figures]:
    """Name and figures of the worst gradient; a parameter without a gradient counts as one with zeros."""
    one, other = dict(original), dict(converted)
    if not one:
        return "", MISMATCH
    zero = torch.zeros(1 + PRODUCTS, dtype=torch.float64)
    floor = _FLOOR * max(math.sqrt(float(sums[0])) for sums in one.values())
    worst, name = 0.0, ""
    for key in one.keys() | other.keys():
        a, b = one.get(key, zero), other.get(key, zero)
        error = _relative(a, b, floor)
        if error > worst or math.isnan(error):
            worst, name = (math.inf if math.isnan(error) else error), key
    if worst == 0.0:
        return name, Figures(math.inf, 0.0, bit_equal=True, numel=len(one))
    return name, Figures(-20 * math.log10(worst), worst, bit_equal=False, numel=len(one))


def _relative(a: torch.Tensor, b: torch.Tensor, floor: float) -> float:
    scale = max(math.sqrt(float(a[0])), floor)
    if scale == 0.0:
        return 0.0 if bool((a == b).all()) else math.inf
    return float((a[1:] - b[1:]).square().mean().sqrt()) / scale
