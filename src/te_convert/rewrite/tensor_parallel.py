"""Divide the TE modules of a converted model among tensor-parallel ranks, and put them together again.

Parameter objects stay and hold this rank's part of their values, so hooks, names and what members of fusions borrow go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from te_convert.errors import InputError
from te_convert.match.parallel_regions import assemble, divide
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.plan.tensor_parallel import Split
from te_convert.replacements.parallel import Parallel
from te_convert.rewrite.fused import ROWS, FusedRecord
from te_convert.rewrite.loans import LOANS, PARALLEL, Loan, is_borrower
from te_convert.rewrite.materialize import rebuild
from te_convert.rewrite.portable import build_converted
from te_convert.rewrite.site import is_converted
from te_convert.weights.ops import Concat, WeightMap

Cut = tuple[int, tuple[tuple[int, int], ...]]
"""Dimension and segments of a divided parameter, as ``match.parallel_regions.divide`` takes them."""

Wholes = dict[int, Tensor]
"""id of a Parameter → its values on all ranks together."""

_REFUSED = {
    "save": (
        "a tensor-parallel model is not written as a directory: each rank has a part of it",
        "save te_convert.original_state_dict(model) on one rank (all have to call it), or convert without tp_mesh",
    ),
    "verify": (
        "verify does not compare a model that is divided among ranks",
        "convert(tp_mesh=...) compares it: see report.parity",
    ),
    "remap": ("the moments of a tensor-parallel model would be one rank's part", "make the optimizer after convert"),
}
"""Use → what is the matter, what to do."""

_MODES = {"gate": "column", "up": "column", "fc1": "column", "linear": "column", "fc2": "row"}
"""Role of a member → how its part of the weight is divided."""


def parallel_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of which this rank has a part."""
    found = [(name, module) for name, module in model.named_modules() if is_converted(module)]
    return [(name, module) for name, module in found if module.__dict__[SITE_ATTRIBUTE].parallel is not None]


def is_parallel(model: nn.Module) -> bool:
    """Whether a model is divided among ranks."""
    return bool(parallel_modules(model))


def refuse_parallel(model: nn.Module, use: str) -> None:
    """For what a model that is divided among ranks cannot do, a key of ``_REFUSED``.

    Raises:
        InputError: the model is one.
    """
    if is_parallel(model):
        raise InputError(*_REFUSED[use])


def tied_modules(model: nn.Module) -> frozenset[str]:
    """Names of converted modules one of whose divisible parameters another module holds too."""
    held: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            held[id(parameter)] = held.get(id(parameter), 0) + (parameter is not None)
    return frozenset(
        name
        for name, module in model.named_modules()
        if is_converted(module)
        and any(held[id(p)] > 1 for key, p in module._parameters.items() if p is not None and not key.startswith("layer_norm"))
    )


def split_model(model: nn.Module, splits: Sequence[Split], group: Any, size: int, rank: int) -> Wholes:
    """Leave this rank its part of each module named.

    Returns:
        The values that the divided parameters had.

    Raises:
        EnvironmentLacksError: the installed Transformer Engine does not take the arguments; nothing is changed then.
    """
    made, wholes = [], {}
    for split in splits:
        module = model.get_submodule(split.fqn)
        record: Any = module.__dict__[SITE_ATTRIBUTE]
        parallel = Parallel(split.mode, group, size, rank)
        old = build_converted(type(module), record.decision, record.backend)
        made.append((split, module, parallel, old, build_converted(type(module), record.decision, record.backend, parallel)))
    for split, module, parallel, old, new in made:
        record = module.__dict__[SITE_ATTRIBUTE]
        rebuild(module, old, new)
        record.parallel, record.cuts = parallel, _cuts(module, split)
        for name, (dim, segments) in record.cuts.items():
            parameter = module._parameters[name]
            assert parameter is not None
            wholes[id(parameter)] = parameter.data
            _set(parameter, lambda whole, d=dim, s=segments: divide(whole, d, s, rank, size))
            parameter.tensor_model_parallel, parameter.partition_dim = True, dim  # type: ignore[attr-defined]  # TE's own marks
        if isinstance(record, FusedRecord):
            _divide_members(record, size)
    return wholes


def _cuts(module: nn.Module, split: Split) -> dict[str, Cut]:
    held = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if split.mode == "heads":
        return {}
    if split.mode == "row":
        return {"weight": (1, ((held["weight"].shape[1], 1),))}
    if split.mode == "column":
        return {name: (0, split.segments) for name in ("weight", "bias") if name in held}
    rows: dict[str, Cut] = {name: (0, split.segments) for name in ("fc1_weight", "fc1_bias") if name in held}
    return {**rows, "fc2_weight": (1, ((held["fc2_weight"].shape[1], 1),))}


def _set(parameter: nn.Parameter, change: Any) -> None:
    """New values and gradient for a Parameter that stays the same object."""
    gradient = parameter.grad
    parameter.grad = None
    parameter.data = change(parameter.detach()).contiguous().clone()
    if gradient is not None:
        parameter.grad = change(gradient).contiguous().clone()


def _divide_members(record: FusedRecord, size: int) -> None:
    """Members borrow their part of this rank's part."""
    record.whole = record.decision
    ops = tuple(
        replace(op, rows=tuple(rows // size for rows in op.rows)) if isinstance(op, Concat) and op.dest in record.cuts else op
        for op in record.decision.weights.ops
    )
    record.decision = replace(record.decision, weights=WeightMap(ops))
    for role, member in record.members:
        if role not in _MODES or not is_borrower(member):
            continue
        assert record.parallel is not None
        member.__dict__[PARALLEL] = replace(record.parallel, mode=_MODES[role])
        if ROWS in member.__dict__:
            member.__dict__[ROWS] //= size
    _renew_loans(record)


def _renew_loans(record: FusedRecord) -> None:
    for _, member in record.members:
        loans = member.__dict__.get(LOANS, {})
        for name, loan in list(loans.items()):
            if loan.record is record:
                loans[name] = Loan(record, loan.source)


def unsplit_model(model: nn.Module, wholes: Wholes | None = None) -> None:
    """Give every rank the whole of every module again; all ranks have to take part, unless they still have ``wholes``."""
    for _, module in parallel_modules(model):
        record: Any = module.__dict__[SITE_ATTRIBUTE]
        parallel = record.parallel
        for name, (dim, segments) in record.cuts.items():
            parameter: Any = module._parameters[name]
            if wholes is None or parameter.grad is not None:
                _set(parameter, lambda part, d=dim, s=segments, p=parallel: assemble(_all_parts(part, p), d, s))
            if wholes is not None:
                parameter.data = wholes[id(parameter)]
            for mark in ("tensor_model_parallel", "partition_dim"):
                parameter.__dict__.pop(mark, None)
        whole = record.decision
        if isinstance(record, FusedRecord) and record.whole is not None:
            record.decision = whole = record.whole
            record.whole = None
        old = build_converted(type(module), whole, record.backend, parallel)
        rebuild(module, old, build_converted(type(module), whole, record.backend))
        record.parallel, record.cuts = None, {}
        if isinstance(record, FusedRecord):
            for _, member in record.members:
                member.__dict__.pop(PARALLEL, None)
                if ROWS in member.__dict__:
                    member.__dict__[ROWS] *= parallel.size
            _renew_loans(record)


def _all_parts(part: Tensor, parallel: Parallel) -> list[Tensor]:
    """The parts of all ranks in their order."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(parallel.size)]
    torch.distributed.all_gather(parts, part, group=parallel.group)
    return parts


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """Every Parameter with all of its values for the time being, on every rank; all ranks have to take part.

    The values of before are put back afterwards.  The model must not run meanwhile.
    """
    saved: list[tuple[Any, Tensor]] = []
    records: list[tuple[FusedRecord, Any]] = []
    try:
        for _, module in parallel_modules(model):
            record: Any = module.__dict__[SITE_ATTRIBUTE]
            for name, (dim, segments) in record.cuts.items():
                parameter: Any = module._parameters[name]
                saved.append((parameter, parameter.data))
                parameter.data = assemble(_all_parts(parameter.detach(), record.parallel), dim, segments)
            if isinstance(record, FusedRecord) and record.whole is not None:
                records.append((record, record.decision))
                record.decision = record.whole
                _renew_loans(record)
        yield
    finally:
        for parameter, part in saved:
            parameter.data = part
        for record, decision in records:
            record.decision = decision
            _renew_loans(record)
