"""What a capture holds: one torch.fx graph per scenario, module calls, and where parameters were used directly."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from te_convert.capture.attention import AttentionCall
from te_convert.capture.scenario import Scenario


def after_mutation(value: Any, mutation: Any) -> Any:
    """Graph marker: ``value`` shares memory with the result of ``mutation`` and must be read after it; returns ``value``."""
    del mutation
    return value


def place_of(node: fx.Node) -> int:
    """How many nodes stand before it in its recorded graph."""
    return int(node.meta["place"])


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module during a recorded run.

    Attributes:
        fqn: canonical name of the module ("" is the root).
        args: nodes (or None for tensors of unknown origin) of the tensor arguments, positional first.
        n_positional: number of positional arguments.
        keywords: names of keyword arguments.
        input_shape: shape of the first tensor argument, or None.
        output_shape: shape of the first tensor in the result, or None.
        dtype: dtype of the first tensor argument, or None.
        leaf: the call is one ``call_module`` node of the graph.
        raised: the call ended in an exception.
        single: the result is one tensor and nothing else.
        given: what each argument was, positional first: "tensor", ``repr`` of a plain value, or the name of its class.
    """

    fqn: str
    args: tuple[fx.Node | None, ...]
    n_positional: int
    keywords: tuple[str, ...]
    input_shape: tuple[int, ...] | None
    output_shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    leaf: bool
    output: fx.Node | None = None
    raised: bool = False
    single: bool = False
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class DirectUse:
    """A parameter read by a function outside the module that owns it (``F.linear(x, self.fc.weight)``)."""

    parameter: str
    function: str
    where: str
    node: fx.Node | None


@dataclass(frozen=True)
class Recording:
    """One scenario as recorded.

    Attributes:
        scenario: what was run.
        graph: a torch.fx graph; ``node.meta`` has ``tensor_meta`` (shape, dtype, stride), ``nn_module_stack`` (FQNs of the
            calling modules, outermost first), ``module_call`` (index of the call for ``call_module`` nodes) and ``place`` (see
            :func:`place_of`).
        calls: module calls in the order in which they ended.
        direct_uses: parameters read past their module.
        value_reads: how often Python read a tensor's values (``item``, ``bool``, ``tolist``); such a graph is evidence, not a
            program for other inputs.
        constants: small tensors of unknown origin that the graph reads by ``get_attr``.
        attention: calls of Transformers' attention functions, in their order.
        restructures: the run put other modules into the model (BigBird does at its first short input).
    """

    scenario: Scenario
    graph: fx.Graph
    calls: tuple[ModuleCall, ...]
    direct_uses: tuple[DirectUse, ...]
    value_reads: int
    constants: dict[str, torch.Tensor] = field(default_factory=dict, compare=False)
    unknown_tensors: int = 0
    restructures: bool = False
    attention: tuple[AttentionCall, ...] = ()

    @cached_property
    def leaf_nodes(self) -> dict[str, list[fx.Node]]:
        """Module → the graph's nodes that call it, in their order."""
        found: dict[str, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.op == "call_module":
                found.setdefault(str(node.target), []).append(node)
        return found

    @cached_property
    def returned_by(self) -> dict[fx.Node, list[int]]:
        """Node → places in ``calls`` of those that returned it."""
        found: dict[fx.Node, list[int]] = {}
        for place, call in enumerate(self.calls):
            if call.output is not None:
                found.setdefault(call.output, []).append(place)
        return found

    @cached_property
    def _counts(self) -> Counter[str]:
        return Counter(call.fqn for call in self.calls if not call.raised)

    def call_counts(self) -> Counter[str]:
        """Number of calls of each module; not to be changed."""
        return self._counts


@dataclass(frozen=True)
class Capture:
    """All recordings of one model; merged views over the scenarios.

    Attributes:
        recordings: one per scenario that ran.
        failures: (scenario name, error text) of those that did not run.
    """

    recordings: tuple[Recording, ...] = ()
    failures: tuple[tuple[str, str], ...] = ()

    @property
    def has_graph(self) -> bool:
        """True when at least one scenario was recorded."""
        return bool(self.recordings)

    def call_counts(self) -> Counter[str]:
        """Calls of each module over all scenarios."""
        total: Counter[str] = Counter()
        for recording in self.recordings:
            total += recording.call_counts()
        return total

    def calls_of(self, fqn: str) -> tuple[ModuleCall, ...]:
        """Every successful call of one module over all scenarios."""
        return tuple(call for rec in self.recordings for call in rec.calls if call.fqn == fqn and not call.raised)

    def calls_by_module(self) -> dict[str, list[ModuleCall]]:
        """Successful calls grouped by module."""
        grouped: dict[str, list[ModuleCall]] = {}
        for recording in self.recordings:
            for call in recording.calls:
                if not call.raised:
                    grouped.setdefault(call.fqn, []).append(call)
        return grouped

    def direct_uses_by_parameter(self) -> dict[str, list[DirectUse]]:
        """Direct uses grouped by the parameter's canonical name."""
        grouped: dict[str, list[DirectUse]] = {}
        for recording in self.recordings:
            for use in recording.direct_uses:
                grouped.setdefault(use.parameter, []).append(use)
        return grouped


def to_graph_module(model: nn.Module, recording: Recording) -> fx.GraphModule:
    """An executable ``fx.GraphModule`` over the model's own modules and tensors, for checks at the recorded shapes.

    Sizes, masks and control flow are those of the recorded run: it is an oracle for probes, never a replacement.

    Raises:
        LookupError: the graph reads a large tensor that no module of the model holds.
    """
    root: dict[str, Any] = dict(recording.constants)
    for node in recording.graph.nodes:
        if node.op in ("call_module", "get_attr") and node.target not in root:
            if node.meta.get("unknown"):
                raise LookupError(f"{node.target} is a tensor of unknown origin that was too large to keep")
            root[node.target] = operator.attrgetter(node.target)(model) if node.target else model
    return fx.GraphModule(root, recording.graph)
