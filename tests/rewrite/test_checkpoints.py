"""Which checkpoint a model's activation checkpointing takes inside te_convert.autocast, and that everything is put back."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint as imported

from te_convert.rewrite import checkpoints
from te_convert.rewrite.checkpoints import checkpoints_on_te

OWN = torch.utils.checkpoint.checkpoint


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self._gradient_checkpointing_func = functools.partial(OWN, use_reentrant=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = imported(self.inner.forward, x, use_reentrant=None, preserve_rng_state=False, early_stop=True)
        return y


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """Calls of TE's checkpoint, under a recipe."""
    seen: list[tuple[Any, dict[str, Any]]] = []

    def te_checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((function, kwargs))
        return function(*args)

    monkeypatch.setattr(checkpoints, "recipe_in_force", lambda: "a recipe")
    monkeypatch.setattr(checkpoints, "import_te", lambda: SimpleNamespace(checkpoint=te_checkpoint))
    return seen


def test_every_name_is_routed_and_put_back(calls: list[Any]) -> None:
    model, x, space = Net(), torch.randn(2, 4), vars(sys.modules[__name__])
    kept = model._gradient_checkpointing_func
    with checkpoints_on_te(model):
        model(x)
        model._gradient_checkpointing_func(model.inner.forward, x)
        torch.utils.checkpoint.checkpoint(model.inner.forward, x, use_reentrant=True)
    assert [kwargs for _, kwargs in calls] == [{}, {"use_reentrant": False}, {"use_reentrant": True}]
    assert torch.utils.checkpoint.checkpoint is OWN is space["imported"]
    assert model._gradient_checkpointing_func is kept


def test_put_back_after_an_exception(calls: list[Any]) -> None:
    model = Net()
    with pytest.raises(RuntimeError), checkpoints_on_te(model):
        model(torch.randn(2, 5))
    assert torch.utils.checkpoint.checkpoint is OWN is imported
    assert len(calls) == 1


def test_a_function_of_another_is_left_alone(calls: list[Any]) -> None:
    model = Net()
    model._gradient_checkpointing_func = other = functools.partial(lambda function, *args: function(*args))
    with checkpoints_on_te(model):
        assert model._gradient_checkpointing_func is other
    assert not calls


def test_a_module_without_te_keeps_torchs(calls: list[Any]) -> None:
    """TE would hand it back under the name that was replaced, for ever."""
    model, x = Net(), torch.randn(2, 4, requires_grad=True)
    with checkpoints_on_te(model):
        y = torch.utils.checkpoint.checkpoint(model.inner, x, use_reentrant=False)
    y.sum().backward()
    assert not calls
    assert x.grad is not None


def test_high_precision_keeps_torchs(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "recipe_in_force", lambda: None)
    model, x = Net(), torch.randn(2, 4, requires_grad=True)
    with checkpoints_on_te(model):
        y = model._gradient_checkpointing_func(model.inner.forward, x)
    y.sum().backward()
    assert not calls
    assert x.grad is not None
