"""What a fusion rule looks at: one norm (or none), the Linears that read the same tensor, and where they are."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import nn

from te_convert.capture.graph import Capture
from te_convert.facts.norm_formula import NormFacts
from te_convert.match.candidate import Candidate
from te_convert.match.fusion import Fusion, Member
from te_convert.reasons import Reason
from te_convert.replacements.specs import LinearSpec
from te_convert.weights.ops import Concat, Move, Transpose, WeightMap, WeightOp

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class LinearSite:
    """One Linear that a leaf rule would convert.

    Attributes:
        site: the module with what was observed.
        spec: the ``te.Linear`` that it would become.
        weights: the leaf rule's weight map.
        precision: "recipe" or "high".
    """

    site: Candidate
    spec: LinearSpec
    weights: WeightMap
    precision: str

    @property
    def fqn(self) -> str:
        """Name of the Linear."""
        return self.site.fqn

    @property
    def transposed(self) -> bool:
        """Stored [in, out] (Transformers' Conv1D)."""
        return isinstance(self.weights.ops[0], Transpose)

    @property
    def weight(self) -> str:
        """Name of the weight parameter inside the module."""
        return self.weights.ops[0].sources[0]

    @property
    def bias(self) -> str | None:
        """Name of the bias parameter inside the module, or None."""
        return self.weights.ops[1].sources[0] if len(self.weights.ops) > 1 else None

    @property
    def flags(self) -> tuple[object, ...]:
        """Linears with equal flags can share one matrix: layout, dtype, bias or none, trainable or frozen, not tied."""
        parameters = self.site.parameters
        frozen = tuple(parameters[name].requires_grad for name in (self.weight, self.bias) if name is not None)
        return (self.transposed, self.spec.dtype, self.spec.bias, frozen, self.fqn if self.site.ties else "")


@dataclass(frozen=True)
class NormSite:
    """One norm that a leaf rule would convert."""

    site: Candidate
    facts: NormFacts

    @property
    def fqn(self) -> str:
        """Name of the norm."""
        return self.site.fqn


@dataclass(frozen=True)
class Group:
    """The Linears that read one tensor, which is a norm's output unless ``norm`` is None.

    Attributes:
        linears: in the order in which they run.
        contiguous: names of those whose output has to be contiguous.
        modules: the model's modules by name.
        all_linears: every Linear of the model that a leaf rule would convert, by name.
        allow: approximations that the caller accepts.
        training: the model's own mode.
        probe_cache: what stretches of the graph turned out to compute, shared by all groups of a model.
    """

    norm: NormSite | None
    linears: tuple[LinearSite, ...]
    contiguous: frozenset[str]
    modules: dict[str, nn.Module]
    capture: Capture
    all_linears: dict[str, LinearSite]
    allow: tuple[str, ...] = ()
    training: bool = False
    probe_cache: dict[Hashable, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """What a fusion rule says about a group: fusions, and why it did not fuse (advices by site name)."""

    fusions: tuple[Fusion, ...] = ()
    advices: dict[str, tuple[Reason, ...]] = field(default_factory=dict)


def common_scope(names: list[str]) -> str:
    """Name of the innermost module that holds all the modules named."""
    parts = [name.split(".")[:-1] for name in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)


def place_beside(modules: dict[str, nn.Module], linears: tuple[str, ...], name: str) -> str:
    """Where to register a fused module: beside its Linears, but in no container (whose forward would run it).

    With only containers above, it becomes a child of the first Linear.
    """
    parent = common_scope(list(linears))
    while isinstance(modules[parent], CONTAINERS):
        if not parent:
            parent = linears[0]
            break
        parent = parent.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    taken = set(dict(modules[parent].named_children())) | set(modules[parent].__dict__)
    while name in taken:
        name += "_"
    return prefix + name


def short_name(linears: tuple[str, ...]) -> str:
    """``qkv`` for q, k and v; otherwise the Linears' own names: ``gate_up``, ``fc1``, ``kv``."""
    names = [fqn.rpartition(".")[2].removesuffix("_proj").removesuffix("_lin") for fqn in linears]
    if len(names) == 1:
        return "qkv" if names[0] in ("qkv", "c_attn", "query_key_value", "in", "Wqkv", "qkv_proj") else names[0] or "linear"
    initials = "".join(name.removeprefix("to_")[:1] for name in names)
    return initials if set(initials) <= set("qkv") and len(set(initials)) == len(initials) else "_".join(names)


def inside(fqn: str, scope: str) -> str:
    """A name as seen from the module ``scope``, which holds it or is it."""
    if fqn == scope:
        return ""
    return fqn.removeprefix(f"{scope}.") if scope else fqn


def joined_ops(linears: tuple[LinearSite, ...], scope: str, weight: str = "weight", bias: str = "bias") -> tuple[WeightOp, ...]:
    """Weight (and bias) of Linears with equal flags as one matrix; a single Linear keeps its Parameter."""
    first = linears[0]
    ops = [_joined([(inside(s.fqn, scope), s.weight, s.spec.out_features) for s in linears], weight, first.transposed)]
    if first.spec.bias:
        ops.append(_joined([(inside(s.fqn, scope), str(s.bias), s.spec.out_features) for s in linears], bias, False))
    return tuple(ops)


def _joined(parts: list[tuple[str, str, int]], dest: str, transposed: bool) -> WeightOp:
    names = tuple(f"{module}.{name}" if module else name for module, name, _ in parts)
    if len(names) > 1:
        return Concat(names, dest, tuple(rows for _, _, rows in parts), transposed)
    return Transpose(names[0], dest) if transposed else Move(names[0], dest)


def norm_ops(norm: NormSite, scope: str) -> tuple[WeightOp, ...]:
    """The norm's parameters under TE's names for a fused module."""
    facts, prefix = norm.facts, inside(norm.fqn, scope)
    ops: list[WeightOp] = [Move(f"{prefix}.{facts.weight}", "layer_norm_weight")]
    if facts.kind == "LayerNorm":
        ops.append(_norm_bias(facts, prefix))
    return tuple(ops)


def _norm_bias(facts: NormFacts, prefix: str) -> WeightOp:
    from te_convert.weights.ops import Fill

    if facts.bias is None:
        return Fill("layer_norm_bias", 0.0, facts.width)
    return Move(f"{prefix}.{facts.bias}", "layer_norm_bias")


def members(norm: NormSite | None, linears: tuple[LinearSite, ...]) -> tuple[Member, ...]:
    """Norm and Linears as members."""
    first = () if norm is None else (Member("norm", norm.fqn),)
    return (*first, *(Member("linear", linear.fqn) for linear in linears))


def precision_of(linears: tuple[LinearSite, ...]) -> str:
    """High precision when the recipe cannot take one of the Linears."""
    return "high" if any(linear.precision == "high" for linear in linears) else "recipe"
