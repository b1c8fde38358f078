"""Put a fused TE module in place of several modules, and take it out again.  Only rewrite/apply.py calls this."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from te_convert.facts.sharing import find_parents
from te_convert.match.fusion import Fusion
from te_convert.plan.model import MEMBER_ATTRIBUTE, SITE_ATTRIBUTE, Decision
from te_convert.replacements.build import constructor_arguments, module_class, parameter_names
from te_convert.replacements.specs import LayerNormMLPSpec
from te_convert.rewrite.carry_over import carry_attributes, carry_hooks
from te_convert.rewrite.fused import RECORDS, ROWS, DeferringNorm, FusedReader, FusedRecord
from te_convert.rewrite.fused_files import unwatch_scope, watch_scope
from te_convert.rewrite.loans import LOANS, Borrower, Loan, give_back, is_borrower, lend
from te_convert.rewrite.site import site_class
from te_convert.weights.ops import Concat, Fill, Move, WeightOp

Own = dict[str, nn.Parameter]
"""The original Parameters of a fusion by source name."""


def relative(fqn: str, scope: str) -> str:
    """Name of a module or parameter as seen from the module ``scope`` that holds it."""
    return fqn.removeprefix(f"{scope}.") if scope else fqn


def fuse(root: nn.Module, fusion: Fusion, decisions: dict[str, Decision], backend: str) -> tuple[nn.Module, Own]:
    """Build the TE module of a fusion, let it take the members' parameters, and make the members borrow them.

    Returns:
        The TE module, and the members' own Parameters.  Those that became part of a larger one keep their object and now show
        that part, so nothing is held twice.

    Raises:
        AttributeError: the plan names a module or parameter that the model does not have.
        ValueError: a parameter does not fit the plan.
    """
    scope = root.get_submodule(fusion.scope)
    members = tuple((member.role, root.get_submodule(member.fqn)) for member in fusion.members)
    own = {source: scope.get_parameter(source) for source in fusion.weights.sources if not _is_lent(scope, source)}
    cls = site_class(fusion.spec, backend)
    args, kwargs = constructor_arguments(fusion.spec, module_class(fusion.spec, backend))
    module = cls(*args, **kwargs)
    record = FusedRecord(fusion, module, scope, backend, members)
    _fill(module, fusion, scope, own)
    module.training = members[0][1].training
    module.__dict__[SITE_ATTRIBUTE] = record
    _lend_all(record, decisions)
    _register(root, module, record)
    watch_scope(scope, module)
    return module, own


def _is_lent(scope: nn.Module, source: str) -> bool:
    owner, _, _ = source.rpartition(".")
    return is_borrower(scope.get_submodule(owner))


def _fill(module: nn.Module, fusion: Fusion, scope: nn.Module, own: Own) -> None:
    """Give the TE module its parameters: the members' objects where the layout allows it, else new ones that the old ones show."""
    names = parameter_names(fusion.spec)
    for op in fusion.weights.ops:
        if op.dest not in names:
            raise ValueError(f"{fusion.spec.name} has no parameter {op.dest!r}")
        if isinstance(op, Fill):
            like = next(iter(own.values()))
            module._parameters[op.dest] = nn.Parameter(
                torch.full((op.size,), op.value, dtype=like.dtype, device=like.device), requires_grad=False
            )
        elif isinstance(op, Move):
            module._parameters[op.dest] = own[op.source] if op.source in own else _lent_parameter(scope, op.source)
        else:
            module._parameters[op.dest] = _joined(op, own)
    planned = {op.dest for op in fusion.weights.ops}
    if planned != set(names):
        raise ValueError(f"{fusion.fqn}: {sorted(set(names) - planned)} of {fusion.spec.name} are not in the plan")


def _lent_parameter(scope: nn.Module, source: str) -> nn.Parameter:
    """The parameter of a norm that another fusion holds already: both hold the same object."""
    owner, _, name = source.rpartition(".")
    value = scope.get_submodule(owner).__dict__[LOANS][name].read()
    if not isinstance(value, nn.Parameter):
        raise TypeError(f"{source} is part of a larger parameter")
    return value


def _joined(op: WeightOp, own: Own) -> nn.Parameter:
    """A new Parameter made of the sources; each source then shows its part of the new memory, which frees its own."""
    sources = [own[name] for name in op.sources]
    joined = nn.Parameter(op.forward([source.detach() for source in sources]), requires_grad=sources[0].requires_grad)
    gradients = [source.grad for source in sources]
    if any(gradient is not None for gradient in gradients):
        filled = [torch.zeros_like(source) if grad is None else grad for source, grad in zip(sources, gradients, strict=True)]
        joined.grad = op.forward([gradient.detach() for gradient in filled])
    if isinstance(op, Concat):
        for index, source in enumerate(sources):
            source.data = op.part(joined.detach(), index)
    return joined


def _lend_all(record: FusedRecord, decisions: dict[str, Decision]) -> None:
    fusion = record.decision
    for (role, module), member in zip(record.members, fusion.members, strict=True):
        decision = decisions.get(member.fqn)
        if decision is not None:
            module.__dict__[MEMBER_ATTRIBUTE] = decision
        prefix = relative(member.fqn, fusion.scope)
        loans = {
            source.rpartition(".")[2]: Loan(record, op, index)
            for op in fusion.weights.ops
            for index, source in enumerate(op.sources)
            if source.rpartition(".")[0] == prefix
        }
        if not loans:
            continue
        ordered = {name: loans[name] for name in module._parameters if name in loans} if not is_borrower(module) else loans
        if role == "norm":
            module.__dict__.setdefault(RECORDS, []).append(record)
            lend(module, DeferringNorm, ordered)
        elif role == "linear":
            module.__dict__[RECORDS] = record
            module.__dict__[ROWS] = _rows(loans)
            lend(module, FusedReader, ordered)
        else:
            lend(module, Borrower, ordered)


def _rows(loans: dict[str, Loan]) -> int:
    """Output features of a reader: the rows of its block of the fused weight."""
    loan = next(iter(loans.values()))
    if isinstance(loan.op, Concat):
        return loan.op.rows[loan.index]
    weight = loan.record.module._parameters["weight"]
    assert weight is not None
    return int(weight.shape[0])


def _register(root: nn.Module, module: nn.Module, record: FusedRecord) -> None:
    """Into the module tree: in place of the owner, or as one more child beside the readers."""
    fusion = record.decision
    parent_name, _, name = fusion.fqn.rpartition(".")
    if not isinstance(fusion.spec, LayerNormMLPSpec):
        root.get_submodule(parent_name)._modules[name] = module
        return
    owner = record.role("owner")[0]
    carry_hooks(owner, module)
    carry_attributes(owner, module)
    module.training = owner.training
    for child_name, child in owner._modules.items():
        module._modules[child_name] = child
    owner.__dict__["_modules"] = module._modules
    for parent, child_name in find_parents(root)[id(owner)]:
        parent._modules[child_name] = module


def restore_fusion(root: nn.Module, record: FusedRecord, own: Own | None = None) -> None:
    """Take a fused module out: the members get their ``own`` Parameters back, or new ones with the values of now."""
    fusion, module = record.decision, record.module
    parameters = _parameters_back(record, own)
    if own is None and record.role("owner"):
        carry_hooks(module, record.role("owner")[0])
    for (role, member), named in zip(record.members, fusion.members, strict=True):
        member.__dict__.pop(MEMBER_ATTRIBUTE, None)
        if role == "norm":
            records = member.__dict__[RECORDS]
            records.remove(record)
            if records:  # another fusion still reads this norm: it lends the parameters from now on
                _lend_from(member, records[0])
                continue
        if is_borrower(member):
            prefix = relative(named.fqn, fusion.scope)
            give_back(member, {key.rpartition(".")[2]: p for key, p in parameters.items() if key.rpartition(".")[0] == prefix})
        member.__dict__.pop(RECORDS, None)
        member.__dict__.pop(ROWS, None)
        member.__dict__.pop("_te_convert_dtypes", None)
    _unregister(root, record)
    unwatch_scope(record.scope, module)


def _lend_from(norm: nn.Module, record: FusedRecord) -> None:
    names = list(norm.__dict__[LOANS])
    prefix = next(relative(m.fqn, record.decision.scope) for m in record.decision.members if m.role == "norm")
    norm.__dict__[LOANS] = {name: Loan(record, *record.decision.weights.find(f"{prefix}.{name}")) for name in names}


def _parameters_back(record: FusedRecord, own: Own | None) -> Own:
    """Parameters for the members: those of before, freed from the joint memory, or new ones from the fused ones."""
    found: Own = {}
    for op in record.decision.weights.ops:
        fused = record.module._parameters[op.dest]
        for index, source in enumerate(op.sources):
            assert fused is not None
            if own is not None and source in own:
                parameter = own[source]
                if isinstance(op, Concat):
                    parameter.data = parameter.detach().contiguous().clone()
                found[source] = parameter
            elif isinstance(op, Move):
                found[source] = fused
            else:
                parameter = nn.Parameter(op.part(fused.detach(), index).contiguous().clone(), requires_grad=fused.requires_grad)
                if fused.grad is not None:
                    parameter.grad = op.part(fused.grad, index).contiguous().clone()
                found[source] = parameter
    return found


def _unregister(root: nn.Module, record: FusedRecord) -> None:
    module = record.module
    for parent, name in find_parents(root)[id(module)]:
        if isinstance(record.decision.spec, LayerNormMLPSpec):
            owner: Any = record.role("owner")[0]
            parent._modules[name] = owner
            owner.__dict__["_modules"] = dict(module._modules)
            owner.training = module.training
        else:
            del parent._modules[name]
