"""Which activation a function or module computes: what its values are on a float32 grid, not what it is called.

``BloomGelu`` is a tanh GELU.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from te_convert.facts.stand_in import ProbeError, brief, isolated, stand_in

Elementwise = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Elementwise] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "relu": functional.relu,
    "srelu": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda x: x,
    "relu6": functional.relu6,
    "leaky_relu": functional.leaky_relu,
    "mish": functional.mish,
    "elu": functional.elu,
    "selu": functional.selu,
    "hardswish": functional.hardswish,
    "softplus": functional.softplus,
}
"""Known activations by name, with PyTorch's default constants. 1.702: the sigmoid approximation of GELU (Hendrycks and Gimpel,
2016; TE's ``common/util/math.h``). TE has no kernel for ``gelu`` (erf) nor for the names from ``sigmoid`` on."""

_TOLERANCE = 2e-6
"""Largest error over 1 + abs(value): float32 formulas stay below 5e-7 on the grid, erf and tanh GELU are 1.5e-4 apart."""


def is_activation_candidate(module: nn.Module) -> bool:
    """Whether a module holds nothing that training could change: no parameters, no buffers, no children."""
    return not (module._modules or any(True for _ in module.parameters()) or any(True for _ in module.buffers()))


def probe_activation(fn_or_module: Callable[[Tensor], object]) -> str | None:
    """Name of the activation in :data:`ACTIVATIONS` that a callable computes, or None; never raises.

    It must be elementwise, agree at 3000 float32 points from -10000 to 10000, and for a module do so in both modes.
    """
    grid = _grid()
    order = torch.randperm(grid.numel(), generator=torch.Generator(device="cpu").manual_seed(0), device="cpu")
    shuffled = grid.flatten()[order].reshape(grid.shape[::-1])
    try:
        outputs = _outputs(fn_or_module, (grid, shuffled))
    except ProbeError:
        return None
    # A function that mixes elements, or draws random numbers, cannot fit the grid both in order and shuffled.
    names = {_closest(x, y) for x, y in outputs}
    return names.pop() if len(names) == 1 else None


def _grid() -> Tensor:
    """float32 [50, 60]: dense where activations bend, with far points that find clamps."""
    far = torch.tensor([20.0, 50.0, 100.0, 1e3, 1e4], dtype=torch.float64, device="cpu")
    dense = torch.linspace(-12.0, 12.0, 2000, dtype=torch.float64, device="cpu")
    near = torch.linspace(-0.5, 0.5, 990, dtype=torch.float64, device="cpu")
    return torch.cat([dense, near, far, -far]).float().reshape(50, 60)


def _outputs(fn: Callable[[Tensor], object], inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    """Inputs with their outputs, in eval and in training mode for a module."""
    if not isinstance(fn, nn.Module):
        return [(x, _call(fn, x)) for x in inputs]
    if not is_activation_candidate(fn) or isinstance(fn, torch.jit.ScriptModule):
        raise ProbeError("it holds parameters, buffers or child modules")
    twin = stand_in(fn)
    modes = (False, True)
    return [(x, _call(twin.train(training), x)) for training in modes for x in inputs]


def _call(fn: Callable[[Tensor], object], x: Tensor) -> Tensor:
    """Output for a copy of ``x``: activations may work in place."""
    try:
        with isolated():
            y = fn(x.clone())
    except Exception as error:  # whatever foreign code raises
        raise ProbeError(brief(error)) from error
    # A subclass may compute, and fail, only when its value is asked for: the deferred norm of a converted model does.
    if type(y) is not Tensor or y.device.type != "cpu" or (y.shape, y.dtype) != (x.shape, x.dtype):
        raise ProbeError("it does not map a tensor to one like it")
    return y


def _closest(x: Tensor, y: Tensor) -> str | None:
    """The activation nearest to the values ``y`` at ``x``, when it is within :data:`_TOLERANCE`."""
    best: tuple[float, str | None] = (math.inf, None)
    for name, function in ACTIVATIONS.items():
        exact = function(x.double())
        error = float(((y.double() - exact).abs() / (1.0 + exact.abs())).nan_to_num(nan=math.inf).max())
        best = min(best, (error, name), key=lambda pair: pair[0])
    return best[1] if best[0] < _TOLERANCE else None
