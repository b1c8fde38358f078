"""Leave a model, the random streams and the caller's inputs exactly as they were after running the model."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_CONTAINERS = (dict, list, set, deque)
_MAX_ENTERED = 10_000
"""Containers with more items are restored, and the items of their items are not looked at."""


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the random states of Python, numpy, torch's CPU and (if in use) CUDA generators."""
    python, numpy_state, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def seed_all(seed: int) -> None:
    """Seed every generator that a forward pass may read (Transformers' SpecAugment uses numpy's)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _restore_tensor(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor its value back; values are compared, since not every kernel counts a change in the tensor's version."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.shape != value.shape or tensor.dtype != value.dtype:
            tensor.data = value
        elif tensor.layout is not torch.strided or not torch.equal(tensor, value):
            tensor.copy_(value)


class _ContainerState:
    """Contents of plain containers and values of plain tensors that modules hold as attributes, at any depth."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._seen: set[int] = set()
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        for module in modules:
            for value in module.__dict__.values():
                self._save(value)

    def _save(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._save_tensor(value)
        elif isinstance(value, _CONTAINERS) and id(value) not in self._seen:
            self._seen.add(id(value))
            self._contents.append((value, _items(value)))
            if len(value) <= _MAX_ENTERED:
                for item in value.values() if isinstance(value, dict) else value:
                    self._save(item)

    def _save_tensor(self, tensor: torch.Tensor) -> None:
        """Parameters are not copied (that would be a second model), nor is a tensor that autograd made from them."""
        if isinstance(tensor, nn.Parameter) or is_lazy(tensor) or tensor.is_meta or tensor.grad_fn is not None:
            return
        if id(tensor) not in self._seen:
            self._seen.add(id(tensor))
            self._tensors.append((tensor, tensor.detach().clone()))

    def restore(self) -> None:
        for container, saved in self._contents:
            _restore_container(container, saved)
        for tensor, value in self._tensors:
            _restore_tensor(tensor, value)


class _ModuleState:
    """Shallow copy of one module's attributes, its class, and what its lazy parameters were before they got a shape."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.module_class = type(module)
        self.attributes = dict(module.__dict__)
        tensors = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
        self.lazy = [(tensor, type(tensor), tensor.data) for tensor in tensors if is_lazy(tensor)]
        leaves = [p for p in module._parameters.values() if p is not None and p.is_leaf and not is_lazy(p)]
        self.grads = [(parameter, parameter.grad) for parameter in leaves]

    def restore(self) -> None:
        if type(self.module) is not self.module_class:  # a lazy module becomes an ordinary one in its first call
            self.module.__class__ = self.module_class
        state = self.module.__dict__
        if state.keys() != self.attributes.keys() or any(state[k] is not v for k, v in self.attributes.items()):
            state.clear()
            state.update(self.attributes)
        for tensor, kind, data in self.lazy:
            if type(tensor) is not kind:
                tensor.data = data
                tensor.__class__ = kind
        for parameter, grad in self.grads:
            parameter.grad = grad


def _items(container: Any) -> Any:
    """What a container holds; ``copy.copy`` takes several times as long, and a model has thousands of empty ones."""
    return dict(container) if isinstance(container, dict) else set(container) if isinstance(container, set) else list(container)


def _restore_container(container: Any, saved: Any) -> None:
    if isinstance(container, dict):
        if list(container) != list(saved) or any(container[key] is not value for key, value in saved.items()):
            container.clear()
            container.update(saved)
    elif isinstance(container, set):
        if container != saved:
            container.clear()
            container.update(saved)
    elif len(container) != len(saved) or any(a is not b for a, b in zip(container, saved, strict=True)):
        container.clear()
        container.extend(saved)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore every module's attributes, plain containers, buffers, hooks, train flags and gradients, and all random states.

    Gradients are set aside meanwhile, so that a model that calls ``backward`` itself cannot add to them.  Values of Parameters
    are not copied (that would be a second model); a forward that changes its own weights in place, or an object of a class of
    its own, is outside what this protects.
    """
    modules = list(model.modules())
    states = [_ModuleState(module) for module in modules]
    containers = _ContainerState(modules)
    with preserve_rng():
        try:
            for parameter in model.parameters():
                parameter.grad = None
            yield
        finally:
            for state in states:
                state.restore()
            containers.restore()


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """:func:`untouched`, to run the model in.

    torch's encoders run without their fast path meanwhile: it shows a recording nothing, and fills padded positions with zeros.
    """
    with untouched(model), _without_fast_path():
        yield


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put the whole model into train or eval mode and restore each module's own flag."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, flag in flags:
            module.training = flag


class _CloneTensors(TorchFunctionMode):
    """Lets ``copy.deepcopy`` copy tensors that have a history (a cache filled with gradients on): as tensors without one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


def copy_inputs(inputs: Any) -> Any:
    """A deep copy of example inputs; tensors are cloned and detached, other objects (caches, configs) deep-copied.

    What cannot be copied (a handle) is passed as it is.
    """
    memo: dict[int, Any] = {}

    def clone(value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return memo.setdefault(id(value), value.clone_state())
        try:
            return copy.deepcopy(value, memo)
        except Exception:  # whatever an object's own copying raises
            return value

    with _CloneTensors():
        return tree_map(clone, inputs)
