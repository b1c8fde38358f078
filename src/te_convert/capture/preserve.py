"""Leave a model, the random streams and the caller's inputs exactly as they were after running the model."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

_CONTAINERS = (dict, list, set)


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


class _ModuleState:
    """Shallow copy of one module's attributes, with the contents of its plain containers and the values of its buffers."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(module.__dict__)
        self.containers = [(value, copy.copy(value)) for value in self.attributes.values() if isinstance(value, _CONTAINERS)]
        self.buffers = [(b, b.detach().clone()) for b in module._buffers.values() if b is not None and not b.is_meta]
        self.grads = [(p, p.grad) for p in module._parameters.values() if p is not None]

    def restore(self) -> None:
        state = self.module.__dict__
        if state.keys() != self.attributes.keys() or any(state[k] is not v for k, v in self.attributes.items()):
            state.clear()
            state.update(self.attributes)
        for container, saved in self.containers:
            _restore_container(container, saved)
        with torch.no_grad():
            for buffer, value in self.buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        for parameter, grad in self.grads:
            if parameter.grad is not grad:
                parameter.grad = grad


def _restore_container(container: Any, saved: Any) -> None:
    if isinstance(container, list):
        if len(container) != len(saved) or any(a is not b for a, b in zip(container, saved, strict=True)):
            container[:] = saved
    elif isinstance(container, set):
        if container != saved:
            container.clear()
            container.update(saved)
    elif list(container) != list(saved) or any(container[k] is not v for k, v in saved.items()):
        container.clear()
        container.update(saved)


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Restore every module's attributes, plain containers, buffers, hooks, train flags and gradients, and all random states.

    Values of Parameters are not copied (that would be a second model); a forward that changes its own weights in place is
    outside what this protects.
    """
    states = [_ModuleState(module) for module in model.modules()]
    with preserve_rng():
        try:
            yield
        finally:
            for state in states:
                state.restore()


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


def copy_inputs(inputs: Any) -> Any:
    """A deep copy of example inputs; tensors are cloned and detached, other objects (caches, configs) deep-copied."""
    memo: dict[int, Any] = {}

    def clone(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in memo:
                memo[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
            return memo[id(value)]
        if value is None or isinstance(value, (int, float, bool, str)):
            return value
        try:
            return copy.deepcopy(value)
        except Exception:  # a handle that cannot be copied is passed as it is
            return value

    return tree_map(clone, inputs)
