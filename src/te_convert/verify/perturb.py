"""Move every 1-D parameter away from its value: a norm that still has weight 1 and bias 0 hides a lost weight or bias."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from te_convert.rewrite.site import get_record, is_converted
from te_convert.weights.ops import Fill

AMOUNT = 0.15
"""Standard deviation of what is added; large against rounding, small enough that models stay finite."""


def named_original_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every distinct parameter under its name in the original model; constants that the conversion filled in are left out."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # its parameters live behind another interface, and it is never converted
            continue
        names = {name: name for name in module._parameters}
        if is_converted(module):
            weights = get_record(module).decision.weights
            names = {op.dest: op.source for op in weights.ops if not isinstance(op, Fill)} if weights is not None else {}
        for name, source in names.items():
            parameter = module._parameters[name]
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield (f"{prefix}.{source}" if prefix else source), parameter


@contextmanager
def perturbed(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Add seeded noise to every floating 1-D parameter for the time being; the same noise for the same original name.

    Values are put back bit for bit, also after an exception.
    """
    saved: list[tuple[nn.Parameter, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for name, parameter in named_original_parameters(model) if enabled else ():
                if parameter.dim() == 1 and parameter.is_floating_point() and parameter.numel() > 0:
                    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                    noise = torch.randn(parameter.shape, generator=generator) * AMOUNT
                    saved.append((parameter, parameter.detach().clone()))
                    parameter.copy_(parameter + noise.to(parameter.device, parameter.dtype))
        yield
    finally:
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)
