"""Which Linears of a converted model open and close tensor-parallel regions, found in the recorded graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from te_convert.capture.graph import Capture
from te_convert.match.fusion import Fusion
from te_convert.match.parallel_regions import Originals, ParallelRegion, find_cores, find_parallel_region
from te_convert.match.regions import RegionError
from te_convert.plan.model import Plan
from te_convert.reasons import ReasonCode, reason
from te_convert.reference.activations import is_gated
from te_convert.replacements.specs import DotProductAttentionSpec, LayerNormLinearSpec, LayerNormMLPSpec, LinearSpec, Spec
from te_convert.weights.ops import Concat, Transpose

Segments = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Split:
    """How one TE module is divided.

    Attributes:
        fqn: where it is.
        mode: "column", "row", "pair" (an MLP) or "heads" (an attention).
        segments: (rows, blocks) of the weight that is divided by rows; empty for a row and for heads.
    """

    fqn: str
    mode: str
    segments: Segments = ()


@dataclass
class Roles:
    """What is divided, and why the other Linears are not: FQN of the site → in words."""

    splits: list[Split] = field(default_factory=list)
    replicated: dict[str, str] = field(default_factory=dict)

    def annotate(self, plan: Plan) -> Plan:
        """The plan with the reasons of what every rank holds whole."""
        return replace(
            plan,
            decisions=tuple(
                replace(d, reasons=(*d.reasons, reason(ReasonCode.TP_REPLICATED, self.replicated[d.fqn])))
                if d.fqn in self.replicated
                else d
                for d in plan.decisions
            ),
        )


@dataclass(frozen=True)
class _Linear:
    """A converted Linear: the TE module that computes it, whose weight has its rows, and the fusion if that is one."""

    te: str
    rows: int
    fusion: Fusion | None


def find_roles(model: Originals, capture: Capture, plan: Plan, size: int, tied: frozenset[str]) -> Roles:
    """Roles of all Linears of a plan.

    Args:
        model: the original.
        capture: the recorded runs.
        plan: what was converted.
        size: number of ranks.
        tied: names of the TE modules one of whose weights something else holds too.
    """
    linears = _linears(plan, tied)
    attentions = {f.scope: f.spec for f in plan.fusions if isinstance(f.spec, DotProductAttentionSpec)}
    roles = Roles()
    order = {str(n.target): i for r in capture.recordings[:1] for i, n in enumerate(r.graph.nodes) if n.op == "call_module"}
    regions: dict[str, ParallelRegion] = {}
    for fqn in sorted(linears, key=lambda name: order.get(name, -1)):
        if linears[fqn].fusion is None:
            try:
                regions[fqn] = _region(fqn, model, capture, frozenset(linears), attentions, size)
            except RegionError as error:
                roles.replicated[fqn] = f"it closes no region that can be divided: {error}"
    columns = _settle(regions, linears)
    for closing, region in regions.items():
        roles.splits.append(Split(closing, "row"))
        roles.replicated.pop(closing, None)
        if region.core:
            fusion = next(f for f in plan.fusions if f.scope == region.core and isinstance(f.spec, DotProductAttentionSpec))
            roles.splits.append(Split(fusion.fqn, "heads"))
    for te in dict.fromkeys(linear.te for fqn, linear in linears.items() if fqn in columns):
        roles.splits.append(Split(te, "column", tuple((o.rows, columns[f]) for f, o in linears.items() if o.te == te)))
    _mlps(plan, size, tied, roles)
    _explain_the_others(plan, roles, {*columns, *regions}, linears)
    return roles


def _linears(plan: Plan, tied: frozenset[str]) -> dict[str, _Linear]:
    """Those that could be divided, in the order of their rows in the TE module."""
    found: dict[str, _Linear] = {}
    for decision in plan.swaps:
        transposed = decision.weights is not None and any(isinstance(op, Transpose) for op in decision.weights.ops)
        if isinstance(decision.spec, LinearSpec) and decision.fqn not in tied and not transposed and not decision.aliases:
            found[decision.fqn] = _Linear(decision.fqn, decision.spec.out_features, None)
    for fusion in plan.fusions:
        members = [member.fqn for member in fusion.members if member.role == "linear"]
        if isinstance(fusion.spec, LinearSpec | LayerNormLinearSpec) and members and fusion.fqn not in tied:
            joined = [op.rows for op in fusion.weights.ops if isinstance(op, Concat) and op.dest == "weight"]
            rows = joined[0] if joined else (fusion.spec.out_features,)
            if len(rows) == len(members):
                found |= {name: _Linear(fusion.fqn, count, fusion) for name, count in zip(members, rows, strict=True)}
    return found


def _region(
    fqn: str,
    model: Originals,
    capture: Capture,
    linears: frozenset[str],
    attentions: Mapping[str, Spec],
    size: int,
) -> ParallelRegion:
    """The region that a Linear closes, the same in every recorded call.

    Raises:
        RegionError: there is none.
    """

    def check(core: str) -> None:
        _check_heads(core, attentions.get(core), size)

    found: set[ParallelRegion] = set()
    for recording in capture.recordings:
        cores = find_cores(recording, frozenset(attentions))
        calls = [node for node in recording.graph.nodes if node.op == "call_module" and node.target == fqn]
        if len(calls) != recording.call_counts()[fqn]:
            raise RegionError("some of its calls were not recorded")
        found |= {find_parallel_region(_one_input(call), linears - {fqn}, cores, model, size, check) for call in calls}
    if len(found) != 1:
        raise RegionError("its calls were not recorded" if not found else "its calls close different regions")
    return next(iter(found))


def _one_input(call: fx.Node) -> fx.Node:
    if len(call.all_input_nodes) != 1:
        raise RegionError("it takes several tensors")
    return call


def _check_heads(fqn: str, spec: Spec | None, size: int) -> None:
    if not isinstance(spec, DotProductAttentionSpec):
        raise RegionError(f"the attention in {fqn} was not converted")
    if spec.num_attention_heads % size or spec.num_gqa_groups % size:
        raise RegionError(f"{spec.num_attention_heads} heads and {spec.num_gqa_groups} groups cannot be divided by {size}")
    if spec.bias or spec.softmax_type == "learnable":
        raise RegionError(f"the attention in {fqn} takes a bias or sinks of all heads")


def _settle(regions: dict[str, ParallelRegion], linears: Mapping[str, _Linear]) -> dict[str, int]:
    """Opening Linears with their blocks; regions that do not fit the others are taken out.

    A Linear opens or closes.  All members of one TE module open, or none.
    """
    while True:
        columns: dict[str, int] = {}
        for fqn, region in list(regions.items()):
            closes = any(name in regions for name, _ in region.linears)  # of a chain, the first pair is divided
            if closes or any(columns.get(name, blocks) != blocks for name, blocks in region.linears):
                del regions[fqn]
            else:
                columns |= dict(region.linears)
        divided = {linears[name].te for name in columns}
        partial = {linear.te for name, linear in linears.items() if linear.te in divided and name not in columns}
        wrong = [fqn for fqn, region in regions.items() if any(linears[name].te in partial for name, _ in region.linears)]
        if not wrong:
            return columns
        for fqn in wrong:
            del regions[fqn]


def _mlps(plan: Plan, size: int, tied: frozenset[str], roles: Roles) -> None:
    for fusion in plan.fusions:
        spec = fusion.spec
        if not isinstance(spec, LayerNormMLPSpec):
            continue
        blocks = 2 if is_gated(spec.activation) else 1
        problem = ""
        if fusion.fqn in tied:
            problem = "one of its weights is shared with another module"
        elif spec.ffn_hidden_size % size:
            problem = f"ffn_hidden_size={spec.ffn_hidden_size} cannot be divided by {size}"
        if not problem:
            roles.splits.append(Split(fusion.fqn, "pair", ((spec.ffn_hidden_size * blocks, blocks),)))
            continue
        for member in fusion.members:
            if member.role in ("gate", "up", "fc1", "fc2"):
                roles.replicated[member.fqn] = problem


def _explain_the_others(plan: Plan, roles: Roles, divided: set[str], linears: Mapping[str, _Linear]) -> None:
    pairs = {split.fqn for split in roles.splits if split.mode == "pair"}
    for decision in plan.converting:
        if decision.fqn in divided or decision.fused_into in pairs:
            roles.replicated.pop(decision.fqn, None)
        elif decision.fqn in linears:
            roles.replicated.setdefault(decision.fqn, "it opens and closes no region that can be divided")
        elif decision.kind in ("Linear", "Conv1D"):
            roles.replicated.setdefault(decision.fqn, "its weight is shared, stored [in, out], or part of a whole block")
