"""Which norm a module computes, decided by running a stand-in of it rather than by its class name.

The probe finds the parameters' roles from how each moves the output, reads eps off the gain of tiny inputs, and then compares
the module with the formula of :mod:`te_convert.facts.norm_formula` over many scales. Names lie: ``ImageGPTLayerNorm`` is an
RMSNorm, ``NoNorm`` is an affine map.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from te_convert.facts.norm_formula import Kind, NormFacts, affine, centre, named, normalise
from te_convert.facts.rounding import closest_eps, find_rounding
from te_convert.facts.stand_in import (
    ForwardError,
    ProbeError,
    describe_parameters,
    has_no_shape,
    kind_key,
    reject_unusual_state,
    relative_error,
    run_stand_in,
    stand_in,
)

_KINDS: tuple[Kind, ...] = ("LayerNorm", "RMSNorm")

_COMMON_EPS = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 2.220446049250313e-16, 1.1920928955078125e-07)
"""Values that a norm may have written into its code; last, ``torch.finfo(dtype).eps`` of float64 and of float32."""

_TINY = 1e-15
"""Scale of the input from which eps is read: its square is far below any eps in use and still a normal float32 number."""

_SNAP = 1e-4
"""Largest relative distance of an exact eps from the measured one; float32 arithmetic measures it within 1e-6."""

_TOLERANCE = 5e-6
"""Largest error over the largest output: float32 norms stay below 1e-6, var(unbiased=True) at width 16384 is 3e-5 off."""

_SCALES = ((1e-9, 1.0), (1e-3, 1.0), (1.0, 1.0), (30.0, 1.0), (3e4, 1.0), (1.0, 1e3))
"""(input scale, gamma scale) of the comparison; the extremes find clamps of the input (also at 65504), variance and output."""


@dataclass(frozen=True)
class NotANorm:
    """The module computes something else, or may; ``detail`` is what was seen."""

    detail: str


def looks_like_norm(module: nn.Module) -> bool:
    """Whether a module has the parameters of a norm: one or two 1-D ones of one size, no children.

    ``nn.LayerNorm`` and ``nn.RMSNorm`` always do, in any form; batch, instance and group norms and PReLU never.
    """
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return True
    if isinstance(module, (_NormBase, nn.GroupNorm, nn.PReLU, torch.jit.ScriptModule)) or module._modules:
        return False
    parameters = list(module.parameters(recurse=False))
    if not parameters or len(parameters) > 2 or any(has_no_shape(p) or p.dim() != 1 for p in parameters):
        return False
    return len({p.numel() for p in parameters}) == 1


def probe_norm(module: nn.Module, *, width: int | None = None, dtype: torch.dtype | None = None) -> NormFacts | NotANorm:
    """Find which norm a module computes; never changes it, its gradients, its hooks or any random state.

    The parameters' values play no part, so a module on the meta device will do.

    Args:
        module: a candidate (:func:`looks_like_norm`).
        width: last dimension of a recorded input; needed only by a norm without parameters and ``normalized_shape``.
        dtype: in which the module will run (default: its parameters', else float32); ``nn.RMSNorm(eps=None)`` depends on it.
    """
    try:
        width = _width(module, width)
        own = next((p.dtype for p in module.parameters(recurse=False)), torch.float32)
        return _Probe(module, width).facts(own if dtype is None else dtype)
    except ProbeError as error:
        return NotANorm(str(error))


def probe_norm_cached(
    module: nn.Module,
    cache: dict[Hashable, NormFacts | NotANorm],
    *,
    width: int | None = None,
    dtype: torch.dtype | None = None,
) -> NormFacts | NotANorm:
    """:func:`probe_norm`, once for all modules of one kind (see :func:`~te_convert.facts.stand_in.kind_key`)."""
    key = (kind_key(module), width, dtype)
    if key not in cache:
        cache[key] = probe_norm(module, width=width, dtype=dtype)
    return cache[key]


def _width(module: nn.Module, recorded: int | None) -> int:
    """Size of the last dimension, from the parameters, else the recorded input, else ``normalized_shape``."""
    reject_unusual_state(module)
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, Sequence) and len(shape) > 1:
        raise ProbeError(f"it normalises over several dimensions: {tuple(shape)}")
    parameters = list(module.parameters(recurse=False))
    if len(parameters) > 2 or any(p.dim() != 1 for p in parameters) or len({p.numel() for p in parameters}) > 1:
        raise ProbeError(f"its parameters are not one or two 1-D ones of one size: {describe_parameters(module)}")
    own = parameters[0].numel() if parameters else shape[0] if isinstance(shape, Sequence) and shape else shape
    width = own if isinstance(own, int) and (parameters or recorded is None) else recorded
    if width is None:
        raise ProbeError("it has no parameters and no input was recorded, so its width is unknown")
    if recorded is not None and recorded != width:
        raise ProbeError(f"its input is {recorded} wide and its parameters {width}")
    if width < 2:
        raise ProbeError(f"its width is {width}; a norm needs two values")
    return width


class _Probe:
    """Runs one module's stand-in. All tensors are on the CPU; random ones come from a seeded generator of their own."""

    def __init__(self, module: nn.Module, width: int) -> None:
        self._twin = stand_in(module)
        self._names = [name for name, _ in module.named_parameters(recurse=False)]
        self._attributes = [value for value in vars(module).values() if isinstance(value, float)]
        self._width = width
        self._generator = torch.Generator(device="cpu").manual_seed(0)

    def facts(self, dtype: torch.dtype) -> NormFacts:
        """Everything about the norm when it runs in ``dtype``; raises ProbeError when it is not one."""
        low = dtype in (torch.bfloat16, torch.float16)
        facts = self._kind(self._roles())
        facts, narrow = (replace(facts, eps=self._measure_eps(facts, t)) for t in (torch.float64, torch.float32))
        self._check(facts, torch.float64)
        if not math.isclose(facts.eps, narrow.eps, rel_tol=1e-3):
            self._check(narrow, torch.float32)
            narrow = self._dtype_eps(narrow, dtype) if low else narrow
            facts = facts if dtype == torch.float64 else narrow
        return self._rounding(facts, dtype if low else torch.bfloat16)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64, device="cpu")

    def _input(self, *leading: int) -> Tensor:
        """Random rows of about 3, -3, 3, ... or its opposite: float32 can subtract their mean without loss, at any width."""
        signs = torch.ones(self._width, dtype=torch.float64, device="cpu")
        signs[1::2] = -1.0
        return self._random(*leading, self._width) + 3.0 * signs * self._random(*leading, 1).sign()

    def _run(self, x: Tensor, parameters: dict[str, Tensor], *, training: bool = False, finite: bool = True) -> Tensor:
        """Output for ``x``, with parameters of its dtype; those not given are zero."""
        zero = torch.zeros(self._width, dtype=x.dtype, device="cpu")
        values = {name: parameters.get(name, zero).to(x.dtype) for name in self._names}
        y = run_stand_in(self._twin, values, x, training=training, finite=finite)
        if y.shape != x.shape:
            raise ProbeError(f"it maps shape {list(x.shape)} to {list(y.shape)}")
        return y

    def _neutral(self, facts: NormFacts, x: Tensor) -> Tensor:
        """Output for ``x`` when gamma is one and beta zero."""
        one = torch.full((self._width,), 1.0 - facts.zero_centered_gamma, dtype=x.dtype, device="cpu")
        return self._run(x, named(facts, one, torch.zeros_like(one)))

    def _roles(self) -> NormFacts:
        """Which parameter multiplies and which is added: an added one moves the output by the same amount everywhere."""
        x = self._input(3, 5) + 1.0
        still = self._run(x, {})
        roles: dict[bool, str] = {}
        for name in self._names:
            move = self._run(x, {name: self._random(self._width)}) - still
            roles[bool((move - move[:1, :1]).abs().max() < 1e-5)] = name
        if len(roles) != len(self._names):
            raise ProbeError(f"{' and '.join(self._names)} act alike: not one gamma and one beta")
        weight, bias = roles.get(False), roles.get(True)
        centred = weight is not None and bool(still.abs().max() > 1e-9)
        return NormFacts("RMSNorm", self._width, 0.0, centred, weight, bias, "unknown", keeps_dtype=False)

    def _kind(self, facts: NormFacts) -> NormFacts:
        """Whether the output is a multiple of the centred or of the plain input, row by row, and follows its size or not."""
        x = self._input(3, 5) + 1.0
        y = self._neutral(facts, x).double()
        growth = float(self._neutral(facts, 1e4 * x).double().norm() / y.norm())
        if not 0.5 < growth < 2.0:
            raise ProbeError(f"it does not normalise: an input 1e4 times larger gives an output {growth:.3g} times larger")
        errors = {}
        for kind in _KINDS:
            centred = centre(x, kind)
            errors[kind] = relative_error(_gain(y, centred) * centred, y)
            if errors[kind] < _TOLERANCE:
                return replace(facts, kind=kind)
        seen = ", ".join(f"{error:.1e} off {kind}'s direction" for kind, error in errors.items())
        raise ProbeError(f"its output is not a multiple of the (centred) input: {seen}")

    def _measure_eps(self, facts: NormFacts, dtype: torch.dtype) -> float:
        """``eps = 1 / gain ** 2 - mean(c ** 2)`` at tiny inputs, as the exact number that it must have been."""
        x = (_TINY * self._input(8, 8)).to(dtype)
        centred = centre(x.double(), facts.kind)
        square = centred.square().mean(-1, keepdim=True)
        gain = _gain(self._neutral(facts, x).double(), centred)
        measured = float((gain.square().reciprocal() - square).median())
        if abs(measured) <= 1e-5 * float(square.median()):  # none, so that 0 / 0 is NaN as in the formula; or a lower floor
            if bool(self._run(torch.zeros_like(x), {}, finite=False).isnan().all()):
                return 0.0
            raise ProbeError("its divisor has a floor in place of an eps")
        for exact in (*self._attributes, *_COMMON_EPS):
            if abs(measured - exact) <= _SNAP * exact:
                return exact
        if not 0.0 < measured < math.inf:
            raise ProbeError(f"no eps explains the gain {float(gain.median()):.3g} of inputs near {_TINY}")
        return measured

    def _check(self, facts: NormFacts, dtype: torch.dtype) -> None:
        """Compare with the formula over :data:`_SCALES`, at the scale of eps, in training mode and at other ranks."""
        for scale, gamma_scale in (*_SCALES, (math.sqrt(facts.eps) or 1.0, 1.0)):
            self._compare(facts, ((self._input(2, 3) + 1.0) * scale).to(dtype), gamma_scale)
        self._compare(facts, self._input(2, 3).to(dtype), training=True)
        for x in (self._input(4).to(dtype), self._input(2, 3, 2).to(dtype)):
            with suppress(ForwardError):  # written for three dimensions only: no call that it takes can differ
                self._compare(facts, x)

    def _compare(self, facts: NormFacts, x: Tensor, gamma_scale: float = 1.0, *, training: bool = False) -> None:
        core = normalise(x.double(), facts)
        weight = (self._random(self._width) * gamma_scale).to(x.dtype)
        # beta as large as the rest, so that neither hides the other
        bias = (self._random(self._width) * gamma_scale * core.abs().max()).to(x.dtype)
        y = self._run(x, named(facts, weight, bias), training=training)
        error = relative_error(y, affine(core, facts, weight.double(), bias.double()))
        if error > _TOLERANCE:
            where = f"inputs up to {float(x.abs().max()):.1e}" + (" in training mode" if training else "")
            raise ProbeError(f"it differs from {facts.kind}(eps={facts.eps:.3g}) by {error:.1e} of the largest value for {where}")

    def _dtype_eps(self, facts: NormFacts, dtype: torch.dtype) -> NormFacts:
        """The float32 eps or the dtype's own, judged where the two matter most."""
        other = torch.finfo(dtype).eps
        x = ((facts.eps * other) ** 0.25 * self._input(8, 8)).to(dtype)
        return replace(facts, eps=closest_eps(facts, (facts.eps, other), x, self._neutral(facts, x)))

    def _rounding(self, facts: NormFacts, dtype: torch.dtype) -> NormFacts:
        """Add where a low-precision module rounds; one that raises keeps "unknown" and no dtype."""
        x = self._input(2, max(32, 2048 // self._width)).to(dtype)
        weight = (0.3 * self._random(self._width) + (1.0 - facts.zero_centered_gamma)).to(dtype)
        bias = self._random(self._width).to(dtype)
        try:
            y = self._run(x, named(facts, weight, bias))
        except ProbeError:
            return facts
        return replace(facts, rounding=find_rounding(facts, x, weight, bias, y), keeps_dtype=y.dtype == dtype)


def _gain(y: Tensor, centred: Tensor) -> Tensor:
    """Factor per row ``[..., 1]`` that brings ``centred`` closest to ``y``."""
    return (y * centred).sum(-1, keepdim=True) / centred.square().sum(-1, keepdim=True)
