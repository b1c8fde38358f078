"""A second call on other inputs with other weights: does everything that is computed from a weight follow it?

Weights of two or more dimensions change sign along their last dimension, in place and after a first call.  Signs change back
exactly, so no copy of a weight is made.  A copy that the first call kept, of a weight or of a result, is old in the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from te_convert.capture.preserve import seed_all
from te_convert.capture.run import SEED
from te_convert.capture.scenario import Scenario
from te_convert.capture.tensors import iter_tensors
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.rewrite import nested
from te_convert.rewrite.apply import Applied
from te_convert.rewrite.fused import fused_record
from te_convert.rewrite.loans import LOANS, Loan, holder_of
from te_convert.rewrite.site import is_converted
from te_convert.verify.compare import Outputs
from te_convert.verify.gradients import sketch
from te_convert.verify.padding import hide_padding, padding_mask
from te_convert.verify.perturb import OriginalParameters, original_parameters, outer_name
from te_convert.verify.precision import widened
from te_convert.verify.run import Setting, arranged
from te_convert.weights.ops import SwapHalves, Take


def moved_outputs(model: nn.Module, first: Scenario, second: Scenario, setting: Setting, own: Iterable[object] = ()) -> Outputs:
    """(path, output) of the second call, and (parameter name, products) of every weight that the model shows by then.

    Args:
        model: an original or a converted model.
        first: what to call it with before the weights change.
        second: and after it.
        setting: perturbation, precision and padding.
        own: original Parameters outside the model that may be used in place of the model's; those on the same memory as one of
            the model's change with it.

    Raises:
        Exception: whatever the model raises.
    """
    with arranged(model, first, setting):
        _call(model, first, setting)
        with _signs_changed(model, own):
            output = _call(model, second, setting)
            padded = padding_mask(model, second) if setting.hide_padding else None
            tensors = [(path, tensor.detach().clone()) for path, tensor in iter_tensors(output)]
            products = {name: sketch(tensor)[1:] for name, tensor in shown_parameters(model)}
    weights = [(f"parameter {name}", products[name]) for name in sorted(products)]
    return [*(tensors if padded is None else [(path, hide_padding(tensor, padded)) for path, tensor in tensors]), *weights]


def _call(model: nn.Module, scenario: Scenario, setting: Setting) -> Any:
    with widened(model, setting.widen) if setting.widen is not None else nullcontext():
        seed_all(SEED)
        return scenario.call(model)


def own_of(applied: Applied) -> list[object]:
    """The original Parameters of all sites that this rewrite made."""
    return [parameter for own in applied.taken.values() for parameter in own.values()]


def shown_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every floating parameter of the original as the model has it now: what its members show, and what its weight maps give.

    A module under several names shows its parameters under each of them, as a fusion that holds a part of it does.
    """
    inner = {id(part) for module in model.modules() if is_converted(module) for name, part in nested.te_parts(module) if name}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.jit.ScriptModule) or id(module) in inner:
            continue
        converted = is_converted(module)
        outer = outer_name(prefix, module) if converted else prefix
        for name, tensor in _of_converted(module) if converted else _of_plain(module):
            if type(tensor) in (nn.Parameter, torch.Tensor) and tensor.is_floating_point() and not tensor.is_meta:
                yield f"{outer}.{name}" if outer else name, tensor


def _of_plain(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Its own parameters, and those that it borrows."""
    yield from module._parameters.items()
    for name, loan in module.__dict__.get(LOANS, {}).items():
        yield name, loan.read()


def _of_converted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """By the loans of a fusion's members, which is what they show, else by its weight map."""
    record, weights = fused_record(module), module.__dict__[SITE_ATTRIBUTE].decision.weights
    loans: dict[str, Loan] = {}
    for _, member in record.members if record is not None else ():
        loans |= {loan.source: loan for loan in member.__dict__.get(LOANS, {}).values() if loan.record is record}
    for source in weights.sources if weights is not None else ():
        yield source, loans[source].read() if source in loans else weights.restore(source, lambda dest: _held(module, dest))


def _held(module: nn.Module, dest: str) -> Any:
    holder, name = holder_of(module, dest)
    return holder._parameters[name]


@contextmanager
def _signs_changed(model: nn.Module, own: Iterable[object]) -> Iterator[None]:
    """Change the signs of every other column of each weight, in the layout of the original, for the time being."""
    changed: list[OriginalParameters] = []
    with torch.no_grad():
        try:
            for found in list(_matrices(model, own)):
                _change_signs(found)
                changed.append(found)
            yield
        finally:
            for found in changed:
                _change_signs(found)


def _matrices(model: nn.Module, own: Iterable[object]) -> Iterator[OriginalParameters]:
    """Parameters whose original has two dimensions or more: the model's, and those that share no memory with one of them."""
    taken: set[int] = set()
    for found in original_parameters(model):
        parameter = found.parameter
        if type(parameter) is nn.Parameter and parameter.is_floating_point() and parameter.numel() and not parameter.is_meta:
            taken.add(parameter.untyped_storage().data_ptr())
            if parameter.dim() + isinstance(found.op, Take) > 1:
                yield found
    for other in own:
        if type(other) is nn.Parameter and other.dim() > 1 and other.is_floating_point():
            memory = other.untyped_storage().data_ptr()
            if memory not in taken:
                taken.add(memory)
                yield OriginalParameters(other, ())


def _change_signs(found: OriginalParameters) -> None:
    parts = found.parts()
    for part in parts:
        generator = torch.Generator().manual_seed(part.shape[-1])
        signs = torch.randint(0, 2, (part.shape[-1],), generator=generator) * 2 - 1
        part.mul_(signs.to(part.device, part.dtype))
    if isinstance(found.op, SwapHalves):  # its parts are copies
        found.put(parts)
