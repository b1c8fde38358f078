"""Linears that read the same tensor in every recorded call."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from te_convert.capture.graph import Capture
from te_convert.match.groups import LinearSite
from te_convert.match.readers import Readers, needs_contiguous


def find_shared_inputs(capture: Capture, linears: Mapping[str, LinearSite]) -> list[Readers]:
    """Groups of two or more Linears of one parent module, each with the same partners in all its calls.

    The tensor itself has to be the same, not a view of it: the fused module recognises it by identity.
    """
    partners: dict[str, tuple[str, ...] | None] = {}
    contiguous: set[str] = set()
    for recording in capture.recordings:
        by_input: dict[tuple[fx.Node, str], list[fx.Node]] = {}
        for node in recording.graph.nodes:
            if node.op == "call_module" and node.target in linears and len(node.all_input_nodes) == 1:
                parent = str(node.target).rpartition(".")[0]
                by_input.setdefault((node.all_input_nodes[0], parent), []).append(node)
        for nodes in by_input.values():
            names = tuple(str(node.target) for node in nodes)
            contiguous |= {str(node.target) for node in nodes if needs_contiguous(node)}
            for name in names:
                same = partners.get(name, names) == names and len(set(names)) == len(names)
                partners[name] = names if same else None
    groups = dict.fromkeys(names for names in partners.values() if names is not None and len(names) > 1)
    return [
        Readers(names, contiguous=frozenset(contiguous & set(names)))
        for names in groups
        if all(partners[name] == names for name in names)
    ]
