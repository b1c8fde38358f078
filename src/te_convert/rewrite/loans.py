"""Modules whose parameters live in a fused TE module: the same objects, of a class that borrows the parameters.

A member keeps its identity, its place, its hooks and its original forward; ``member.weight`` is the part of the fused parameter
that was its weight, so whoever reads it, or calls the member on a path that nobody recorded, gets the original's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from te_convert.facts.wrappers import is_sharded
from te_convert.reference.parallel import enter_region, leave_region
from te_convert.replacements.parallel import Parallel
from te_convert.rewrite.lazy import unwrap
from te_convert.weights.ops import Move, Transpose, gather

if TYPE_CHECKING:
    from te_convert.rewrite.fused import FusedRecord

LOANS = "_te_convert_loans"
PARALLEL = "_te_convert_parallel"
"""Where a Linear of a tensor-parallel fusion keeps how its weight is divided."""
_ORDER = "_te_convert_order"
"""Where a borrower keeps the names of all parameters that it had, in their order."""

_ORIGINAL_LAYOUT: ContextVar[bool] = ContextVar("te_convert_original_layout", default=False)
"""While True, members write their borrowed parameters into state dicts and the fused modules write nothing."""


@contextmanager
def original_layout() -> Iterator[None]:
    """``state_dict()`` gives the original's keys, in the original's order."""
    token = _ORIGINAL_LAYOUT.set(True)
    try:
        yield
    finally:
        _ORIGINAL_LAYOUT.reset(token)


def in_original_layout() -> bool:
    """Whether state dicts are being written in the original layout."""
    return _ORIGINAL_LAYOUT.get()


class Loan:
    """Where one borrowed parameter lives: a part of a parameter of a fused module, or a stack of several.

    Attributes:
        pieces: (operation, the source's place in it, module that holds its destination, parameter name there).
    """

    def __init__(self, record: FusedRecord, source: str) -> None:
        self.record, self.source = record, source
        self.pieces = [
            (op, op.sources.index(source), *holder_of(record.module, op.dest)) for op in record.decision.weights.using(source)
        ]

    def read(self) -> torch.Tensor:
        """The parameter, or a view of its part in the fused one (a new tensor where no view can show it)."""
        own = self.record.own
        if own is not None:
            original = own.get(self.source)
            if original is not None:
                return original
        parts = [op.part(_held(module, name), index) for op, index, module, name in self.pieces]
        return gather([op for op, *_ in self.pieces], parts)

    def parameter(self) -> nn.Parameter | None:
        """The fused module's Parameter itself where it is the whole of this one, else None."""
        op, _, module, name = self.pieces[0]
        return module._parameters[name] if isinstance(op, Move) else None


def holder_of(module: nn.Module, dest: str) -> tuple[nn.Module, str]:
    """The module inside a TE module that holds a parameter, and the parameter's name there."""
    path, _, name = dest.rpartition(".")
    return module.get_submodule(path), name


def _held(module: nn.Module, name: str) -> torch.Tensor:
    tensor = module._parameters[name]
    assert tensor is not None
    return tensor


class Borrower(nn.Module):
    """Mixin of every member of a fusion."""

    _te_base: type[nn.Module]
    _te_mixin: type[Borrower]
    _te_names: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward on the borrowed parameters."""
        return self.eager(*args, **kwargs)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The original class's forward on the borrowed parameters, and on values of lazy tensors."""
        self._check_gathered(args)
        values = {name: unwrap(value) for name, value in kwargs.items()}
        parallel: Parallel | None = self.__dict__.get(PARALLEL)
        if parallel is not None:
            (x,) = (*map(unwrap, args), *values.values())
            return self._eager_part(parallel, x)
        return self._te_base.forward(self, *map(unwrap, args), **values)

    def _eager_part(self, parallel: Parallel, x: torch.Tensor) -> torch.Tensor:
        """What a Linear of which this rank has a part computes, with the exchanges that TE's module would make."""
        weight, bias, transposed = None, None, False
        for loan in self.__dict__[LOANS].values():
            tensor = loan.read()
            if tensor.dim() == 1:
                bias = tensor
            else:
                op = loan.pieces[0][0]
                weight, transposed = tensor, isinstance(op, Transpose) or bool(getattr(op, "transposed", False))
        assert weight is not None
        weight = weight.t() if transposed else weight
        if parallel.mode == "column":
            return nn.functional.linear(enter_region(x, parallel.group), weight, bias)
        y = leave_region(nn.functional.linear(x, weight), parallel.group)
        return y if bias is None else y + bias

    def _check_gathered(self, args: tuple[Any, ...]) -> None:
        """FSDP2 gathers the parameters of one unit at a time; a member in another unit than its fused module finds them sharded."""
        if any(map(is_sharded, args)):  # tensor parallelism by DTensors computes on shards
            return
        for name, loan in self.__dict__[LOANS].items():
            _, _, module, held = loan.pieces[0]
            if is_sharded(module._parameters[held]):
                whole = loan.record.decision.fqn
                raise RuntimeError(
                    f"te_convert: {name} of this {self._te_base.__name__} is part of {whole}, which is in another "
                    "fully_shard unit and is not gathered here; give both one unit (fully_shard each block, not its parts), "
                    "or convert with fuse=False"
                )

    def borrowed(self) -> tuple[torch.Tensor, ...]:
        """The borrowed parameters."""
        return tuple([loan.read() for loan in self.__dict__[LOANS].values()])

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module's.

        Raises:
            AttributeError: the name is that of a borrowed parameter.
        """
        if name in self._te_names:
            raise AttributeError(
                f"{name} of this {self._te_base.__name__} is part of a fused Transformer Engine module and cannot be replaced; "
                "change its values in place, or call te_convert.revert(model) first"
            )
        super().register_parameter(name, param)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if in_original_layout():
            save_loans(self, destination, prefix, keep_vars)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self._te_base, self._te_mixin, self._te_names), self.__dict__


_CLASSES: dict[tuple[type[nn.Module], type[Borrower], tuple[str, ...]], type[nn.Module]] = {}


def borrower_class(base: type[nn.Module], mixin: type[Borrower], names: Sequence[str]) -> type[nn.Module]:
    """``base`` with ``mixin`` in front, and with properties in place of the parameters ``names``."""
    key = (base, mixin, tuple(names))
    if key not in _CLASSES:
        body: dict[str, Any] = {name: property(_reader(name)) for name in names}
        body |= {"_te_base": base, "_te_mixin": mixin, "_te_names": key[2]}
        body |= {"__module__": base.__module__, "__doc__": f"{base.__name__}, a member of a fused Transformer Engine module."}
        _CLASSES[key] = type(base.__name__, (mixin, base), body)
    return _CLASSES[key]


def _reader(name: str) -> Callable[[Any], torch.Tensor]:
    def read(module: Any) -> torch.Tensor:
        loan: Loan = module.__dict__[LOANS][name]
        return loan.read()

    return read


def _rebuild(base: type[nn.Module], mixin: type[Borrower], names: tuple[str, ...]) -> nn.Module:
    cls = borrower_class(base, mixin, names)
    return cls.__new__(cls)


def lend(module: nn.Module, mixin: type[Borrower], loans: dict[str, Loan]) -> None:
    """Turn a module into a borrower; one that already borrows (a norm of several fusions) stays as it is."""
    if is_borrower(module):
        return
    module.__dict__[_ORDER] = tuple(module._parameters)
    for name in loans:
        del module._parameters[name]
    module.__dict__[LOANS] = loans
    module.__class__ = borrower_class(type(module), mixin, tuple(loans))


def give_back(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Turn a borrower back into what it was, with these parameters, in their order."""
    borrower: Any = module
    module.__class__ = borrower._te_base
    del module.__dict__[LOANS]
    held = {**parameters, **module._parameters}
    order = [name for name in module.__dict__.pop(_ORDER, ()) if name in held]
    module._parameters.clear()
    module._parameters.update({name: held[name] for name in dict.fromkeys((*order, *held))})


def save_loans(module: nn.Module, destination: Any, prefix: str, keep_vars: bool) -> None:
    """Write what a module borrows into a state dict under the original names."""
    for name, loan in module.__dict__.get(LOANS, {}).items():
        tensor = loan.read()
        destination[prefix + name] = tensor if keep_vars else tensor.detach()


def is_borrower(module: nn.Module) -> bool:
    """True for a module whose parameters live in a fused module."""
    return LOANS in module.__dict__
