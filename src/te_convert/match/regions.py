"""A stretch of the recorded graph as a function: evaluated on other values to find out what it computes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from te_convert.capture.graph import place_of
from te_convert.facts.stand_in import isolated, kind_key
from te_convert.match.readers import is_dropout, node_name

_LOW = (torch.bfloat16, torch.float16)
MAX_NODES = 24


class RegionError(Exception):
    """Why a stretch of the graph cannot be looked at as one function."""


@dataclass(frozen=True)
class Region:
    """Everything between some input nodes and one output node.

    Attributes:
        inputs: nodes whose values the region takes.
        output: the node whose value it gives.
        nodes: what lies between, in graph order, with the output and without the inputs.
    """

    inputs: tuple[fx.Node, ...]
    output: fx.Node
    nodes: tuple[fx.Node, ...]

    def dropouts(self, modules: dict[str, nn.Module]) -> tuple[fx.Node, ...]:
        """The dropouts in it."""
        return tuple(node for node in self.nodes if is_dropout(node, modules))

    def key(self, modules: dict[str, nn.Module]) -> Hashable:
        """Equal for regions that compute the same function of inputs of the same shapes."""
        index = {node: place for place, node in enumerate((*self.inputs, *self.nodes))}

        def plain(value: Any) -> str:
            return repr(fx.node.map_arg(value, lambda node: f"%{index.get(node, -1)}"))

        steps = tuple(
            (node.op, kind_key(modules[str(node.target)]) if node.op == "call_module" else node_name(node), plain(node.args),
             plain(node.kwargs))
            for node in self.nodes
        )  # fmt: skip
        return tuple(_shape(node) for node in self.inputs), steps

    def evaluate(self, modules: dict[str, nn.Module], values: list[torch.Tensor]) -> torch.Tensor:
        """The output for other values of the inputs, on the CPU in float32, with dropouts off.

        Raises:
            RegionError: a node that cannot be run on its own, or one that raises.
        """
        env: dict[fx.Node, Any] = {node: value.clone() for node, value in zip(self.inputs, values, strict=True)}
        try:
            with isolated():
                for node in self.nodes:
                    env[node] = run_node(node, env, modules)
        except RegionError:
            raise
        except Exception as error:  # whatever foreign code raises
            raise RegionError(f"{node_name(node)} fails on other values: {type(error).__name__}") from error
        result = env[self.output]
        if not isinstance(result, torch.Tensor):
            raise RegionError("its result is no tensor")
        return result


def _shape(node: fx.Node) -> tuple[int, ...]:
    meta = node.meta.get("tensor_meta")
    return () if meta is None else tuple(meta.shape)


def find_region(output: fx.Node, stop: Any) -> Region:
    """Walk back from ``output`` to the nodes for which ``stop(node)`` holds.

    Raises:
        RegionError: it reaches an input or a tensor of the model, or grows too large.
    """
    inputs: dict[fx.Node, None] = {}
    nodes: dict[fx.Node, None] = {}
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if node in nodes or node in inputs:
            continue
        if node is not output and stop(node):
            inputs[node] = None
            continue
        if node.op in ("placeholder", "get_attr"):
            raise RegionError(f"it also uses {node.target}")
        nodes[node] = None
        if len(nodes) > MAX_NODES:
            raise RegionError(f"more than {MAX_NODES} operations")
        waiting += node.all_input_nodes
    return Region(tuple(sorted(inputs, key=place_of)), output, tuple(sorted(nodes, key=place_of)))


def run_node(node: fx.Node, env: dict[fx.Node, Any], modules: dict[str, nn.Module]) -> Any:
    """One operation on the values of ``env``; dropouts are off.

    Raises:
        RegionError: a module with parameters or buffers.
    """
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
    args, kwargs = _widened(args), _widened(kwargs)
    if is_dropout(node, modules):
        return args[0] if args else kwargs["input"]
    if node.op == "call_function":
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    module = modules[str(node.target)]
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        raise RegionError(f"{node.target} has parameters")
    return type(module).forward(module, *args, **kwargs)


def _widened(value: Any) -> Any:
    """Casts to a low precision become casts to float32: the function is looked for, not its rounding."""
    if isinstance(value, torch.dtype) and value in _LOW:
        return torch.float32
    if isinstance(value, (list, tuple)):
        return type(value)(_widened(item) for item in value)
    if isinstance(value, dict):
        return {key: _widened(item) for key, item in value.items()}
    return value
