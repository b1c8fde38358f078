"""Which graph node produced each live tensor, through views, in-place changes and nested results."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Target
from torch.fx.passes.shape_prop import TensorMetadata
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from te_convert.capture.graph import after_mutation
from te_convert.capture.tensors import iter_tensors
from te_convert.capture.values import children, is_wrapped, to_graph_value

_MAX_CONSTANT = 4096


class ProducerMap:
    """A growing ``fx.Graph`` with the node of every tensor seen.  Tensors are held weakly: nothing outlives the run for it."""

    def __init__(self, model: nn.Module, fake: dict[str, torch.Tensor]) -> None:
        self.graph = fx.Graph()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[nn.Module] = []
        self._owners: dict[int, set[int]] = defaultdict(set)
        self._nodes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._by_storage: dict[int, list[TensorWeakRef]] = defaultdict(list)
        self._attributes = self._register(model, fake)
        self._get_attr: dict[str, fx.Node] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._unknown = 0

    def forget(self) -> None:
        """Let go of every tensor."""
        self._nodes.clear()
        self._by_storage.clear()

    def _register(self, model: nn.Module, fake: dict[str, torch.Tensor]) -> dict[int, tuple[str, bool, torch.Tensor]]:
        """id(tensor) → (name, is a parameter, tensor) of every tensor that a module holds; the reference keeps the id valid."""
        found: dict[int, tuple[str, bool, torch.Tensor]] = {}
        for prefix, module in model.named_modules():
            for is_parameter, tensors in ((True, module._parameters), (False, module._buffers), (False, vars(module))):
                for name, value in tensors.items():
                    fqn = f"{prefix}.{name}" if prefix else name
                    tensor = fake.get(fqn, value)
                    if isinstance(tensor, torch.Tensor):
                        if id(tensor) not in found:
                            self._watch_storage(tensor)
                        found.setdefault(id(tensor), (fqn, is_parameter, tensor))
                        self._owners[id(tensor)].add(id(module))
        return found

    def _create(self, op: str, target: Target, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta["nn_module_stack"] = tuple(self._names[id(module)] for module in self._stack)
        return node

    def _convert(self, value: Any) -> Any:
        return to_graph_value(value, self._node, self._module_node)

    def _module_node(self, module: nn.Module) -> fx.Node | str:
        name = self._names.get(id(module))
        return self._get_attribute(name) if name else f"<{type(module).__name__}>"

    def _get_attribute(self, name: str) -> fx.Node:
        if name not in self._get_attr:
            self._get_attr[name] = self._create("get_attr", name, (), {})
        return self._get_attr[name]

    def _known(self, tensor: torch.Tensor) -> fx.Node | None:
        node: fx.Node | None = self._nodes.get(tensor)
        return node

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        node = self._known(tensor)
        if node is not None:
            return node
        if id(tensor) in self._attributes:
            return self._describe(self._get_attribute(self._attributes[id(tensor)][0]), tensor)
        name = f"_constant_{self._unknown}"
        self._unknown += 1
        if not tensor.is_meta and not is_wrapped(tensor) and not tensor.is_nested and tensor.numel() <= _MAX_CONSTANT:
            self._constants[name] = tensor.detach().clone()
        node = self._create("get_attr", name, (), {})
        node.meta["unknown"] = True
        self._bind_tensor(tensor, node)
        return node

    def _describe(self, node: fx.Node, tensor: torch.Tensor) -> fx.Node:
        strides = tuple(tensor.stride()) if tensor.layout is torch.strided and not tensor.is_nested else ()
        shape = torch.Size(()) if tensor.is_nested else tensor.shape
        node.meta["tensor_meta"] = TensorMetadata(shape, tensor.dtype, tensor.requires_grad, strides, None, False, {})
        return node

    def _bind_tensor(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._nodes[tensor] = self._describe(node, tensor)
        self._watch_storage(tensor)

    def _watch_storage(self, tensor: torch.Tensor) -> None:
        key = self._storage(tensor)
        if key is not None:
            self._by_storage[key].append(TensorWeakRef(tensor))

    @staticmethod
    def _storage(tensor: torch.Tensor) -> int | None:
        try:
            key: int = tensor.untyped_storage()._cdata
        except (RuntimeError, NotImplementedError, ValueError):  # sparse, wrapped, lazy: no memory of its own
            return None
        return key

    def _bind(self, output: Any, node: fx.Node) -> None:
        if not isinstance(output, torch.Tensor):
            self._bind_items(output, node)
        elif id(output) not in self._attributes:  # ``weight.to(dtype)`` may return the Parameter itself
            self._bind_tensor(output, node)

    def _bind_items(self, value: Any, node: fx.Node) -> None:
        """Bind the tensors of a nested result through getitem and getattr nodes."""
        for access, key, item in children(value):
            if next(iter_tensors(item), None) is None:
                continue
            child = self.graph.call_function(access, (node, key))
            child.meta["nn_module_stack"] = node.meta["nn_module_stack"]
            if isinstance(item, torch.Tensor):
                self._bind_tensor(item, child)
            else:
                self._bind_items(item, child)

    def _bind_mutated(self, changed: list[torch.Tensor], output: Any, mutation: fx.Node) -> None:
        """Later readers of a changed tensor, or of a view of the same memory, depend on the change."""
        done = {id(output)}
        for tensor in changed:
            key = self._storage(tensor)
            aliases = [alias for alias in (ref() for ref in self._by_storage.get(key, ())) if alias is not None] if key else []
            for alias in (tensor, *aliases):
                if id(alias) not in done:
                    done.add(id(alias))
                    node = self._create("call_function", after_mutation, (self._node(alias), mutation), {})
                    self._nodes[alias] = self._describe(node, alias)
