"""Does a TE module compute what a block computes?  Both run on random input, with norms and biases moved from their defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_convert.facts.stand_in import brief, isolated
from te_convert.match.blocks import Block
from te_convert.match.transformer_blocks import random_input
from te_convert.replacements.build import constructor_arguments, module_class
from te_convert.replacements.specs import Spec
from te_convert.weights.ops import WeightMap

Runs = Callable[[Tensor], list[tuple[dict[str, Any], dict[str, Any]]]]
"""From an input: further arguments of the block, and what they are for TE's layer, of each run."""

_TOLERANCE = 2e-5
"""max|a - b| / max|a| in float32, as verify/tolerance.py has it for a whole model."""
_APPROXIMATE = 2e-2
"""The same where a tanh GELU stands for an erf GELU (4.7e-4 per activation), to find wrong weights; parity has the exact bound."""
_MAX_TOKENS = 64


def _plainly(x: Tensor) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    del x
    return [({}, {})]


def first_difference(block: Block, spec: Spec, weights: WeightMap, approximate: bool = False, runs: Runs = _plainly) -> str:
    """Empty when the twin of ``spec`` with the block's weights gives the block's results at two shapes, else what differs."""
    shape = block.site.calls[0].input_shape
    if shape is None or len(shape) != 3 or block.is_meta:
        return "its weights or inputs are not known, so it cannot be proved"
    batch, length, width = min(shape[0], 2), min(shape[1], _MAX_TOKENS), shape[2]
    tensors = {name: _moved(parameter.detach()) for name, parameter in block.site.module.named_parameters()}
    cls = module_class(spec, "reference")
    args, kwargs = constructor_arguments(spec, cls)
    twin = cls(*args, **kwargs).eval()
    converted = weights.to_te(tensors)
    for size in ((batch, length, width), (1, max(length // 2, 1), width)):
        x = random_input(size, next(iter(tensors.values())))
        for given, translated in runs(x):
            try:
                with isolated():
                    y = torch.func.functional_call(block.site.module, tensors, (x.clone(),), given)
                    z = torch.func.functional_call(twin, converted, (x.clone(),), translated)
            except Exception as error:  # whatever foreign code raises
                return f"it does not run alone on {list(size)}: {brief(error)}"
            difference = _difference(y, z)
            if difference > (_APPROXIMATE if approximate else _TOLERANCE):
                under = f" with {', '.join(given)}" if given else ""
                return f"{spec.name} with its weights differs by {difference:.1e} on {list(size)}{under}"
    return ""


def _moved(tensor: Tensor) -> Tensor:
    """In float32; one dimension: with noise."""
    wide = tensor.float()
    if tensor.dim() != 1:
        return wide
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel()))
    return wide + 0.2 * noise.to(tensor.device)


def _difference(a: object, b: object) -> float:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))
