"""Turns observed torch calls and module calls into torch.fx nodes."""

from __future__ import annotations

import dataclasses
import keyword
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from te_convert.capture.attention import AttentionCall
from te_convert.capture.graph import DirectUse, ModuleCall, Recording
from te_convert.capture.preserve import copy_inputs
from te_convert.capture.producers import ProducerMap
from te_convert.capture.scenario import Scenario
from te_convert.capture.tensors import first_tensor, iter_tensors
from te_convert.capture.values import describe_argument, find_tensors, is_plain

_VALUE_READS = frozenset(
    {"item", "__bool__", "__int__", "__float__", "__index__", "tolist", "numpy", "equal", "is_nonzero", "__contains__"}
)
_METADATA_ONLY = frozenset(
    {"new_zeros", "new_empty", "new_ones", "new_full", "new_tensor"}
    | {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "size", "dim", "numel", "__set__"}
)
_LIKE_SECOND = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as"})  # the second tensor gives dtype or shape only


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
        given=tuple(map(describe_argument, (*args, *kwargs.values()))),
    )


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _function_name(func: Any) -> str:
    """A function's own name; for the getter of a tensor's attribute (``weight.T``) that of the attribute."""
    name = getattr(func, "__name__", str(func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name


class Recorder(ProducerMap):
    """The state of one recording: what the run's torch calls and module calls say, in their order."""

    def __init__(self, model: nn.Module, leaf: Callable[[nn.Module], bool], fake: dict[str, torch.Tensor] | None = None) -> None:
        super().__init__(model, fake or {})
        self._leaves = {id(module) for module in model.modules() if leaf(module)}
        self._leaf_depth = 0
        self._function_depth = 0
        self._calls: list[ModuleCall] = []
        self._unseen_calls: list[ModuleCall] = []
        self._uses: list[DirectUse] = []
        self._value_reads = 0
        self._attention: list[AttentionCall] = []

    # ---- the run -------------------------------------------------------------------------------------------------
    def begin(self, scenario: Scenario) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copy the inputs and make a placeholder for each tensor in them."""
        args, kwargs = copy_inputs((scenario.args, scenario.kwargs))
        named = [(f"args{path}", tensor) for path, tensor in iter_tensors(args)] + list(iter_tensors(kwargs))
        taken = {"self", *keyword.kwlist}
        for path, tensor in named:
            clean = "".join(char if char.isalnum() else "_" for char in path).strip("_")
            clean = clean if clean.isidentifier() else f"input_{clean}"
            while clean in taken:
                clean += "_"
            if tensor not in self._nodes and id(tensor) not in self._attributes:
                taken.add(clean)
                self._bind_tensor(tensor, self.graph.placeholder(clean))
        return args, kwargs

    def finish(self, scenario: Scenario, output: Any) -> Recording:
        """Close the graph with the tensors of the output."""
        self.graph.output(tuple(self._node(tensor) for _, tensor in iter_tensors(output)))
        for place, node in enumerate(self.graph.nodes):
            node.meta["place"] = place
        self.forget()
        return Recording(
            scenario=scenario,
            graph=self.graph,
            calls=(*self._calls, *self._unseen_calls),
            direct_uses=tuple(self._uses),
            value_reads=self._value_reads,
            constants=self._constants,
            unknown_tensors=self._unknown,
            attention=tuple(self._attention),
        )

    def function_call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function and record it unless a leaf module is running."""
        if self._leaf_depth:
            self._note_uses(func, (*args, *kwargs.values()), None)
            return func(*args, **kwargs)
        inputs = find_tensors((args, kwargs))
        before = [(tensor, _version(tensor)) for tensor in inputs]
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        changed = [tensor for tensor, version in before if _version(tensor) != version]
        if not changed and not find_tensors(output):
            self._value_reads += name in _VALUE_READS
            return output
        if name == "__set__":  # x.data = y, x.grad = y: no value flows through the graph
            return output
        if not inputs and not all(map(is_plain, tree_leaves((args, kwargs)))):  # torch.from_numpy(array): the result is a constant
            for tensor in find_tensors(output):
                self._node(tensor)
            return output
        node = self._function_node(func, args, kwargs)
        self._note_uses(func, inputs, node)
        self._bind(output, node)
        self._bind_mutated(changed, output, node)
        return output

    def module_call(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module; a leaf becomes one ``call_module`` node."""
        if id(module) not in self._names or self._leaf_depth > self._function_depth:
            return call(module, *args, **kwargs)
        if self._leaf_depth:
            return self._call_in_function(module, call, args, kwargs)
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

    def _call_in_function(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._stack.append(module)
        try:
            return self.unseen_call(module, call, args, kwargs)
        finally:
            self._stack.pop()

    def unseen_call(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module inside an ``autograd.Function`` or in another thread: the call is noted, the graph does not show it."""
        if id(module) not in self._names:
            return call(module, *args, **kwargs)
        inputs = [tensor for _, tensor in iter_tensors((args, kwargs))]
        leaf = id(module) in self._leaves
        started = _start(self._names[id(module)], inputs, args, kwargs, leaf, (None,) * len(inputs))
        output = call(module, *args, **kwargs)
        self._unseen_calls.append(self._ended(started, output, None))
        return output

    def _ended(self, call: ModuleCall, output: Any, node: fx.Node | None) -> ModuleCall:
        result = first_tensor(output)
        if result is None:
            return call
        known = node if node is not None else self._known(result)
        return dataclasses.replace(
            call, output_shape=tuple(result.shape), output_dtype=result.dtype, output=known, single=result is output
        )

    def autograd_function(self, cls: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an ``autograd.Function`` as one node (its forward may use anything); checkpoint's own is looked through."""
        if self._leaf_depth or cls.__module__ == "torch.utils.checkpoint":
            return apply(*args, **kwargs)
        inputs = find_tensors((args, kwargs))
        converted = (self._convert(args), self._convert(kwargs))
        before = [(tensor, _version(tensor)) for tensor in inputs]
        self._leaf_depth += 1
        self._function_depth += 1
        try:
            output = apply(*args, **kwargs)
        finally:
            self._leaf_depth -= 1
            self._function_depth -= 1

        def run(*values: Any, **named: Any) -> Any:
            return cls.apply(*values, **named)

        run.__name__ = run.__qualname__ = cls.__name__
        node = self._create("call_function", run, *converted)
        node.meta["autograd_function"] = f"{cls.__module__}.{cls.__qualname__}"
        self._note_uses(run, inputs, node)
        self._bind(output, node)
        self._bind_mutated([tensor for tensor, version in before if _version(tensor) != version], output, node)
        return output

    def attention_call(
        self, module: nn.Module, call: Callable[[str], AttentionCall], inputs: list[torch.Tensor], run: Callable[[], Any]
    ) -> Any:
        """Note that a module hands its queries, keys and values to a Transformers attention function, and call it."""
        if id(module) not in self._names:
            return run()
        described = call(self._names[id(module)])
        before = [self._known(tensor) for tensor in inputs]
        output = run()
        result = first_tensor(output)
        self._attention.append(dataclasses.replace(described, nodes=(*before, None if result is None else self._known(result))))
        return output

    # ---- nodes ---------------------------------------------------------------------------------------------------
    def _function_node(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._create("call_function", getattr, (self._convert(args[0]), _function_name(func)), {})
        converted, named = self._convert(args), self._convert(kwargs)
        if args and isinstance(args[0], torch.Tensor) and getattr(torch.Tensor, name, None) is func:
            return self._create("call_method", name, converted, named)
        return self._create("call_function", func, converted, named)

    # ---- facts about the run -------------------------------------------------------------------------------------
    def _note_uses(self, func: Callable[..., Any], values: Iterable[Any], node: fx.Node | None) -> None:
        """Remember parameters read by a function outside the module that owns them."""
        name = _function_name(func)
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
        return bool(self._leaf_depth) and self._attributes[id(parameter)][0].startswith(f"{where}." if where else "")
