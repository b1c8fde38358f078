"""What the tests of twins share: random weights, gradients, padding masks, and what was recorded from Transformer Engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from te_convert import reference

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "te_state_dicts.json").read_text(encoding="utf-8"))
"""State dicts and signatures of the real modules, by version ``transformer_engine``."""

Module = TypeVar("Module", bound=nn.Module)


def build(name: str, kwargs: Mapping[str, Any], **more: Any) -> nn.Module:
    """A twin from constructor arguments as JSON has them: lists stand for tuples, dtypes are named."""
    arguments: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in kwargs.items()}
    if "params_dtype" in arguments:
        arguments["params_dtype"] = getattr(torch, arguments["params_dtype"])
    twin: nn.Module = getattr(reference, name)(**arguments, **more)
    return twin


def perturb(module: Module, seed: int = 0) -> Module:
    """Give every parameter random values of a useful size, so that a forgotten or misplaced one shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 2:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
            else:
                parameter.add_((0.3 * noise).to(parameter.dtype))
    return module


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def right_padding(length: int, *valid: int) -> Tensor:
    """bool [b, 1, 1, length], True from the number of valid tokens on."""
    return torch.stack([torch.arange(length) >= count for count in valid]).view(len(valid), 1, 1, length)


def assert_same(
    twin: Callable[[Tensor], Any], oracle: Callable[[Tensor], Tensor], x: Tensor, pairs: Sequence[tuple[Tensor, Tensor]] = ()
) -> None:
    """Same output and same gradients of the input and of pairs of parameters, (of the twin, of the oracle).

    Exact to float64's rounding; oracles that work in float32 themselves, such as a norm of Transformers, to a few ulps of the sums.
    """
    tolerance: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-5} if x.dtype is torch.float32 else {}
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    left, right = twin(ours), oracle(theirs)
    torch.testing.assert_close(left, right, **tolerance)
    weights = randn(*right.shape, seed=9, dtype=right.dtype)
    left_grads = torch.autograd.grad(left, [ours, *(pair[0] for pair in pairs)], weights)
    right_grads = torch.autograd.grad(right, [theirs, *(pair[1] for pair in pairs)], weights)
    torch.testing.assert_close(left_grads, right_grads, **tolerance)


def load(twin: nn.Module, weights: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Copy tensors into every parameter of a twin; returns (parameter, source) pairs, for those whose source takes gradients."""
    names = {name for name, _ in twin.named_parameters()}
    assert set(weights) == names, set(weights) ^ names
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            assert parameter.shape == weights[name].shape, name
            parameter.copy_(weights[name])
    return [(parameter, weights[name]) for name, parameter in twin.named_parameters() if weights[name].requires_grad]
