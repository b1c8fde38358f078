"""Parameters of a fused TE module: made of the members' without holding anything twice, and given back."""

from __future__ import annotations

import torch
from torch import nn

from te_convert.match.fusion import Fusion
from te_convert.replacements.build import parameter_names
from te_convert.rewrite.fused import FusedRecord
from te_convert.rewrite.loans import LOANS, Loan, holder_of, is_borrower
from te_convert.weights.ops import Concat, Fill, Move, Rows, Take, WeightOp, gather

Own = dict[str, nn.Parameter]
"""The original Parameters of a fusion by source name."""


def own_parameters(scope: nn.Module, fusion: Fusion) -> Own:
    """The members' Parameters, without those that another fusion holds already."""
    return {
        source: scope.get_parameter(source)
        for source in fusion.weights.sources
        if not is_borrower(scope.get_submodule(source.rpartition(".")[0]))
    }


def fill_parameters(module: nn.Module, fusion: Fusion, scope: nn.Module, own: Own) -> None:
    """Give a TE module its parameters: the members' objects where the layout allows it, else new ones that the old ones show.

    Raises:
        ValueError: the plan and the TE module have different parameters.
    """
    names = set(parameter_names(fusion.spec)) or {name for name, _ in module.named_parameters()}
    planned = {op.dest for op in fusion.weights.ops}
    if planned != names:
        raise ValueError(f"{fusion.fqn}: plan and {fusion.spec.name} differ in {', '.join(sorted(names ^ planned))}")
    for op in fusion.weights.ops:
        holder, name = holder_of(module, op.dest)
        holder._parameters[name] = _parameter(op, fusion, scope, own)


def _parameter(op: WeightOp, fusion: Fusion, scope: nn.Module, own: Own) -> nn.Parameter:
    if isinstance(op, Fill):
        like = next(iter(own.values()))
        constant = torch.full((op.size,), op.value, dtype=like.dtype, device=like.device)
        return nn.Parameter(constant, requires_grad=False)
    if isinstance(op, Move):
        return own[op.source] if op.source in own else _lent_parameter(scope, op.source)
    if isinstance(op, Take | Rows):
        return _entry(op, own[op.source])
    return _joined(op, own)


def _lent_parameter(scope: nn.Module, source: str) -> nn.Parameter:
    """The parameter of a norm that another fusion holds already: both hold the same object."""
    owner, _, name = source.rpartition(".")
    loan: Loan = scope.get_submodule(owner).__dict__[LOANS][name]
    parameter = loan.parameter()
    if parameter is None:
        raise ValueError(f"{source} is part of a larger parameter")
    return parameter


def _entry(op: Take | Rows, source: nn.Parameter) -> nn.Parameter:
    """A Parameter on the memory of one entry, or some rows, of a larger one."""
    entry = nn.Parameter(op.forward([source.detach()]), requires_grad=source.requires_grad)
    if source.grad is not None:
        entry.grad = op.forward([source.grad.detach()])
    return entry


def _joined(op: WeightOp, own: Own) -> nn.Parameter:
    """A new Parameter made of the sources; each source then shows its part of the new memory, which frees its own."""
    sources = [own[name] for name in op.sources]
    joined = nn.Parameter(op.forward([source.detach() for source in sources]), requires_grad=sources[0].requires_grad)
    if any(source.grad is not None for source in sources):
        joined.grad = op.forward([torch.zeros_like(s) if s.grad is None else s.grad.detach() for s in sources])
    if isinstance(op, Concat):
        for index, source in enumerate(sources):
            source.data = op.part(joined.detach(), index)
    return joined


def parameters_back(record: FusedRecord, own: Own | None) -> Own:
    """Parameters for the members: those of before, freed from the joint memory, or new ones with the values of now."""
    found: Own = {}
    for source in record.decision.weights.sources:
        loan = Loan(record, source)
        before = own.get(source) if own is not None else None
        whole = loan.parameter()
        if before is not None:
            if isinstance(loan.pieces[0][0], Concat):
                before.data = before.detach().contiguous().clone()
            found[source] = before
        elif whole is not None:
            found[source] = whole
        else:
            found[source] = _separate(loan)
    return found


def _separate(loan: Loan) -> nn.Parameter:
    """A Parameter of its own with the values (and the gradient) that a fused module has for one source."""
    with torch.no_grad():
        value = loan.read().contiguous().clone()
    held = [module._parameters[name] for _, _, module, name in loan.pieces]
    parameter = nn.Parameter(value, requires_grad=all(tensor is not None and tensor.requires_grad for tensor in held))
    gradients = [None if tensor is None else tensor.grad for tensor in held]
    if any(gradient is not None for gradient in gradients):  # an expert without tokens may have none
        whole = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in held if tensor is not None]
        parts = [op.part(grad, index) for (op, index, _, _), grad in zip(loan.pieces, whole, strict=True)]
        parameter.grad = gather([op for op, *_ in loan.pieces], parts).contiguous().clone()
    return parameter
