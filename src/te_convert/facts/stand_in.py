"""The stand-in on which every numeric probe of this package runs: foreign code with parameters of the probe's choice.

:func:`stand_in`, :func:`run_stand_in` and :func:`isolated` leave the module, its hooks, its gradients and the random state alone;
:func:`kind_key` tells which modules need probing only once.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from te_convert.capture.ambient import float32_by_default

_MODULE_STATE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
"""Attributes that every ``nn.Module`` has (parameters, children, hooks, ``training``) or that compiling adds."""


class ProbeError(Exception):
    """The module is not the operation that is looked for; the message says what was seen."""


class ForwardError(ProbeError):
    """The module's forward raised on the input that it was given."""


def describe(tensor: Tensor) -> str:
    """Dtype and shape of a tensor in a few characters, as in ``float32[2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def describe_parameters(module: nn.Module) -> str:
    """Name, dtype and shape of every parameter that a module itself owns."""
    return ", ".join(f"{name} {describe(p)}" for name, p in module.named_parameters(recurse=False)) or "none"


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value, in float64."""
    scale = expected.double().abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float((value.double() - expected.double()).abs().max() / scale)


def has_no_shape(parameter: Tensor) -> bool:
    """Whether a parameter is lazy: made without a shape, which its first use decides."""
    return bool(is_lazy(parameter))


def reject_unusual_state(module: nn.Module) -> None:
    """Check that a module holds nothing but floating-point parameters with elements.

    Raises:
        ProbeError: TorchScript, children, buffers, a parameter under two names, lazy, empty or integer parameters.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ProbeError("it is TorchScript")
    children = [name for name, _ in module.named_children()]
    if "parametrizations" in children:
        raise ProbeError(f"a parametrization computes {', '.join(getattr(module, 'parametrizations', {}))} before each call")
    if children:
        raise ProbeError(f"it has child modules: {', '.join(children)}")
    buffers = [name for name, _ in module.named_buffers(recurse=False)]
    if buffers:
        raise ProbeError(f"it has buffers: {', '.join(buffers)}")
    _reject_second_names(module)
    for name, parameter in module.named_parameters(recurse=False):
        if has_no_shape(parameter):
            raise ProbeError(f"its parameter {name} is lazy and has no shape yet")
        if parameter.numel() == 0:
            raise ProbeError(f"its parameter {name} has no elements")
        if not parameter.is_floating_point():
            raise ProbeError(f"its parameter {name} is {describe(parameter)}, not floating point")


def _reject_second_names(module: nn.Module) -> None:
    names: dict[int, str] = {}
    for name, parameter in module._parameters.items():
        if parameter is not None and names.setdefault(id(parameter), name) != name:
            raise ProbeError(f"it has one parameter under two names: {names[id(parameter)]} and {name}")


def stand_in(module: nn.Module) -> nn.Module:
    """Copy a childless module without its hooks and without its parameters' data.

    Bound methods among its attributes are bound to the copy. Parameters come with each :func:`run_stand_in`.

    Raises:
        ProbeError: an attribute cannot be copied.
    """
    cls = type(module)
    twin: nn.Module = cls.__new__(cls)
    nn.Module.__init__(twin)
    attributes = {name: value for name, value in vars(module).items() if name not in _MODULE_STATE}
    try:
        vars(twin).update(copy.deepcopy(attributes, {id(module): twin}))
    except Exception as error:  # whatever an attribute's own copying raises
        raise ProbeError(f"its attributes cannot be copied ({brief(error)})") from error
    twin._parameters.update(dict.fromkeys(module._parameters))
    return twin


def run_stand_in(
    twin: nn.Module, parameters: Mapping[str, Tensor], x: Tensor, *, training: bool = False, finite: bool = True
) -> Tensor:
    """Call a stand-in on the CPU without gradients, autocast, warnings or effect on the random state.

    Args:
        twin: what :func:`stand_in` made.
        parameters: a value for each parameter.
        x: input with at least one element; a copy of it is passed.
        training: mode of the call.
        finite: whether NaN and infinity in the output are refused.

    Raises:
        ProbeError: no elements, an exception, a changed input, or an output that is not one finite tensor.
    """
    if x.numel() == 0:
        raise ProbeError("the input is empty")
    twin._parameters.update({name: nn.Parameter(value, requires_grad=False) for name, value in parameters.items()})
    given = x.clone()
    try:
        with isolated():
            y = twin.train(training)(given)
    except Exception as error:  # whatever a foreign forward raises
        raise ForwardError(f"forward raised {brief(error)}") from error
    if not isinstance(y, Tensor):
        raise ProbeError(f"forward returns a {type(y).__name__}, not one tensor")
    if y.device.type != "cpu":
        raise ProbeError(f"forward returns a tensor on {y.device} for an input on the CPU")
    if not torch.equal(given, x):
        raise ProbeError("forward changes its input in place")
    if finite and not bool(torch.isfinite(y).all()):
        raise ProbeError("forward returns NaN or infinity for ordinary numbers")
    return y


@contextmanager
def isolated() -> Iterator[None]:
    """Run foreign code on the CPU without gradients, autocast, warnings or another default dtype; the random state comes back."""
    state = torch.get_rng_state()
    try:
        with (
            warnings.catch_warnings(),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch.device("cpu"),
            float32_by_default(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_rng_state(state)


def kind_key(module: nn.Module) -> Hashable:
    """Equal for modules that compute the same up to their parameters' values: class, parameters, attributes.

    Numbers, strings and tuples of them count by value, other attributes by identity; ``training`` and hooks do not count.
    """
    parameters = tuple(
        (name, None if p is None or has_no_shape(p) else tuple(p.shape), None if p is None else p.dtype)
        for name, p in module._parameters.items()
    )
    attributes = tuple((name, _by_value(value)) for name, value in vars(module).items() if name not in _MODULE_STATE)
    return type(module), parameters, tuple(module._buffers), tuple(module._modules), attributes


def _by_value(value: object) -> Hashable:
    """A key of an attribute; ``repr`` tells True from 1 and 1.0."""
    if isinstance(value, (int, float, str, torch.dtype, torch.device, type(None))):
        return repr(value)
    if isinstance(value, tuple):
        return tuple(_by_value(item) for item in value)
    return _Same(value)


class _Same:
    """Hashable stand-in of any object, equal for the same object only; it keeps the object alive, so its id stays taken."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def brief(error: Exception) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
