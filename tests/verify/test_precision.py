"""Running in a wider precision: the weights that backward needs are widened again instead of being kept."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from te_convert.verify.precision import Widen, widened


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)).bfloat16()


def gradients(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    net(x).float().square().sum().backward()
    return taken(net)


def taken(net: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


def test_gradients_are_those_of_kept_weights() -> None:
    net, x = model(), torch.randn(4, 8)
    with Widen(torch.float32):
        kept = gradients(net, x)
    with widened(net, torch.float32):
        again = gradients(net, x)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert all(bool(g.abs().sum() > 0) for g in again)


def test_no_widened_weight_lives_until_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = model(), torch.randn(4, 8)
    made: list[weakref.ref[torch.Tensor]] = []
    inner = Widen._widen

    def noted(self: Widen, value: Any) -> Any:
        found = inner(self, value)
        if type(value) is nn.Parameter and value.dim() == 2:
            made.append(weakref.ref(found.untyped_storage()))
        return found

    monkeypatch.setattr(Widen, "_widen", noted)
    with Widen(torch.float32):
        output = net(x)
        kept = sum(ref() is not None for ref in made)
    del output
    made.clear()
    with widened(net, torch.float32):
        output = net(x)
    assert kept, "autograd keeps a weight by itself: without that this test shows nothing"
    assert made
    assert not any(ref() is not None for ref in made)
    assert output.dtype is torch.float32


def test_a_weight_that_changes_before_backward_is_an_error() -> None:
    net, x = model(), torch.randn(4, 8, requires_grad=True)
    with widened(net, torch.float32):
        loss = net(x).sum()
    with torch.no_grad():
        next(parameter for name, parameter in net.named_parameters() if name == "2.weight").mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_a_second_derivative_goes_through_the_weights() -> None:
    """A forward that uses gradients, as that of a force field: what is unpacked is still part of the graph."""
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1, bias=False)).bfloat16(), torch.randn(3, 4)

    def penalty() -> list[torch.Tensor]:
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(inputs).sum(), inputs, create_graph=True)
        slope.square().sum().backward()
        return taken(net)

    with Widen(torch.float32):
        kept = penalty()
    with widened(net, torch.float32):
        again = penalty()
    assert all(torch.equal(a, b) and bool(a.abs().sum() > 0) for a, b in zip(kept, again, strict=True))
