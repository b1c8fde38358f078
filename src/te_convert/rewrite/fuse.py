"""Put a fused TE module in place of several modules, and take it out again.  Only rewrite/apply.py calls this."""

from __future__ import annotations

from torch import nn

from te_convert.facts.sharing import Parents, find_parents
from te_convert.match.fusion import Fusion
from te_convert.match.groups import inside
from te_convert.plan.model import MEMBER_ATTRIBUTE, SITE_ATTRIBUTE, Decision
from te_convert.replacements.build import new_module
from te_convert.replacements.specs import WHOLE, DotProductAttentionSpec
from te_convert.rewrite.attention import AttentionRecord, attach, detach, exchange, exchange_back
from te_convert.rewrite.carry_over import carry_attributes, carry_hooks
from te_convert.rewrite.direct_attention import SinkLender
from te_convert.rewrite.eager_attention import RULE, EagerRecord
from te_convert.rewrite.experts import GroupedForward
from te_convert.rewrite.fused import RECORDS, ROWS, DeferringNorm, FusedReader, FusedRecord
from te_convert.rewrite.fused_files import unwatch_scope, watch_scope
from te_convert.rewrite.fused_parameters import Own, fill_parameters, own_parameters, parameters_back
from te_convert.rewrite.loans import LOANS, Borrower, Loan, give_back, is_borrower, lend
from te_convert.rewrite.mixture import MixtureForward, MixtureRecord
from te_convert.rewrite.nested import quiet_children
from te_convert.rewrite.site import site_class
from te_convert.rewrite.transformers_layer import LayerRecord, TransformersLayer
from te_convert.weights.ops import Concat, SwapHalves


def fuse(root: nn.Module, fusion: Fusion, decisions: dict[str, Decision], backend: str, parents: Parents) -> tuple[nn.Module, Own]:
    """Build the TE module of a fusion, let it take the members' parameters, and make the members borrow them.

    Args:
        root: the model.
        fusion: what to build.
        decisions: those about modules that become part of a fusion, by name.
        backend: "te" or "reference".
        parents: who holds each module, found before the first of a plan's fusions: one takes its owner's place and its children's
            dictionary, so that it holds for all.

    Returns:
        The TE module, and the members' own Parameters.  Those that became part of a larger one keep their object and now show
        that part, so nothing is held twice.

    Raises:
        AttributeError: the plan names a module or parameter that the model does not have.
        ValueError: a parameter does not fit the plan.
    """
    scope = root.get_submodule(fusion.scope)
    members = tuple((member.role, root.get_submodule(member.fqn)) for member in fusion.members)
    own = own_parameters(scope, fusion)
    module: nn.Module = new_module(site_class(fusion.spec, backend), fusion.spec, backend)
    record = _record_class(fusion)(fusion, module, scope, backend, members)
    try:
        fill_parameters(module, fusion, scope, own)
        record.apart = {
            op.source: own[op.source] for op in fusion.weights.ops if isinstance(op, SwapHalves) and own[op.source].dim() == 1
        }
        quiet_children(module, fusion.weights)
        module.train(members[0][1].training)
        module.__dict__[SITE_ATTRIBUTE] = record
        _lend_all(record, decisions)
        _register(root, module, record, parents)
        record.scope = module if scope in record.role("owner") else scope  # an owner leaves the tree
        watch_scope(record.scope, module)
        if isinstance(record, AttentionRecord):
            attach(root, record)
        elif isinstance(record, EagerRecord):
            record.attach()
        elif isinstance(record, LayerRecord):
            exchange(root, record, record.attends)
    except BaseException:
        restore_fusion(root, record, own)
        raise
    return module, own


def _record_class(fusion: Fusion) -> type[FusedRecord]:
    if fusion.rule == RULE:
        return EagerRecord
    if fusion.member("block") is not None:
        return LayerRecord
    if fusion.member("mixture") is not None:
        return MixtureRecord
    return AttentionRecord if isinstance(fusion.spec, DotProductAttentionSpec) else FusedRecord


def _lend_all(record: FusedRecord, decisions: dict[str, Decision]) -> None:
    fusion = record.decision
    for (role, module), member in zip(record.members, fusion.members, strict=True):
        decision = decisions.get(member.fqn)
        if decision is not None:
            module.__dict__[MEMBER_ATTRIBUTE] = decision
        if role in ("block", "mixture"):
            module.__dict__[RECORDS] = record
            lend(module, TransformersLayer if role == "block" else MixtureForward, {})
            continue
        prefix = inside(member.fqn, fusion.scope)
        loans = {
            source.rpartition(".")[2]: Loan(record, source)
            for source in fusion.weights.sources
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
            module.__dict__[RECORDS] = record
            lend(module, {"experts": GroupedForward, "attention": SinkLender}.get(role, Borrower), ordered)
    for name, module in _inside_owner(record):
        decision = decisions.get(name)
        if decision is not None and decision.fused_into == fusion.fqn:
            module.__dict__[MEMBER_ATTRIBUTE] = decision


def _inside_owner(record: FusedRecord) -> list[tuple[str, nn.Module]]:
    """The modules inside a module whose work one TE module does, also those that own nothing (an attention), by their names."""
    prefix = f"{record.decision.whole}." if record.decision.whole else ""
    owners = (*record.role("owner"), *record.role("block"))
    return [(prefix + name, part) for owner in owners for name, part in owner.named_modules() if name]


def _rows(loans: dict[str, Loan]) -> int:
    """Output features of a reader: the rows of its block of the fused weight."""
    loan = next(iter(loans.values()))
    op, index, module, _ = loan.pieces[0]
    if isinstance(op, Concat):
        return op.rows[index]
    weight = module._parameters["weight"]
    assert weight is not None
    return int(weight.shape[0])


def _register(root: nn.Module, module: nn.Module, record: FusedRecord, parents: Parents) -> None:
    """Into the module tree: in place of the owner, or as one more child beside the readers."""
    fusion = record.decision
    parent_name, _, name = fusion.fqn.rpartition(".")
    if not isinstance(fusion.spec, WHOLE) or record.role("block"):
        root.get_submodule(parent_name)._modules[name] = module
        return
    owner = record.role("owner")[0]
    carry_hooks(owner, module)
    carry_attributes(owner, module)
    module.training = owner.training
    clash = owner._modules.keys() & module._modules.keys()
    if clash:
        raise ValueError(f"{fusion.fqn}: {fusion.spec.name} has children called {', '.join(sorted(clash))} too")
    record.own_children = tuple(module._modules)
    module._modules.update(owner._modules)
    record.owner_children = owner._modules
    owner.__dict__["_modules"] = module._modules
    for parent, child_name in parents.get(id(owner), ()):
        parent._modules[child_name] = module


def restore_fusion(root: nn.Module, record: FusedRecord, own: Own | None = None) -> nn.Module:
    """Take a fused module out: the members get their ``own`` Parameters back, or new ones with the values of now.

    Also undoes a fusion that failed half-way.

    Returns:
        The root, which is the owner if the fused module was in the place of the root.
    """
    fusion, module = record.decision, record.module
    parameters = parameters_back(record, own)
    if own is None and record.role("owner"):
        carry_hooks(module, record.role("owner")[0])
    for (role, member), named in zip(record.members, fusion.members, strict=True):
        member.__dict__.pop(MEMBER_ATTRIBUTE, None)
        if role == "norm":
            records = member.__dict__.get(RECORDS, [])
            if record in records:
                records.remove(record)
            if records:  # another fusion still reads this norm: it lends the parameters from now on
                _lend_from(member, records[0])
                continue
        if is_borrower(member):
            prefix = inside(named.fqn, fusion.scope)
            give_back(member, {key.rpartition(".")[2]: p for key, p in parameters.items() if key.rpartition(".")[0] == prefix})
        member.__dict__.pop(RECORDS, None)
        member.__dict__.pop(ROWS, None)
        member.__dict__.pop("_te_convert_dtypes", None)
    for _, part in _inside_owner(record):
        decision = part.__dict__.get(MEMBER_ATTRIBUTE)
        if decision is not None and decision.fused_into == fusion.fqn:
            del part.__dict__[MEMBER_ATTRIBUTE]
    _unregister(root, record)
    unwatch_scope(record.scope, module)
    _detach(root, record)
    return record.role("owner")[0] if root is module else root


def _detach(root: nn.Module, record: FusedRecord) -> None:
    """Undo what an attention module was prepared with."""
    if isinstance(record, AttentionRecord):
        detach(root, record)
    elif isinstance(record, EagerRecord):
        record.detach()
    elif isinstance(record, LayerRecord):
        exchange_back(root, record)


def _lend_from(norm: nn.Module, record: FusedRecord) -> None:
    names = list(norm.__dict__[LOANS])
    prefix = next(inside(m.fqn, record.decision.scope) for m in record.decision.members if m.role == "norm")
    norm.__dict__[LOANS] = {name: Loan(record, f"{prefix}.{name}") for name in names}


def _unregister(root: nn.Module, record: FusedRecord) -> None:
    module = record.module
    owner = next(iter(record.role("owner")), None)
    if owner is not None and record.owner_children is not None:
        children = {name: child for name, child in module._modules.items() if name not in record.own_children}
        record.owner_children.clear()
        record.owner_children.update(children)
        owner.__dict__["_modules"] = record.owner_children
        owner.training = module.training
    for parent, name in find_parents(root)[id(module)]:
        if owner is not None:
            parent._modules[name] = owner
        else:
            del parent._modules[name]
