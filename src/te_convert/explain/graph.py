"""The recorded graph around one module: what leads to it, itself, and who reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from te_convert.capture.graph import Recording
from te_convert.explain.model import GraphLine
from te_convert.match.readers import node_name
from te_convert.replacements.specs import dtype_name

_MOST = 16
"""Nodes shown before or after; a wide graph would fill pages."""


def where_of(node: fx.Node) -> str:
    """The module in whose forward the node ran ("" is the root)."""
    stack = tuple(node.meta.get("nn_module_stack") or ("",))
    inner = str(stack[-1])
    return inner if node.op != "call_module" or inner != node.target else str(stack[-2]) if len(stack) > 1 else ""


def nodes_of(recording: Recording, fqn: str) -> list[fx.Node]:
    """The nodes that ran in a module's first recorded call, or in all of them where it is no leaf, in their order."""
    leaf = next((node for node in recording.graph.nodes if node.op == "call_module" and node.target == fqn), None)
    if leaf is not None:
        return [leaf]
    return [
        node
        for node in recording.graph.nodes
        if node.op not in ("placeholder", "output") and fqn in (node.meta.get("nn_module_stack") or ())
    ]


def lines_around(recording: Recording, fqn: str, context: int) -> tuple[tuple[GraphLine, ...], int]:
    """Nodes up to ``context`` steps before and after a module, and how many nodes of the module itself are left out."""
    site = nodes_of(recording, fqn)
    if not site:
        return (), 0
    inside = set(site)
    before = _steps(inside, context, lambda node: node.all_input_nodes)
    after = _steps(inside, context, lambda node: node.users) - before
    order = {node: index for index, node in enumerate(recording.graph.nodes)}
    first = sorted(before, key=order.__getitem__)[-_MOST:]
    last = sorted(after, key=order.__getitem__)[:_MOST]
    shown = site if len(site) <= 2 * context + 1 else [*site[:context], *site[len(site) - context :]]
    placed = [*((node, "before") for node in first), *((node, "site") for node in shown), *((node, "after") for node in last)]
    lines = tuple(_line(node, place) for node, place in placed)
    return lines, len(site) - len(shown)


def _steps(start: set[fx.Node], count: int, neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    edge = set(start)
    for _ in range(count):
        edge = {other for node in edge for other in neighbours(node)} - start - found
        found |= edge
    return found


def _line(node: fx.Node, place: str) -> GraphLine:
    meta = node.meta.get("tensor_meta")
    return GraphLine(
        name=node.name,
        operation=node.op if node.op in ("placeholder", "output") else node_name(node),
        inputs=tuple(item.name for item in node.all_input_nodes),
        shape=None if meta is None else tuple(meta.shape),
        dtype="" if meta is None else dtype_name(meta.dtype),
        where="" if node.op in ("placeholder", "output") else where_of(node),
        readers=tuple(user.name for user in node.users),
        place=place,
    )
