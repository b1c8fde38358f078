"""How much each site's quantisation noise adds to the noise of the model's output, from one forward and a few backwards.

With a site's error d (its output in a recipe minus its own), the output moves by J d to first order, and for a random vector v of
signs the mean of (v · J d)² is |J d|².  One backward from v gives v · J for all sites at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from te_convert.capture.tensors import iter_tensors
from te_convert.reference.emulation import Emulation, emulate
from te_convert.rewrite.apply import Applied
from te_convert.verify.isolate import Run, SiteRecorder, observed
from te_convert.verify.padding import hide_padding, padding_mask
from te_convert.verify.reference import Expected
from te_convert.verify.run import prepared

PROBES = 16
"""The estimate of a site's share has a relative standard deviation of sqrt(2 / probes): enough to rank shares that differ by
factors."""


class _ErrorRecorder(SiteRecorder):
    """Keeps each site's output, in the graph, with its error in the recipe."""

    def __init__(self, emulation: Emulation) -> None:
        super().__init__()
        self.emulation = emulation
        self.errors_of: list[tuple[str, Tensor, Tensor]] = []

    def _compare(self, fqn: str, site: nn.Module, y: Tensor, original: Run, converted: Run) -> None:
        if not y.requires_grad:
            return
        with torch.no_grad(), emulate(self.emulation):
            self.errors_of.append((fqn, y, converted() - y.detach()))


def noise_at_output(
    applied: Applied,
    expected: Expected,
    emulation: Emulation,
    sites: Mapping[str, nn.Module],
    hidden: str = "",
    probes: int = PROBES,
) -> dict[str, float]:
    """Noise that each site adds to the outputs, relative to their power; sites without an effect are left out.

    Args:
        applied: the rewrite, on twins.
        expected: the run.
        emulation: the recipe, with its scales fixed.
        sites: the sites to ask about.
        hidden: outputs with this in their path do not count.
        probes: how many backwards.

    Raises:
        Exception: whatever the model raises; a model without gradients gives RuntimeError.
    """
    model, recorder = applied.model, _ErrorRecorder(emulation)
    with prepared(model, expected.scenario, expected.setting) as ready, _differentiable(model), torch.enable_grad():
        with observed(dict(sites), recorder):
            output = ready.call(model)
        padded = padding_mask(model, ready) if expected.setting.hide_padding else None
        outputs = [t if padded is None else hide_padding(t, padded) for t in _results(output, hidden)]
        return _project(outputs, recorder.errors_of, probes)


def _results(output: object, hidden: str) -> list[Tensor]:
    return [
        tensor
        for path, tensor in iter_tensors(output)
        if tensor.requires_grad and tensor.is_floating_point() and tensor.numel() and not (hidden and hidden in path)
    ]


def _project(outputs: list[Tensor], errors: list[tuple[str, Tensor, Tensor]], probes: int) -> dict[str, float]:
    if not outputs or not errors:
        raise RuntimeError("no output depends on a site")
    random = torch.Generator().manual_seed(5)
    norms = [tensor.detach().float().norm().clamp(min=1e-30) for tensor in outputs]
    noise: dict[str, float] = {}
    for probe in range(probes):
        signs = [torch.randint(0, 2, t.shape, generator=random).mul_(2).sub_(1).to(t.device, t.dtype) for t in outputs]
        vectors = [sign / norm.to(sign.dtype) for sign, norm in zip(signs, norms, strict=True)]
        places = [y for _, y, _ in errors]
        gradients = torch.autograd.grad(outputs, places, vectors, retain_graph=probe + 1 < probes, allow_unused=True)
        moved: dict[str, float] = {}
        for (fqn, _, error), gradient in zip(errors, gradients, strict=True):
            if gradient is not None:
                moved[fqn] = moved.get(fqn, 0.0) + float((gradient.float() * error.float()).sum())
        for fqn, value in moved.items():
            noise[fqn] = noise.get(fqn, 0.0) + value**2 / probes
    return noise


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Every floating parameter requires a gradient for the time being, so that a frozen model has a graph too."""
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_()
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad = False
