"""Tools of the mutation suite's catalogue: places, kinds, ways to make a mistake.

A kind is a name and the ways in which its mistake can be made.  A way takes a :class:`Place` and says whether it made the mistake
there; where it does not apply, it changes nothing.  The mistakes of tests/verify/mutants.py are the first of the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.rewrite.apply import Applied
from te_convert.rewrite.fused import fused_record
from te_convert.rewrite.loans import holder_of
from te_convert.weights.ops import Fill, WeightOp
from tests.verify.mutants import FUSED_MUTANTS, LINEAR, MUTANTS, NORM_LINEAR, NORM_MLP, Planted


@dataclass
class Place:
    """A converted site in which to make a mistake.

    Attributes:
        touched: names of all sites that are wrong now; the gate must put one of them back or fail.
    """

    applied: Applied
    fqn: str
    touched: list[str] = field(default_factory=list)

    @property
    def site(self) -> Any:
        return self.applied.sites[self.fqn]

    @property
    def others(self) -> dict[str, nn.Module]:
        return {fqn: site for fqn, site in self.applied.sites.items() if fqn != self.fqn}


Way = Callable[[Place], bool]


@dataclass(frozen=True)
class Kind:
    name: str
    ways: tuple[Way, ...]

    def plant(self, place: Place) -> bool:
        """Make the mistake, in the first way that applies; False when none does."""
        if any(way(place) for way in self.ways):
            place.touched.append(place.fqn)
            return True
        return False


KINDS: dict[str, Kind] = {}


def add(name: str, *ways: Way) -> None:
    """One more way to make a mistake."""
    KINDS[name] = Kind(name, (*(KINDS[name].ways if name in KINDS else ()), *ways))


# ---- the mistakes of mutants.py, in sites that are converted already -----------------------------------------------------------
def _known(mutate: Callable[[Any, Planted], bool], fits: Callable[[Any], bool]) -> Way:
    def way(place: Place) -> bool:
        record = place.site.__dict__[SITE_ATTRIBUTE]
        same = [other for other in place.others.values() if (fused_record(other) is None) == (fused_record(place.site) is None)]
        try:
            return fits(record) and mutate(place.site, Planted(others=same))
        except (AttributeError, IndexError):  # a constructor fact that this module does not have, a weight with too few rows
            return False

    return way


def _leaf(kinds: tuple[str, ...]) -> Callable[[Any], bool]:
    return lambda record: getattr(record.decision, "kind", "") in kinds


def _fusion(record: Any) -> bool:
    return not hasattr(record.decision, "kind") and record.decision.spec.name in (LINEAR, NORM_LINEAR, NORM_MLP)


for _name, (_mutate, _kinds, _) in MUTANTS.items():
    add(_name, _known(_mutate, _leaf(_kinds)))
for _name, (_mutate, _pairs) in FUSED_MUTANTS.items():
    add(_name, _known(_mutate, _fusion))


# ---- tools -----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Slot:
    """A parameter of a TE module, where it is kept, and how it is made of the original's."""

    holder: nn.Module
    leaf: str
    op: WeightOp

    @property
    def parameter(self) -> nn.Parameter:
        found = self.holder._parameters[self.leaf]
        assert found is not None
        return found

    @property
    def role(self) -> str:
        if self.parameter.dim() > 1:
            return "matrix"
        norm = self.leaf.startswith("layer_norm_") or hasattr(self.holder, "normalized_shape")
        return ("norm " if norm else "") + ("bias" if "bias" in self.leaf else "weight")

    def put(self, value: Tensor) -> None:
        """Another Parameter, so that the original's own stays right."""
        self.holder._parameters[self.leaf] = nn.Parameter(value.contiguous(), requires_grad=self.parameter.requires_grad)


def slots(site: Any, *roles: str) -> list[Slot]:
    weights = site.__dict__[SITE_ATTRIBUTE].decision.weights
    found = [Slot(*holder_of(site, op.dest), op) for op in weights.ops if not isinstance(op, Fill)]
    return [slot for slot in found if not roles or slot.role in roles]


Change = Callable[[Tensor, Slot, Place], "Tensor | None"]


def tensor(change: Change, *roles: str, last: bool = False) -> Way:
    """Another value of the first (or last) parameter of a role that takes the change."""

    def way(place: Place) -> bool:
        candidates = slots(place.site, *roles)
        for slot in reversed(candidates) if last else candidates:
            own = slot.parameter.detach().clone()
            changed = change(own.clone(), slot, place)
            if changed is not None and not torch.equal(changed, own):
                slot.put(changed)
                return True
        return False

    return way


def around(change: Callable[..., Any], fits: Callable[[Any], bool] = lambda site: True) -> Way:
    """Another forward: ``change(site, right, *args, **kwargs)`` with the right forward."""

    def way(place: Place) -> bool:
        site = place.site
        if not fits(site):
            return False
        wrap(site, change)
        return True

    return way


def wrap(module: Any, change: Callable[..., Any]) -> None:
    right = type(module)
    name = "te_forward" if hasattr(right, "te_forward") else "forward"
    own = getattr(right, name)

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(self, lambda *a, **k: own(self, *a, **k), *args, **kwargs)

    module.__class__ = type(f"Wrong{right.__name__}", (right,), {name: wrong})


def output(change: Callable[[Tensor], Tensor]) -> Way:
    """Another output."""
    return around(lambda site, right, *args, **kwargs: change(right(*args, **kwargs)))


def with_parameters(site: Any, change: Callable[[Slot, nn.Parameter], Tensor]) -> Callable[..., Any]:
    """A forward that computes with other tensors in place of the parameters."""
    held = [(slot, slot.parameter) for slot in slots(site)]

    def wrong(_: Any, right: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        current = [(slot, slot.parameter) for slot, _ in held]
        try:
            for slot, parameter in current:
                slot.holder._parameters[slot.leaf] = change(slot, parameter)  # type: ignore[assignment]
            return right(*args, **kwargs)
        finally:
            for slot, parameter in current:
                slot.holder._parameters[slot.leaf] = parameter

    return wrong


def stale(*roles: str, straight: bool = False, only: Callable[[Slot], bool] = lambda slot: True) -> Way:
    """The forward computes with copies; ``straight``: their gradients arrive at the parameters all the same."""

    def way(place: Place) -> bool:
        chosen = [slot for slot in slots(place.site, *roles) if only(slot)]
        if not chosen:
            return False
        copies = {(id(slot.holder), slot.leaf): slot.parameter.detach().clone() for slot in chosen}

        def old(slot: Slot, parameter: nn.Parameter) -> Tensor:
            copy = copies.get((id(slot.holder), slot.leaf))
            if copy is None:
                return parameter
            copy = copy.to(parameter.dtype)
            return copy + (parameter - parameter.detach()) if straight else copy

        wrap(place.site, with_parameters(place.site, old))
        return True

    return way


MATRIX, BIAS, GAMMA, BETA = "matrix", "bias", "norm weight", "norm bias"


def set_to(name: str, change: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """Another value of an attribute; False where it is the same or is not there."""

    def apply(module: Any) -> bool:
        if not hasattr(module, name) or getattr(module, name) == change(getattr(module, name)):
            return False
        setattr(module, name, change(getattr(module, name)))
        return True

    return apply
