"""The way from the result of a written-out attention back to the product that made its scores."""

from __future__ import annotations

from torch import fx, nn

from te_convert.facts.scores import PRODUCTS
from te_convert.match.attention_cores import name_of

_MAX_STEPS = 24


class NotUnderstoodError(Exception):
    """Why the path from scores to result is not attention."""


class Backwards:
    """From the second product back to the first one.

    Attributes:
        product: the first product; ``factors`` are its two inputs.
        between: the nodes from it to the probabilities, in their order.
        value: the values.

    Raises:
        NotUnderstoodError: there is no such path.
    """

    def __init__(self, output: fx.Node, modules: dict[str, nn.Module]) -> None:
        factors = _factors(output)
        if factors is None:
            raise NotUnderstoodError(f"{name_of(output)} is not a product of probabilities and values")
        node, self.value = factors
        passed: list[fx.Node] = []
        for _ in range(_MAX_STEPS):
            found = _factors(node) if name_of(node) in PRODUCTS else None
            if found is not None:
                self.product, self.factors, self.between = node, found, tuple(reversed(passed))
                return
            inputs = [item for item in node.all_input_nodes if item.op not in ("get_attr", "placeholder")]
            passed.append(node)
            source = next((item for item in inputs if _leads_to_product(item)), None)
            if source is None:
                break
            node = source
        raise NotUnderstoodError(f"{label(passed[-1], modules)} does something to the scores that TE's attention does not")


def _leads_to_product(node: fx.Node) -> bool:
    """Whether walking back along first inputs meets a product soon."""
    for _ in range(_MAX_STEPS):
        if name_of(node) in PRODUCTS:
            return True
        if not node.all_input_nodes or (node.op == "call_module" and not _is_plain_module(node)):
            return False
        inputs = node.all_input_nodes
        node = next((item for item in inputs if item.op not in ("get_attr", "placeholder")), inputs[0])
    return False


def _is_plain_module(node: fx.Node) -> bool:
    return "softmax" in str(node.target).lower() or "drop" in str(node.target).lower()


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two nodes that a product multiplies, whatever form it has."""
    name = name_of(node)
    if node.op == "call_module" or name not in PRODUCTS:
        return None
    if name == "einsum":
        inputs = list(node.all_input_nodes)
    else:
        values = (*node.args, *node.kwargs.values())
        inputs = [item for item in values if isinstance(item, fx.Node)]
    return (inputs[-2], inputs[-1]) if len(inputs) >= 2 else None


def label(node: fx.Node, modules: dict[str, nn.Module]) -> str:
    """What a node is called in a reason."""
    return type(modules[str(node.target)]).__name__ if node.op == "call_module" else name_of(node)
