"""Mistakes that any site can make: outputs, gradients, ties and wiring."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_convert.facts.sharing import find_parents
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.rewrite.fused import fused_record
from te_convert.rewrite.loans import holder_of
from te_convert.weights.ops import Fill
from tests.verify.mutant_tools import (
    BIAS,
    GAMMA,
    MATRIX,
    Place,
    Way,
    add,
    around,
    output,
    slots,
    with_parameters,
    wrap,
)


# ---- outputs and inputs of any site ----------------------------------------------------------------------------------------
def _masked(y: Tensor, index: int) -> Tensor:
    if y.dim() < 2 or not y.shape[-2]:
        return y
    keep = torch.ones(y.shape[-2], 1, dtype=y.dtype)
    keep[index] = 0
    return y * keep


def _first_result(site: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
    """A cache that is never emptied."""
    y = right(*args, **kwargs)
    kept = site.__dict__.setdefault("_first", {})
    return kept.setdefault((y.shape, y.dtype), y.detach()) + (y - y.detach())


def _changes_its_input(site: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
    y = right(*args, **kwargs)
    args[0].data.mul_(1.001)
    return y


def _one_token(site: Any, right: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    y = right(x, *args, **kwargs)
    length = x.shape[1] if x.dim() == 4 else x.shape[-2] if x.dim() > 2 else 0
    return y * 1.01 if length == 1 else y


def _larger_batch(site: Any, right: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Rows beyond the batch of the example are not computed."""
    y = right(x, *args, **kwargs)
    return torch.cat((y[:2], torch.zeros_like(y[2:]))) if y.dim() > 2 else y


def _half_rounded(y: Tensor) -> Tensor:
    return y.to(torch.bfloat16).to(y.dtype) * (1 + torch.finfo(y.dtype).eps)


add("output x 1.001", output(lambda y: y * 1.001))
add("sign", output(lambda y: -y))
add("dropout in eval", output(lambda y: F.dropout(y, 0.1)))
add("dropout in train", around(lambda site, right, *a, **k: F.dropout(right(*a, **k), 0.1, site.training)))
add("output dtype", output(lambda y: y.double()))
add("rounded inside", output(_half_rounded))
add("not a number", output(lambda y: y * float("nan")))
add("raises", output(lambda y: y.view(y.numel() + 1)))
add("first position lost", output(lambda y: _masked(y, 0)))
add("last position lost", output(lambda y: _masked(y, -1)))
add("positions shifted", output(lambda y: y.roll(1, -2)))
add("samples exchanged", output(lambda y: y.roll(1, 0)))
add("samples mixed", output(lambda y: y + 1e-3 * y.mean(0, keepdim=True)))
add("dimensions of size one squeezed", output(lambda y: y.squeeze()))
add("an earlier result again", around(_first_result))
add("input changed in place", around(_changes_its_input))
add("wrong for a single token", around(_one_token))
add("samples beyond the second lost", around(_larger_batch))
add("output clamped", output(lambda y: y.clamp(-1, 1)))
add("output clamped from below", output(lambda y: y.clamp(min=-0.5)))


# ---- gradients -------------------------------------------------------------------------------------------------------------
class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].to(torch.bfloat16).to(gradients[0].dtype)


def _detached(site: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
    return right(*(a.detach() if isinstance(a, Tensor) else a for a in args), **kwargs)


def _first_sample_only(site: Any, right: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return right(torch.cat((x[:1], x[1:].detach())), *args, **kwargs)


def weights_detached(*roles: str) -> Way:
    def way(place: Place) -> bool:
        if not slots(place.site, *roles):
            return False
        wrap(place.site, with_parameters(place.site, lambda slot, p: p.detach() if slot.role in roles else p))
        return True

    return way


def frozen(role: str) -> Way:
    def way(place: Place) -> bool:
        found = [slot for slot in slots(place.site, role) if slot.parameter.requires_grad]
        for slot in found[:1]:
            slot.holder._parameters[slot.leaf] = nn.Parameter(slot.parameter.detach(), requires_grad=False)
        return bool(found)

    return way


def _constant_trained(place: Place) -> bool:
    """A constant that the conversion filled in becomes a parameter to train."""
    weights = place.site.__dict__[SITE_ATTRIBUTE].decision.weights
    for op in weights.ops:
        if isinstance(op, Fill):
            holder, name = holder_of(place.site, op.dest)
            constant = holder._parameters[name]
            assert constant is not None
            constant.requires_grad_(True)
            return True
    return False


add("gradient of the input lost", around(_detached))
add("gradient of all samples but one lost", around(_first_sample_only))
add("gradient of the weights lost", weights_detached(MATRIX))
add("gradient of the biases lost", weights_detached(BIAS))
add("gradient of the norm lost", weights_detached(GAMMA))
add("gradient doubled", output(lambda y: 2 * y - y.detach()))
add("gradient negated", output(lambda y: 2 * y.detach() - y))
add("gradient rounded", output(lambda y: _Rounded.apply(y)))
add("weight frozen", frozen(MATRIX))
add("bias frozen", frozen(BIAS))
add("norm weight frozen", frozen(GAMMA))
add("filled constant trained", _constant_trained)


# ---- ties and wiring -------------------------------------------------------------------------------------------------------
def _tie_split(place: Place) -> bool:
    counts: dict[int, int] = {}
    for module in place.applied.model.modules():
        for parameter in module._parameters.values():
            counts[id(parameter)] = counts.get(id(parameter), 0) + (parameter is not None)
    for slot in slots(place.site):
        if counts.get(id(slot.parameter), 0) > 1:
            slot.put(slot.parameter.detach().clone())
            return True
    return False


def _tied_to_another(place: Place) -> bool:
    for slot in slots(place.site, MATRIX):
        for other in place.others.values():
            for candidate in slots(other, MATRIX):
                if candidate.parameter.shape == slot.parameter.shape and candidate.parameter is not slot.parameter:
                    slot.holder._parameters[slot.leaf] = candidate.parameter
                    return True
    return False


def _alike(place: Place) -> tuple[str, nn.Module] | None:
    """Another site that is one module in the tree and takes and gives the same sizes."""
    if fused_record(place.site) is not None:
        return None
    for fqn, other in place.others.items():
        same = [tuple(p.shape) for p in other.parameters()] == [tuple(p.shape) for p in place.site.parameters()]
        if fused_record(other) is None and same and type(other) is type(place.site):
            return fqn, other
    return None


def _sites_exchanged(place: Place) -> bool:
    found = _alike(place)
    if found is None:
        return False
    site, (fqn, other) = place.site, found
    parents = find_parents(place.applied.model)
    for module, new in ((site, other), (other, site)):
        for parent, name in parents[id(module)]:
            parent._modules[name] = new
    place.touched.append(fqn)
    return True


def _used_twice(place: Place) -> bool:
    found = _alike(place)
    if found is None:
        return False
    for parent, name in find_parents(place.applied.model)[id(place.site)]:
        parent._modules[name] = found[1]
    place.touched.append(found[0])
    return True


def _left_out(place: Place) -> bool:
    """The module is skipped where its result has the size of its input."""
    site = place.site
    if fused_record(site) is not None:
        return False
    matrices = slots(site, MATRIX)
    if any(slot.parameter.shape[0] != slot.parameter.shape[1] for slot in matrices):
        return False
    wrap(site, lambda self, right, x: x)
    return True


add("tie split", _tie_split)
add("tied to another weight", _tied_to_another)
add("two sites exchanged", _sites_exchanged)
add("one site used for another", _used_twice)
add("site left out", _left_out)
