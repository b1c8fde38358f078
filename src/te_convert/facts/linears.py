"""What a Linear-shaped module computes, decided by running a stand-in of it rather than by its class name.

``nn.Linear.forward`` itself is taken as read. Anything else (a subclass with its own forward, ``Conv1D``, a hand-written class)
runs on seeded random numbers and must equal ``x @ weight.T + bias`` ("linear") or ``x @ weight + bias`` ("conv1d").
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from te_convert.facts.stand_in import (
    ForwardError,
    ProbeError,
    describe,
    describe_parameters,
    has_no_shape,
    kind_key,
    reject_unusual_state,
    relative_error,
    run_stand_in,
    stand_in,
)

Layout = Literal["linear", "conv1d"]

_LARGE_WEIGHT = 1 << 24
"""Elements above which a weight is probed in float32, to halve 128 MiB and more."""

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
"""Largest error over the largest output. n terms round to about sqrt(n) * 2**-53 (2**-24): 3e-14 (2e-5) at n = 65536."""

_RUNS: tuple[tuple[tuple[int, ...], float, bool], ...] = (((5,), 1.0, False), ((2, 3), 1e4, False), ((2, 3), 1.0, True))
"""(leading shape, input scale, training mode). The large scale finds clamps, training mode finds dropout."""


@dataclass(frozen=True)
class LinearFacts:
    """A module that computes ``y = x @ W + b`` for inputs ``[..., in_features]`` of any rank, in both modes.

    Attributes:
        in_features: size of the last input dimension.
        out_features: size of the last output dimension.
        layout: "linear" when the weight is ``[out, in]``, "conv1d" when it is ``[in, out]``.
        weight: name of the 2-D parameter.
        bias: name of the 1-D parameter ``[out]``, or None.
    """

    in_features: int
    out_features: int
    layout: Layout
    weight: str
    bias: str | None


@dataclass(frozen=True)
class NotALinear:
    """The module computes something else, or may; ``detail`` is what was seen."""

    detail: str


def looks_like_linear(module: nn.Module) -> bool:
    """Whether a module has the parameters of a Linear: one 2-D and at most one 1-D, no children but parametrizations.

    Subclasses of ``nn.Linear`` always do, whatever they hold, so that they get an answer from :func:`probe_linear`.
    """
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag, torch.jit.ScriptModule)):
        return False
    if isinstance(module, nn.Linear):
        return True
    if any(name != "parametrizations" for name, _ in module.named_children()):
        return False
    ranks = sorted(_ranks(module))
    return ranks in ([2], [1, 2])


def packed_weight(module: nn.Module) -> str:
    """Where a Linear without a parameter keeps its weight, in words; "" for every other module.

    Linears that torch.ao has quantised hold a packed C++ object, those of GPTQ, AWQ and the like buffers of integers.  Both say
    ``in_features`` and ``out_features``.
    """
    if next(module.parameters(), None) is not None:
        return ""
    if not all(type(getattr(module, name, None)) is int for name in ("in_features", "out_features")):
        return ""
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.ScriptObject):
                type_name = str(value._type()).rpartition(".")[2]
                return f"its weight is packed in {name}, a {type_name}"
    for name, buffer in module.named_buffers():
        if buffer.dim() >= 2 and (buffer.dtype.itemsize == 1 or not buffer.is_floating_point()):
            return f"its weight is in {name}, {describe(buffer)}"
    return ""


def probe_linear(module: nn.Module) -> LinearFacts | NotALinear:
    """Find what a module computes; never changes it, its gradients, its hooks or any random state.

    The parameters' values play no part, so a module on the meta device will do.
    """
    try:
        weight, bias = _roles(module)
        if _is_plain_linear(module):
            rows, columns = _shape(module, weight)
            return LinearFacts(columns, rows, "linear", weight, bias)
        return _probe_numbers(module, weight, bias)
    except ProbeError as error:
        return NotALinear(str(error))


def probe_linear_cached(module: nn.Module, cache: dict[Hashable, LinearFacts | NotALinear]) -> LinearFacts | NotALinear:
    """:func:`probe_linear`, once for all modules of one kind (see :func:`kind_key`)."""
    key = kind_key(module)
    if key not in cache:
        cache[key] = probe_linear(module)
    return cache[key]


def _ranks(module: nn.Module) -> Iterator[int]:
    """Rank of every own parameter; a parametrized one counts as its largest original, a lazy one as -1."""
    for parameter in module.parameters(recurse=False):
        yield -1 if has_no_shape(parameter) else parameter.dim()
    for parametrization in getattr(module, "parametrizations", nn.ModuleDict()).children():
        yield max((original.dim() for original in parametrization.parameters(recurse=False)), default=-1)


def _shape(module: nn.Module, weight: str) -> tuple[int, int]:
    rows, columns = dict(module.named_parameters(recurse=False))[weight].shape
    return int(rows), int(columns)


def _roles(module: nn.Module) -> tuple[str, str | None]:
    """Names of the weight and the bias, from the parameters' ranks.

    Raises:
        ProbeError: the module holds anything else.
    """
    reject_unusual_state(module)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        raise ProbeError("it is an embedding: its weight is looked up, not multiplied")
    ranks = {name: parameter.dim() for name, parameter in module.named_parameters(recurse=False)}
    weights = [name for name, rank in ranks.items() if rank == 2]
    others = [name for name in ranks if name not in weights]
    if sorted(ranks.values()) not in ([2], [1, 2]):
        raise ProbeError(f"its parameters are not one 2-D weight and at most one 1-D bias: {describe_parameters(module)}")
    return weights[0], others[0] if others else None


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether calling the module runs ``nn.Linear.forward`` on the parameters ``weight`` and ``bias`` themselves."""
    if not isinstance(module, nn.Linear) or "forward" in vars(module):
        return False
    if type(module).forward is not nn.Linear.forward or type(module).__call__ is not nn.Module.__call__:
        return False
    registered = module._parameters
    return all(name in registered and getattr(module, name) is registered[name] for name in ("weight", "bias"))


def _probe_numbers(module: nn.Module, weight: str, bias: str | None) -> LinearFacts:
    twin = stand_in(module)
    rows, columns = _shape(module, weight)
    large = rows * columns > _LARGE_WEIGHT
    generator = torch.Generator(device="cpu").manual_seed(0)
    parameters = {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float32 if large else torch.float64, device="cpu")
        for name, p in module.named_parameters(recurse=False)
    }
    candidates = (
        LinearFacts(columns, rows, "linear", weight, bias),
        LinearFacts(rows, columns, "conv1d", weight, bias),
    )
    failures: list[ProbeError] = []
    fitting = [facts for facts in candidates if bias is None or parameters[bias].numel() == facts.out_features]
    if not fitting:
        raise ProbeError(f"its parameters do not fit together: {describe_parameters(module)}")
    for facts in fitting:
        try:
            _check(twin, facts, parameters, generator)
        except ProbeError as error:
            failures.append(error)
        else:
            return facts
    # A forward that ran says more than one that raised, which the wrong one of the two input widths always does.
    raise min(failures, key=lambda failure: isinstance(failure, ForwardError))


def _check(twin: nn.Module, facts: LinearFacts, parameters: Mapping[str, Tensor], generator: torch.Generator) -> None:
    """Compare the twin with the formula of ``facts`` over :data:`_RUNS`.

    Raises:
        ProbeError: the numbers, the shape or the dtype differ.
    """
    weight = parameters[facts.weight]
    bias = parameters[facts.bias] if facts.bias is not None else None
    formula = "F.linear(x, weight, bias)" if facts.layout == "linear" else "x @ weight + bias"
    for leading, scale, training in _RUNS:
        x = scale * torch.randn((*leading, facts.in_features), generator=generator, dtype=weight.dtype, device="cpu")
        # The formula runs first: a forward that edits the weight must not edit what it is compared with.
        expected = functional.linear(x, weight if facts.layout == "linear" else weight.t(), bias)
        y = run_stand_in(twin, parameters, x, training=training)
        if y.shape != expected.shape or y.dtype != expected.dtype:
            raise ProbeError(f"it returns {describe(y)} where {formula} returns {describe(expected)}")
        error = relative_error(y, expected)
        if error > _TOLERANCE[weight.dtype]:
            mode = "training" if training else "eval"
            raise ProbeError(f"its output differs from {formula} by {error:.1e} of the largest value in {mode} mode")
