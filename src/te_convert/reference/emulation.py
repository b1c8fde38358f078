"""What a recipe does to the matrix products of the twins, without a GPU: operands quantised and dequantised, products in float32.

``with emulate("fp8-current"):`` stands where ``te.autocast(recipe=...)`` stands with Transformer Engine.  Which operand is
quantised how in the forward (fprop), the gradient of the input (dgrad) and of the weight (wgrad), with F and G the formats:

============  ==============================  ==================================  =====================================
recipe        input in fprop / wgrad          weight in fprop / dgrad             output gradient in dgrad / wgrad
============  ==============================  ==================================  =====================================
fp8-current   E4M3, one scale                 E4M3, one scale                     E5M2, one scale
fp8-delayed   the same, scales from earlier steps
fp8-block     E4M3, 1 × 128 by row / column   E4M3, 128 × 128                     E4M3, 1 × 128 by row / column
mxfp8         E4M3, 1 × 32 by row / column    E4M3, 1 × 32 by row / column        E4M3, 1 × 32 by row / column
nvfp4         E2M1, 1 × 16 by row / column    E2M1, 16 × 16                       E2M1, 1 × 16 by row / column
============  ==============================  ==================================  =====================================

Blocks lie along the dimension that the product sums over; both directions are made from the unquantised operand.  NVFP4's two
operands of wgrad go through TE's Hadamard transform first.  The bias is added in float32, its gradient is that of the
unquantised output gradient, and the result is rounded once.  Attention stays in high precision (TE's default, fp8_dpa=False).

Left out: stochastic rounding of NVFP4's gradients (they are rounded to nearest), the shorter accumulators of FP8 tensor cores,
TE's rounding of a float32 bias to bfloat16, and that TE's fused norms and activations may quantise before rounding to bfloat16.

Source: ``pytorch/module/linear.py``, ``common/recipe/__init__.py``, ``pytorch/quantization.py`` of TE 2.20.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from te_convert.reference.amax import HISTORY, Amax, AmaxHistories
from te_convert.reference.module import without_autocast
from te_convert.reference.precision import autocast_dtype
from te_convert.reference.quantize import (
    E4M3,
    E5M2,
    FP8_BLOCK,
    NVFP4_BLOCK,
    Format,
    hadamard,
    quantize_blocks,
    quantize_mxfp8,
    quantize_nvfp4,
    quantize_tensor,
)
from te_convert.reference.unsupported import require

Quantize = Callable[[Tensor], Tensor]
"""A matrix → what a product that sums over its columns sees of it, float32."""


@dataclass(frozen=True)
class Operands:
    """How one product's operands are quantised; each function takes its operand with the dimension summed over last.

    Attributes:
        input: [rows, in], for fprop.
        weight: [out, in], for fprop.
        gradient: [rows, out], for dgrad.
        input_t: [in, rows], for wgrad.
        weight_t: [in, out], for dgrad.
        gradient_t: [out, rows], for wgrad.
    """

    input: Quantize
    weight: Quantize
    gradient: Quantize
    input_t: Quantize
    weight_t: Quantize
    gradient_t: Quantize


def _per_tensor(fmt: Format, scale: Tensor | None = None, amax: Amax | None = None) -> Quantize:
    """With the tensor's own scale, or with ``scale``; its magnitude goes into a history."""

    def quantize(x: Tensor) -> Tensor:
        if amax is not None:
            amax.record(x)
        return quantize_tensor(x, fmt, scale).dequantize()

    return quantize


def _blocks(x: Tensor) -> Tensor:
    return quantize_blocks(x, E4M3, (1, FP8_BLOCK)).dequantize()


def _square_blocks(x: Tensor) -> Tensor:
    return quantize_blocks(x, E4M3, (FP8_BLOCK, FP8_BLOCK)).dequantize()


def _mxfp8(x: Tensor) -> Tensor:
    return quantize_mxfp8(x).dequantize()


def _nvfp4(x: Tensor) -> Tensor:
    return quantize_nvfp4(x).dequantize()


def _nvfp4_square(x: Tensor) -> Tensor:
    return quantize_nvfp4(x, (NVFP4_BLOCK, NVFP4_BLOCK)).dequantize()


def _nvfp4_transformed(x: Tensor) -> Tensor:
    return quantize_nvfp4(hadamard(x)).dequantize()


_FORWARD, _BACKWARD = _per_tensor(E4M3), _per_tensor(E5M2)
_STATELESS: dict[str, Operands] = {
    "fp8-current": Operands(_FORWARD, _FORWARD, _BACKWARD, _FORWARD, _FORWARD, _BACKWARD),
    "fp8-block": Operands(_blocks, _square_blocks, _blocks, _blocks, _square_blocks, _blocks),
    "mxfp8": Operands(_mxfp8, _mxfp8, _mxfp8, _mxfp8, _mxfp8, _mxfp8),
    "nvfp4": Operands(_nvfp4, _nvfp4_square, _nvfp4, _nvfp4_transformed, _nvfp4_square, _nvfp4_transformed),
}
_DELAYED = "fp8-delayed"
_ALIASES = {"fp8": "fp8-current"}
"""What runtime/recipes.py takes on Ada and Hopper; on Blackwell it takes MXFP8."""

EMULATED = (*_ALIASES, _DELAYED, *_STATELESS)
"""Recipes that can be emulated."""


class Emulation:
    """A recipe with what it remembers; enter it with :func:`emulate`.

    Args:
        recipe: one of :data:`EMULATED`.
        margin: delayed scaling's; TE's default is 0.
        history: delayed scaling's ``amax_history_len``.

    Attributes:
        recipe: the recipe emulated; "fp8" becomes "fp8-current".
        calibrating: delayed scaling takes each tensor's scale from that tensor, as after many steps on data of this kind.

    Raises:
        NotSupportedError: not a recipe that can be emulated.
    """

    def __init__(self, recipe: str, *, margin: int = 0, history: int = HISTORY) -> None:
        require(recipe in EMULATED, f"recipe {recipe!r} is none of {', '.join(EMULATED)}")
        self.recipe = _ALIASES.get(recipe, recipe)
        self.calibrating = False
        self.histories = AmaxHistories(margin, history)

    def operands(self, module: nn.Module, name: str, inp: Tensor, weight: Tensor) -> Operands:
        """How the operands of a module's product are quantised; the scales of delayed scaling are fixed here."""
        if self.recipe != _DELAYED:
            return _STATELESS[self.recipe]
        first = self.histories.get(module, f"{name}.input", E4M3, inp.device)
        second = self.histories.get(module, f"{name}.weight", E4M3, inp.device)
        third = self.histories.get(module, f"{name}.gradient", E5M2, inp.device, backward=True)
        if self.calibrating:
            for amax, tensor in ((first, inp), (second, weight)):
                amax.record(tensor)
                amax.update()
        return Operands(
            _per_tensor(E4M3, first.scale, None if self.calibrating else first),
            _per_tensor(E4M3, second.scale, None if self.calibrating else second),
            _per_tensor(E5M2, third.scale, third),
            _per_tensor(E4M3, first.scale),
            _per_tensor(E4M3, second.scale),
            _per_tensor(E5M2, third.scale, third),
        )


_active: ContextVar[Emulation | None] = ContextVar("te_convert_emulation", default=None)


def active() -> Emulation | None:
    """The emulation in force here, or None."""
    return _active.get()


@contextmanager
def emulate(recipe: str | Emulation) -> Iterator[Emulation]:
    """Run the twins' matrix products as a recipe would; attention, norms and modules in high precision are left alone.

    Give delayed scaling one :class:`Emulation` for all steps and enter it once for each, as TE's autocast: leaving it ends the
    step of the forward's tensors (where gradients are enabled, as in TE), entering it again that of the backward's.

    Raises:
        NotSupportedError: not a recipe that can be emulated.
    """
    emulation = Emulation(recipe) if isinstance(recipe, str) else recipe
    outermost = _active.get() is None
    if outermost and not emulation.calibrating:
        emulation.histories.update(backward=True)
    token = _active.set(emulation)
    try:
        yield emulation
    finally:
        _active.reset(token)
        if outermost and not emulation.calibrating and torch.is_grad_enabled():
            emulation.histories.update(backward=False)


@contextmanager
def high_precision() -> Iterator[None]:
    """No emulation inside, as ``te.autocast(enabled=False)``."""
    token = _active.set(None)
    try:
        yield
    finally:
        _active.reset(token)


def linear(module: nn.Module, inp: Tensor, weight: Tensor, bias: Tensor | None, name: str = "") -> Tensor:
    """``inp @ weight.T + bias``, as the active recipe computes it; exactly ``F.linear`` when there is none.

    Args:
        module: whose product it is; delayed scaling keeps its history for it.
        inp: [..., in].
        weight: [out, in].
        bias: [out] or None.
        name: which of the module's products.

    Returns:
        [..., out] in the dtype of ``inp``, or autocast's.
    """
    emulation = _active.get()
    if emulation is None or inp.is_meta or not inp.numel():
        return F.linear(inp, weight, bias)
    low = autocast_dtype(inp)
    if low is None and inp.dtype != weight.dtype:
        return F.linear(inp, weight, bias)  # its error
    rows = inp.to(low or inp.dtype).reshape(-1, inp.shape[-1])
    with without_autocast(inp):
        out: Tensor = _Linear.apply(rows, weight, bias, emulation.operands(module, name, rows, weight))
    return out.view(*inp.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """[rows, in], [out, in], [out] → [rows, out]."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, weight: Tensor, bias: Tensor | None, operands: Operands) -> Tensor:
        ctx.save_for_backward(inp, weight)
        ctx.operands, ctx.bias_dtype = operands, None if bias is None else bias.dtype
        out = operands.input(inp) @ operands.weight(weight).t()
        if bias is not None:
            out += bias.to(torch.float32)
        return out.to(inp.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        inp, weight = ctx.saved_tensors
        operands: Operands = ctx.operands
        dgrad = wgrad = bgrad = None
        with without_autocast(inp):
            if ctx.needs_input_grad[0]:
                dgrad = (operands.gradient(gradient) @ operands.weight_t(weight.t()).t()).to(inp.dtype)
            if ctx.needs_input_grad[1]:
                wgrad = (operands.gradient_t(gradient.t()) @ operands.input_t(inp.t()).t()).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                bgrad = gradient.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dgrad, wgrad, bgrad, None
