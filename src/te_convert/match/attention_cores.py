"""softmax(q @ k.T) @ v in the recorded graph: as one call of torch's function, or written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import fx

SHAPES = frozenset(
    {"transpose", "reshape", "view", "contiguous", "permute", "flatten", "unflatten", "unbind", "chunk", "split", "getitem"}
    | {"__getitem__", "unsqueeze", "squeeze", "t", "mT", "swapaxes", "getattr"}
)
"""Operations that only change the shape."""
_PRODUCTS = frozenset({"matmul", "bmm", "__matmul__", "einsum", "baddbmm"})
_BETWEEN = frozenset(
    {"mul", "div", "truediv", "true_divide", "add", "sub", "iadd", "masked_fill", "masked_fill_", "where", "float", "to", "type_as"}
    | {"__mul__", "__truediv__", "__add__", "mul_", "div_", "add_", "contiguous", "type", "clamp", "dropout", "tanh", "maximum"}
)
_MAX_STEPS = 24


@dataclass(frozen=True)
class AttentionCore:
    """One attention in a graph.

    Attributes:
        query: node of the queries; ``key`` and ``value`` likewise.
        output: node of the result.
        is_call: torch's function; False for a softmax that is written out.
        between: what stands between the two products of a written-out attention.
    """

    query: fx.Node
    key: fx.Node
    value: fx.Node
    output: fx.Node
    is_call: bool
    between: tuple[str, ...] = ()


def name_of(node: fx.Node) -> str:
    """Function or method name of a node; a module's is empty."""
    if node.op == "call_module":
        return ""
    return str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", node.target))


def called_core(node: fx.Node) -> AttentionCore | None:
    """The attention whose result ``node`` is, as one call."""
    if name_of(node) != "scaled_dot_product_attention" or len(node.args) < 3:
        return None
    query, key, value = node.args[:3]
    if not all(isinstance(item, fx.Node) for item in (query, key, value)):
        return None
    return AttentionCore(query, key, value, node, is_call=True)  # type: ignore[arg-type]  # just checked


def written_core(node: fx.Node, is_idle: Callable[[fx.Node], bool]) -> AttentionCore | None:
    """The attention whose result ``node`` is, written out: a product with what a softmax gave for another product."""
    if name_of(node) not in _PRODUCTS or len(node.all_input_nodes) != 2:
        return None
    probabilities, value = node.all_input_nodes
    softmax = _back(probabilities, lambda found: name_of(found) == "softmax", is_idle)
    if softmax is None:
        return None
    between: list[str] = []
    scores = _back(softmax.all_input_nodes[0], lambda found: name_of(found) in _PRODUCTS, is_idle, between)
    if scores is None or len(scores.all_input_nodes) < 2:
        return None
    query, key = scores.all_input_nodes[-2:]
    return AttentionCore(query, key, value, node, is_call=False, between=tuple(reversed(between)))


def _back(
    node: fx.Node, wanted: Callable[[fx.Node], bool], is_idle: Callable[[fx.Node], bool], passed: list[str] | None = None
) -> fx.Node | None:
    """Walk back along first inputs, through arithmetic and idle dropouts, to a node that is wanted."""
    for _ in range(_MAX_STEPS):
        if wanted(node):
            return node
        known = is_idle(node) or name_of(node) in _BETWEEN | SHAPES | {"after_mutation"}
        if not known or not node.all_input_nodes:
            return None
        if passed is not None and name_of(node):
            passed.append(name_of(node))
        inputs = node.all_input_nodes
        node = next((item for item in inputs if item.op not in ("get_attr", "placeholder")), inputs[0])
    return None


def written_cores(graph: fx.Graph, is_idle: Callable[[fx.Node], bool]) -> Iterator[AttentionCore]:
    """Every attention of a graph that is written out."""
    for node in graph.nodes:
        core = written_core(node, is_idle)
        if core is not None:
            yield core
