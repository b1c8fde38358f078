"""Turns observed torch calls and module calls into torch.fx nodes."""

from __future__ import annotations

import dataclasses
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Target
from torch.fx.passes.shape_prop import TensorMetadata
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from te_convert.capture.graph import DirectUse, ModuleCall, Recording, after_mutation
from te_convert.capture.preserve import copy_inputs
from te_convert.capture.scenario import Scenario
from te_convert.capture.tensors import first_tensor, iter_tensors

_PLAIN = (int, float, bool, complex, str, type(None), type(Ellipsis), slice)
_PLAIN_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_MAX_CONSTANT = 4096
_VALUE_READS = frozenset(
    {"item", "__bool__", "__int__", "__float__", "__index__", "tolist", "numpy", "equal", "is_nonzero", "__contains__"}
)
_METADATA_ONLY = frozenset(
    {"new_zeros", "new_empty", "new_ones", "new_full", "new_tensor"}
    | {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "size", "dim", "numel", "__set__"}
)
_LIKE_SECOND = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as"})  # the second tensor gives dtype or shape only


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _children(value: Any) -> list[tuple[Callable[..., Any], Any, Any]]:
    """(accessor, key, item) for each element of a nested result."""
    if isinstance(value, Mapping):
        return [(operator.getitem, key, item) for key, item in value.items()]
    if isinstance(value, (tuple, list)):
        return [(operator.getitem, index, item) for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(getattr, field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []


def _start(
    fqn: str,
    inputs: list[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaf: bool,
    nodes: tuple[fx.Node | None, ...],
) -> ModuleCall:
    first = inputs[0] if inputs else None
    return ModuleCall(
        fqn=fqn,
        args=nodes,
        n_positional=len(args),
        keywords=tuple(kwargs),
        input_shape=None if first is None or first.is_nested else tuple(first.shape),
        output_shape=None,
        dtype=None if first is None else first.dtype,
        output_dtype=None,
        leaf=leaf,
    )


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class Recorder:
    """The state of one recording.  Tensors are held weakly: nothing outlives the run because it was watched."""

    def __init__(self, model: nn.Module, leaf: Callable[[nn.Module], bool], fake: dict[str, torch.Tensor] | None = None) -> None:
        self.graph = fx.Graph()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._leaves = {id(module) for module in model.modules() if leaf(module)}
        self._owners: dict[int, set[int]] = defaultdict(set)
        self._attributes = self._register(model, fake or {})
        self._nodes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._by_storage: dict[int, list[TensorWeakRef]] = defaultdict(list)
        self._get_attr: dict[str, fx.Node] = {}
        self._stack: list[nn.Module] = []
        self._leaf_depth = 0
        self._calls: list[ModuleCall] = []
        self._uses: list[DirectUse] = []
        self._value_reads = 0
        self._constants: dict[str, torch.Tensor] = {}
        self._unknown = 0

    def _register(self, model: nn.Module, fake: dict[str, torch.Tensor]) -> dict[int, tuple[str, bool, torch.Tensor]]:
        """id(tensor) → (name, is a parameter, tensor); the reference keeps the id valid for the run."""
        found: dict[int, tuple[str, bool, torch.Tensor]] = {}
        for prefix, module in model.named_modules():
            for is_parameter, tensors in ((True, module._parameters), (False, module._buffers)):
                for name, tensor in tensors.items():
                    fqn = f"{prefix}.{name}" if prefix else name
                    tensor = fake.get(fqn, tensor)
                    if tensor is not None:
                        found.setdefault(id(tensor), (fqn, is_parameter, tensor))
                        self._owners[id(tensor)].add(id(module))
        return found

    # ---- the run -------------------------------------------------------------------------------------------------
    def begin(self, scenario: Scenario) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copy the inputs and make a placeholder for each tensor in them."""
        args, kwargs = copy_inputs((scenario.args, scenario.kwargs))
        named = [(f"args{path}", tensor) for path, tensor in iter_tensors(args)] + list(iter_tensors(kwargs))
        for path, tensor in named:
            clean = "".join(char if char.isalnum() else "_" for char in path).strip("_") or "input"
            if tensor not in self._nodes and id(tensor) not in self._attributes:
                self._bind_tensor(tensor, self.graph.placeholder(clean))
        return args, kwargs

    def finish(self, scenario: Scenario, output: Any) -> Recording:
        """Close the graph with the tensors of the output."""
        self.graph.output(tuple(self._node(tensor) for _, tensor in iter_tensors(output)))
        self._nodes.clear()
        self._by_storage.clear()
        return Recording(
            scenario=scenario,
            graph=self.graph,
            calls=tuple(self._calls),
            direct_uses=tuple(self._uses),
            value_reads=self._value_reads,
            constants=self._constants,
            unknown_tensors=self._unknown,
        )

    def function_call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function and record it unless a leaf module is running."""
        if self._leaf_depth:
            self._note_uses(func, (*args, *kwargs.values()), None)
            return func(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        before = [(tensor, _version(tensor)) for tensor in inputs]
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        changed = [tensor for tensor, version in before if _version(tensor) != version]
        if not changed and not _tensors(output):
            self._value_reads += name in _VALUE_READS
            return output
        if name == "__set__":  # x.data = y, x.grad = y: no value flows through the graph
            return output
        node = self._function_node(func, args, kwargs)
        self._note_uses(func, inputs, node)
        self._bind(output, node)
        self._bind_mutated(changed, output, node)
        return output

    def module_call(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module; a leaf becomes one ``call_module`` node."""
        if self._leaf_depth or id(module) not in self._names:
            return call(module, *args, **kwargs)
        leaf = id(module) in self._leaves
        inputs = [tensor for _, tensor in iter_tensors((args, kwargs))]
        started = _start(self._names[id(module)], inputs, args, kwargs, leaf, tuple(map(self._known, inputs)))
        converted = (self._convert(args), self._convert(kwargs)) if leaf else None
        before = [(tensor, _version(tensor)) for tensor in inputs] if leaf else []
        self._stack.append(module)
        self._leaf_depth += leaf
        try:
            output = call(module, *args, **kwargs)
        except BaseException:
            self._calls.append(dataclasses.replace(started, raised=True))
            raise
        finally:
            self._stack.pop()
            self._leaf_depth -= leaf
        node = None
        if converted is not None:
            node = self._create("call_module", started.fqn, *converted)
            node.meta["module_call"] = len(self._calls)
            self._bind(output, node)
            self._bind_mutated([tensor for tensor, version in before if _version(tensor) != version], output, node)
        self._calls.append(self._ended(started, output, node))
        return output

    def _ended(self, call: ModuleCall, output: Any, node: fx.Node | None) -> ModuleCall:
        result = first_tensor(output)
        if result is None:
            return call
        known = node if node is not None else self._known(result)
        return dataclasses.replace(call, output_shape=tuple(result.shape), output_dtype=result.dtype, output=known)

    def autograd_function(self, cls: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an ``autograd.Function`` as one node (its forward may use anything)."""
        if self._leaf_depth:
            return apply(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        converted = (self._convert(args), self._convert(kwargs))
        self._leaf_depth += 1
        try:
            output = apply(*args, **kwargs)
        finally:
            self._leaf_depth -= 1

        def run(*values: Any, **named: Any) -> Any:
            return cls.apply(*values, **named)

        run.__name__ = run.__qualname__ = cls.__name__
        node = self._create("call_function", run, *converted)
        node.meta["autograd_function"] = f"{cls.__module__}.{cls.__qualname__}"
        self._note_uses(run, inputs, node)
        self._bind(output, node)
        return output

    # ---- nodes ---------------------------------------------------------------------------------------------------
    def _function_node(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            return self._create("call_function", getattr, (self._convert(args[0]), attribute), {})
        converted, named = self._convert(args), self._convert(kwargs)
        if args and isinstance(args[0], torch.Tensor) and getattr(torch.Tensor, name, None) is func:
            return self._create("call_method", name, converted, named)
        return self._create("call_function", func, converted, named)

    def _create(self, op: str, target: Target, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta["nn_module_stack"] = tuple(self._names[id(module)] for module in self._stack)
        return node

    def _convert(self, value: Any) -> Any:
        def one(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return self._node(leaf)
            if isinstance(leaf, torch.Size):
                return tuple(leaf)
            return leaf if isinstance(leaf, (*_PLAIN, *_PLAIN_TORCH)) else f"<{type(leaf).__name__}>"

        return tree_map(one, value)

    def _known(self, tensor: torch.Tensor) -> fx.Node | None:
        node: fx.Node | None = self._nodes.get(tensor)
        return node

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        node = self._known(tensor)
        if node is not None:
            return node
        if id(tensor) in self._attributes:
            name = self._attributes[id(tensor)][0]
            if name not in self._get_attr:
                self._get_attr[name] = self._describe(self._create("get_attr", name, (), {}), tensor)
            return self._get_attr[name]
        name = f"_constant_{self._unknown}"
        self._unknown += 1
        if tensor.numel() <= _MAX_CONSTANT and not tensor.is_meta:
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

    # ---- who produced what ---------------------------------------------------------------------------------------
    def _bind_tensor(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._nodes[tensor] = self._describe(node, tensor)
        key = self._storage(tensor)
        if key is not None:
            self._by_storage[key].append(TensorWeakRef(tensor))

    @staticmethod
    def _storage(tensor: torch.Tensor) -> int | None:
        try:
            key: int = tensor.untyped_storage()._cdata
        except (RuntimeError, NotImplementedError):
            return None
        return key

    def _bind(self, output: Any, node: fx.Node) -> None:
        if not isinstance(output, torch.Tensor):
            self._bind_items(output, node)
        elif id(output) not in self._attributes:  # ``weight.to(dtype)`` may return the Parameter itself
            self._bind_tensor(output, node)

    def _bind_items(self, value: Any, node: fx.Node) -> None:
        """Bind the tensors of a nested result through getitem and getattr nodes."""
        for access, key, item in _children(value):
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

    # ---- facts about the run -------------------------------------------------------------------------------------
    def _note_uses(self, func: Callable[..., Any], values: Iterable[Any], node: fx.Node | None) -> None:
        """Remember parameters read by a function outside the module that owns them."""
        name = getattr(func, "__name__", str(func))
        if name in _METADATA_ONLY or not self._stack:
            return
        where = self._names[id(self._stack[-1])]
        for position, value in enumerate(values):
            found = self._attributes.get(id(value)) if isinstance(value, torch.Tensor) else None
            if found is None or not found[1] or self._is_own(value, where) or (position and name in _LIKE_SECOND):
                continue
            self._uses.append(DirectUse(found[0], name, where, node))

    def _is_own(self, parameter: torch.Tensor, where: str) -> bool:
        """True when the running module owns the parameter (a leaf also owns what its children hold)."""
        owners = self._owners[id(parameter)]
        if id(self._stack[-1]) in owners:
            return True
        return bool(self._leaf_depth) and self._attributes[id(parameter)][0].startswith(f"{where}.")
