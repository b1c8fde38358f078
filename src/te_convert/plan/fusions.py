"""From single decisions to fusions: which norms are read by Linears alone, and what the fusion rules make of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from te_convert.capture.graph import Capture
from te_convert.capture.run import describe_error
from te_convert.config import ConvertConfig
from te_convert.facts.norm_formula import NormFacts
from te_convert.match.blocks import Block
from te_convert.match.candidate import Candidate
from te_convert.match.fusion import Fusion
from te_convert.match.groups import Found, Group, LinearSite, NormSite, common_scope, inside
from te_convert.match.norms import probe_norm_site
from te_convert.match.readers import Readers, find_readers
from te_convert.match.shared_inputs import find_shared_inputs
from te_convert.plan.model import MEMBER_ATTRIBUTE, SITE_ATTRIBUTE, Decision, Outcome
from te_convert.plan.pins import excluded
from te_convert.plan.trace import Trace
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.replacements.specs import LayerNormSpec, LinearSpec, RMSNormSpec, Spec
from te_convert.rules.base import BlockRule
from te_convert.rules.registry import BLOCK_RULES, FUSION_RULES
from te_convert.weights.ops import Move

Lacks = Callable[[Spec], Reason | None]
"""Why a fusion's TE module cannot be used here, so that its members are looked at one by one; None where it can."""


def lacks_nothing(spec: Spec) -> Reason | None:
    """Every TE module can be used."""
    del spec
    return None


Sites = Sequence[tuple[Candidate, "Decision | None"]]
"""Every module with what the leaf rules decided; None for one that they have nothing to say about."""


@dataclass
class _Sites:
    """What the leaf rules decided, by kind."""

    model: nn.Module
    modules: dict[str, nn.Module]
    capture: Capture
    config: ConvertConfig
    linears: dict[str, LinearSite] = field(default_factory=dict)
    norms: dict[str, NormSite] = field(default_factory=dict)
    probe_cache: dict[Hashable, tuple[str, str]] = field(default_factory=dict)


def fuse_decisions(
    model: nn.Module,
    capture: Capture,
    sites: Sites,
    config: ConvertConfig,
    trace: Trace | None = None,
    lacks: Lacks = lacks_nothing,
) -> tuple[dict[str, Decision], tuple[Fusion, ...]]:
    """Decisions that a fusion changes or that have something to say about one, by name, and the fusions."""
    known = _sort(model, capture, sites, config)
    result = _Result({site.fqn: decision for site, decision in sites if decision is not None}, lacks, trace=trace)
    _ask_about_blocks(known, sites, result)
    for name, norm in known.norms.items():
        if name in result.taken:
            continue
        readers = find_readers(capture, known.modules, name, known.linears.keys() - result.taken, model.training)
        obstacle = _obstacle(known, norm, readers) if readers.linears else None
        if trace is not None:
            trace.readers(name, readers, obstacle)
        if not readers.linears:
            continue
        if obstacle is not None:
            result.advise(name, (obstacle,))
        else:
            _ask(_group(known, norm, readers), result)
    free = {name: linear for name, linear in known.linears.items() if name not in result.taken}
    for readers in find_shared_inputs(capture, free):
        _ask(_group(known, None, readers), result)
    return result.changed, tuple(result.fusions)


@dataclass
class _Result:
    """Fusions found so far, and the decisions as they are with them.

    Attributes:
        names: names of the fusions.
        taken: names of sites that are part of one.
        whole: prefixes of the names inside modules that became one TE module.
        trace: hears what each rule says, if somebody asked.
    """

    decisions: dict[str, Decision]
    lacks: Lacks
    changed: dict[str, Decision] = field(default_factory=dict)
    fusions: list[Fusion] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    whole: list[str] = field(default_factory=list)
    trace: Trace | None = None

    def advise(self, fqn: str, reasons: tuple[Reason, ...]) -> None:
        """Say why a site was not fused, or what to know about its fusion."""
        before = self.changed.get(fqn) or self.decisions.get(fqn)
        if before is None:  # a module that owns nothing and became nothing
            return
        self.changed[fqn] = replace(before, reasons=(*before.reasons, *reasons))

    def add(self, fusion: Fusion, whole: bool = False) -> None:
        """Accept a fusion under a name of its own; its members become part of it, with ``whole`` whatever they were.

        One whose TE module cannot be used here is not accepted: its members hear why, and are free for what else there is.
        """
        why = self.lacks(fusion.spec)
        if why is not None:
            for member in fusion.members:
                before = self.changed.get(member.fqn, self.decisions.get(member.fqn))
                if before is not None and before.outcome is Outcome.CONVERTED and why not in before.reasons:
                    self.advise(member.fqn, (why,))
            return
        fqn = fusion.fqn
        while fqn in self.names:
            fqn += "_"
        self.names.add(fqn)
        fusion = replace(fusion, fqn=fqn)
        self.fusions.append(fusion)
        if whole:
            self.whole.append(f"{fusion.scope}." if fusion.scope else "")
        for member in fusion.members:
            before = self.changed.get(member.fqn, self.decisions.get(member.fqn))
            if before is not None and (whole or before.outcome is Outcome.CONVERTED):
                self.taken.add(member.fqn)
                self.changed[member.fqn] = replace(
                    before,
                    outcome=Outcome.FUSED,
                    rule=fusion.rule,
                    spec=fusion.spec,
                    weights=None,
                    fused_into=fqn,
                    reasons=(*(r for r in before.reasons if r.is_advice), *_new_object(member.fqn, fusion, before)),
                )


def _new_object(fqn: str, fusion: Fusion, decision: Decision) -> tuple[Reason, ...]:
    """Advice for a module whose parameters become part of larger ones."""
    known = any(r.code == ReasonCode.PARAMETER_NEW_OBJECT.value for r in decision.reasons)
    prefix = inside(fqn, fusion.scope)
    for source in () if known else fusion.weights.sources:
        ops = fusion.weights.using(source)
        if source.rpartition(".")[0] == prefix and not isinstance(ops[0], Move):
            name, dest = source.rpartition(".")[2], ops[0].dest
            detail = f"{name} is part of {fusion.fqn}.{dest}" if fusion.fqn else f"{name} is part of {dest}"
            return (reason(ReasonCode.PARAMETER_NEW_OBJECT, detail),)
    return ()


def _ask_about_blocks(known: _Sites, sites: Sites, result: _Result) -> None:
    """Offer every module to the block rules, outermost first, unless the caller excluded it or a part of it."""
    config = known.config
    unwelcome = {site.fqn: excluded(site, config.include, config.exclude) for site, _ in sites}
    unwanted = [
        site.fqn
        for site, decision in sites
        if (decision is not None and decision.outcome is Outcome.EXCLUDED) or (site.parameters and unwelcome[site.fqn] is not None)
    ]
    for site, decision in sites:
        prefix = f"{site.fqn}." if site.fqn else ""
        if site.fqn in result.taken or any(map(site.fqn.startswith, result.whole)):
            continue
        if is_te(site.module) or (decision is not None and decision.fused_into is not None):
            continue
        block = Block(site, known.modules, known.capture, known.config.allow, known.linears, known.norms)
        because = unwelcome[site.fqn]
        if because is not None:
            _exclude(block, because, result)
        if because is not None or any(name.startswith(prefix) for name in unwanted):
            continue
        for rule in BLOCK_RULES:
            _ask_block(rule, block, result)


def _exclude(block: Block, because: Reason, result: _Result) -> None:
    """Say of a module that a block rule would have looked at that the caller excluded it."""
    fqn = block.site.fqn
    before = result.decisions.get(fqn)
    if (before is None or before.outcome is Outcome.NO_MATCH) and any(_looks_like(rule, block) for rule in BLOCK_RULES):
        before = before or _no_match(block.site)
        result.decisions[fqn] = result.changed[fqn] = replace(before, outcome=Outcome.EXCLUDED, reasons=(because, *before.reasons))


def _looks_like(rule: BlockRule, block: Block) -> bool:
    try:
        return rule.looks_like(block)
    except Exception:  # a rule that breaks would have been named, had the module been asked about
        return False


def _no_match(site: Candidate) -> Decision:
    return Decision(
        fqn=site.fqn,
        kind=type(site.module).__name__,
        class_name=type(site.module).__name__,
        outcome=Outcome.NO_MATCH,
        aliases=site.aliases,
        calls=len(site.calls),
    )


def _ask_block(rule: BlockRule, block: Block, result: _Result) -> None:
    site = block.site
    try:
        found = rule.propose(block) if rule.looks_like(block) else Found()
    except Exception as error:
        found = Found(advices={site.fqn: (reason(ReasonCode.FUSION_FAILED, f"rule {rule.id}: {describe_error(error)}"),)})
    if result.trace is not None:
        result.trace.block(rule, block, found)
    if site.fqn not in result.decisions and (found.fusions or found.advices):
        result.decisions[site.fqn] = _no_match(site)
    for fqn, reasons in found.advices.items():
        result.advise(fqn, reasons)
    for fusion in found.fusions:
        result.add(fusion, whole=True)


def is_te(module: nn.Module) -> bool:
    """A module that an earlier conversion put in place, or a part of a fusion."""
    return SITE_ATTRIBUTE in module.__dict__ or MEMBER_ATTRIBUTE in module.__dict__


def _sort(model: nn.Module, capture: Capture, sites: Sites, config: ConvertConfig) -> _Sites:
    known = _Sites(model, dict(model.named_modules()), capture, config)
    for site, decision in sites:
        if (
            decision is None
            or is_te(site.module)
            or decision.outcome is not Outcome.CONVERTED
            or decision.weights is None
            or "forward" in site.module.__dict__
        ):
            continue
        if isinstance(decision.spec, LinearSpec):
            known.linears[site.fqn] = LinearSite(site, decision.spec, decision.weights, decision.precision)
        elif isinstance(decision.spec, LayerNormSpec | RMSNormSpec) and site.has_graph:
            facts = probe_norm_site(site)
            if isinstance(facts, NormFacts):
                known.norms[site.fqn] = NormSite(site, facts)
    return known


def _obstacle(known: _Sites, norm: NormSite, readers: Readers) -> Reason | None:
    """Why the norm stays a module of its own: somebody else reads it, or its output leaves the block that made it."""
    if readers.others:
        return reason(ReasonCode.FUSION_OTHER_READER, f"also read by {', '.join(readers.others[:3])}")
    if readers.problem:
        return reason(ReasonCode.FUSION_CALLS_DIFFER, readers.problem)
    if norm.site.ties:
        return reason(
            ReasonCode.FUSION_TIED, f"{next(iter(norm.site.ties))} is shared with {next(iter(norm.site.ties.values()))[0]}"
        )
    crossed = _crosses(known.modules, [norm.fqn, *readers.linears])
    if crossed:
        return reason(ReasonCode.FUSION_CROSSES_BLOCK, f"{crossed} lies between the norm and its readers")
    widths = {known.linears[name].spec.in_features for name in readers.linears}
    dtypes = {known.linears[name].spec.dtype for name in readers.linears} | {str(norm.site.dtype).removeprefix("torch.")}
    if widths != {norm.facts.width} or len(dtypes) > 1:
        return reason(ReasonCode.FUSION_CALLS_DIFFER, f"widths {sorted(widths)}, dtypes {sorted(dtypes)}")
    return None


def _crosses(modules: dict[str, nn.Module], names: list[str]) -> str:
    """The repeated or checkpointed block between the modules' common ancestor and one of them, or "".

    A checkpoint around such a block would see a deferred norm enter or leave it.
    """
    depth = len(common_scope(names).split(".")) if common_scope(names) else 0
    for name in names:
        parts = name.split(".")
        for end in range(depth + 1, len(parts)):
            block, holder = ".".join(parts[:end]), ".".join(parts[: end - 1])
            repeated = isinstance(modules[holder], nn.ModuleList | nn.Sequential | nn.ModuleDict)
            checkpointed = any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(modules[block]).__mro__)
            if repeated or checkpointed or isinstance(modules[block], nn.ModuleList):
                return block
    return ""


def _group(known: _Sites, norm: NormSite | None, readers: Readers) -> Group:
    return Group(
        norm=norm,
        linears=tuple(known.linears[name] for name in readers.linears),
        contiguous=readers.contiguous,
        modules=known.modules,
        capture=known.capture,
        all_linears=known.linears,
        allow=known.config.allow,
        training=known.model.training,
        probe_cache=known.probe_cache,
    )


def _ask(group: Group, result: _Result) -> None:
    """Each rule in turn on what the ones before left; one that breaks says so and takes nothing."""
    for rule in FUSION_RULES:
        try:
            found = rule.propose(group)
        except Exception as error:
            why = reason(ReasonCode.FUSION_FAILED, f"rule {rule.id}: {describe_error(error)}")
            found = Found(advices={group.linears[0].fqn: (why,)})
        if result.trace is not None:
            result.trace.group(rule, group, found)
        for fqn, reasons in found.advices.items():
            result.advise(fqn, reasons)
        for fusion in found.fusions:
            result.add(fusion)
        group = replace(group, linears=tuple(linear for linear in group.linears if linear.fqn not in result.taken))
        if not group.linears:
            break


def te_internals(model: nn.Module) -> set[int]:
    """ids of the modules inside fused TE modules, which are TE's own business (an owner's former children are not)."""
    found: set[int] = set()
    for module in model.modules():
        record = module.__dict__.get(SITE_ATTRIBUTE)
        if record is None or not isinstance(record.decision, Fusion):
            continue
        names = record.own_children if record.decision.member("owner") is not None else tuple(module._modules)
        for name in names:
            child = module._modules.get(name)
            found |= set() if child is None else set(map(id, child.modules()))
    return found


def existing_fusions(model: nn.Module) -> dict[str, Fusion]:
    """The fusions of an earlier conversion by their name then, with the names that their modules have now."""
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for name, module in model.named_modules():
        record = module.__dict__.get(SITE_ATTRIBUTE)
        if record is None or not isinstance(record.decision, Fusion):
            continue
        members = tuple(
            replace(member, fqn=name if member.role == "owner" else names.get(id(held), member.fqn))
            for (_, held), member in zip(record.members, record.decision.members, strict=True)
        )
        scope = names.get(id(record.scope), record.decision.scope)
        found[record.decision.fqn] = replace(record.decision, fqn=name, scope=scope, members=members)
    return found
