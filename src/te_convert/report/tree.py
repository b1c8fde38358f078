"""The tree of a model's sites by name, with identical layers folded into one branch: ``layers.{0..31}`` (32×)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from te_convert.plan.model import Outcome
from te_convert.report.format import clean, format_count, format_number_ranges, format_quantity
from te_convert.report.tables import AnySite, ran_words, worst_db

MAX_DEPTH = 24
"""Components of a name that become levels of their own; what follows stays one name, so that no name makes a page too deep."""

MAX_OPEN = 90
"""Levels of a tree are shown unfolded as long as they come to no more lines than this."""

LeafKey: TypeAlias = "tuple[str | int | None, ...]"


@dataclass(frozen=True)
class Leaf:
    """Sites of one name in the tree, one for each of the layers that were folded together.

    Attributes:
        count: how many sites it stands for.
        fused_into: the TE module that they became a part of, relative to the branch that holds both; "" for none.
        codes: reason codes.
    """

    kind: str
    outcome: Outcome
    replacement: str
    fused_into: str
    params: str
    ran: str
    sqnr: str
    codes: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Branch:
    """A name in the tree.

    Attributes:
        name: one or several components, ``"0–31"`` for folded layers.
        count: how many modules it stands for, counted from the root.
        times: how many siblings were folded into it.
        leaves: its own sites; usually none or one.
        outcomes: how many sites of each outcome are inside, its own included.
        is_open: whether a page shows it unfolded.
    """

    name: str
    count: int
    times: int
    leaves: tuple[Leaf, ...]
    children: tuple[Branch, ...]
    outcomes: tuple[tuple[Outcome, int], ...]
    is_open: bool = True


@dataclass
class _Raw:
    sites: list[AnySite] = field(default_factory=list)
    children: dict[str, _Raw] = field(default_factory=dict)
    signature: int = 0


def build_tree(sites: Sequence[AnySite], name: str) -> Branch:
    """The tree of the sites under a root called ``name``; every site is in exactly one leaf.

    Siblings with numbers for names are folded when everything below them agrees: kinds, classes, outcomes, replacements, sizes,
    reason codes and whether they ran.  Shapes, counts of calls and figures may differ; a leaf sums them or shows the worst.
    """
    root = _Raw()
    for site in sites:
        node = root
        parts = site.fqn.split(".") if site.fqn else []
        for part in (*parts[:MAX_DEPTH], *([".".join(parts[MAX_DEPTH:])] if parts[MAX_DEPTH:] else [])):
            node = node.children.setdefault(part, _Raw())
        node.sites.append(site)
    _sign(root, {})
    return _fold(clean(name), [root], times=1, depth=0, open_levels=_open_levels(root))


def _sign(node: _Raw, known: dict[object, int]) -> int:
    """Number what a node holds, so that equal numbers mean equal subtrees."""
    below = tuple((name, _sign(child, known)) for name, child in node.children.items())
    node.signature = known.setdefault((tuple(map(_leaf_key, node.sites)), below), len(known))
    return node.signature


def _leaf_key(site: AnySite) -> LeafKey:
    never = getattr(site, "executed", None) == 0
    codes = tuple(why.code for why in site.reasons)
    place = _relative(site.fused_into, site.fqn)
    return (site.kind, site.class_name, site.outcome.value, site.replacement, site.precision, site.params, place, never, *codes)


def _relative(place: str | None, fqn: str) -> str:
    """Where a site went, without the components that its own name begins with."""
    if place is None:
        return ""
    own, there = fqn.split("."), place.split(".")
    same = next((i for i, pair in enumerate(zip(own, there, strict=False)) if pair[0] != pair[1]), min(len(own), len(there)))
    return ".".join(there[same:])


def _groups(node: _Raw) -> list[list[str]]:
    """Names of the children, the numbered ones joined where they are equal."""
    found: dict[object, list[str]] = {}
    for name, child in node.children.items():
        found.setdefault(("number", child.signature) if _is_number(name) else name, []).append(name)
    return list(found.values())


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10 and str(int(name)) == name


def _open_levels(root: _Raw) -> int:
    """How many levels to show unfolded, so that no more than :data:`MAX_OPEN` lines are visible."""
    level, lines, levels = [root], 0, 0
    while level:
        below = [node.children[names[0]] for node in level for names in _groups(node)]
        lines += len(below) + sum(len(node.sites) for node in level if node.children)
        if lines > MAX_OPEN:
            break
        level, levels = below, levels + 1
    return max(levels, 1)


def _fold(name: str, nodes: list[_Raw], times: int, depth: int, open_levels: int) -> Branch:
    """One branch for nodes with one signature."""
    first = nodes[0]
    groups = _groups(first)
    if (
        depth and times == 1 and not first.sites and len(groups) == 1 and len(groups[0]) == 1
    ):  # a lone child needs no level of its own
        inner = groups[0][0]
        return _fold(f"{name}.{clean(inner)}", [node.children[inner] for node in nodes], times, depth, open_levels)
    leaves = tuple(_leaf([node.sites[index] for node in nodes]) for index in range(len(first.sites)))
    children = tuple(
        _fold(_label(names), [node.children[inner] for node in nodes for inner in names], len(names), depth + 1, open_levels)
        for names in groups
    )
    outcomes = Counter({leaf.outcome: 0 for leaf in leaves})
    for leaf in leaves:
        outcomes[leaf.outcome] += leaf.count
    for child in children:
        outcomes.update(dict(child.outcomes))
    ordered = tuple((outcome, outcomes[outcome]) for outcome in Outcome if outcomes[outcome])
    return Branch(name, len(nodes), times, leaves, children, ordered, depth < open_levels)


def _label(names: Sequence[str]) -> str:
    return clean(names[0]) if len(names) == 1 else format_number_ranges(map(int, names))


def _leaf(sites: Sequence[AnySite]) -> Leaf:
    first = sites[0]
    precision = " (high precision)" if first.precision == "high" and first.replacement else ""
    return Leaf(
        kind=clean(first.kind),
        outcome=first.outcome,
        replacement=clean(first.replacement or "") + precision,
        fused_into=clean(_relative(first.fused_into, first.fqn)),
        params=format_quantity(first.params) if len(sites) == 1 else f"{format_count(len(sites))}× {format_quantity(first.params)}",
        ran=ran_words(sites),
        sqnr=worst_db(sites),
        codes=tuple(dict.fromkeys(clean(why.code) for why in first.reasons)),
        count=len(sites),
    )
