"""Hooks of every kind go with the module, in both directions, and their handles keep working."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.rewrite.fused import unwrap_output
from te_convert.rewrite.fused_files import accept_original
from tests.rewrite.rewrite_samples import FUSE, WIDTH, converted, floats

KINDS = ["forward", "forward_pre", "full_backward", "full_backward_pre"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.proj = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.proj(self.norm(x))
        return y


def register(module: nn.Module, kind: str, seen: list[str]) -> Any:
    return getattr(module, f"register_{kind}_hook")(lambda *_: seen.append(kind))


def train_once(model: nn.Module) -> None:
    model(floats(2, WIDTH).requires_grad_()).sum().backward()


@FUSE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["norm", "proj"])
@pytest.mark.report("peer:hooks")
def test_a_hook_fires_after_conversion_and_its_old_handle_removes_it(kind: str, name: str, fuse: bool) -> None:
    model, seen = Net(), list[str]()
    handle = register(model.get_submodule(name), kind, seen)
    root = converted(model, (floats(2, WIDTH),), fuse=fuse)
    seen.clear()
    train_once(root)
    assert seen == [kind]
    handle.remove()
    train_once(root)
    assert seen == [kind]


@FUSE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["norm", "proj"])
def test_a_hook_registered_after_conversion_survives_revert(kind: str, name: str, fuse: bool) -> None:
    root, seen = converted(Net(), (floats(2, WIDTH),), fuse=fuse), list[str]()
    handle = register(root.get_submodule(name), kind, seen)
    train_once(root)
    assert seen == [kind]
    seen.clear()
    back = te_convert.revert(root)
    train_once(back)
    assert seen == [kind]
    handle.remove()
    train_once(back)
    assert seen == [kind]


@FUSE
def test_hooks_that_change_values_change_the_converted_model_alike(fuse: bool) -> None:
    model = Net()
    model.norm.register_forward_hook(lambda m, a, y: y * 2)
    model.proj.register_forward_pre_hook(lambda m, a: (a[0] + 1,))
    model.proj.register_forward_hook(lambda m, a, k, y: y - 3, with_kwargs=True)
    expected = model(floats(2, WIDTH))
    torch.testing.assert_close(converted(model, (floats(2, WIDTH),), fuse=fuse)(floats(2, WIDTH)), expected)


@FUSE
def test_state_dict_hooks_go_along(fuse: bool) -> None:
    model = Net()
    model.proj._register_state_dict_hook(lambda m, state, prefix, _: state.__setitem__(prefix + "note", torch.ones(1)))
    loaded: list[str] = []
    model.proj.register_load_state_dict_pre_hook(lambda m, state, prefix, *_: loaded.append(prefix))
    root = converted(model, (floats(2, WIDTH),), fuse=fuse)
    assert "proj.note" in root.state_dict()
    loaded.clear()
    root.load_state_dict({k: v for k, v in root.state_dict().items() if k != "proj.note"})
    assert loaded == ["proj."]


def test_no_hook_is_added_to_a_model_without_transposed_weights() -> None:
    root = converted(Net(), (floats(2, WIDTH),), fuse=False)
    for module in root.modules():
        hooks = [*module._forward_hooks, *module._forward_pre_hooks, *module._load_state_dict_pre_hooks]
        assert not hooks


def test_a_fusion_adds_one_forward_hook_and_one_load_hook_to_the_root() -> None:
    root = converted(Net(), (floats(2, WIDTH),))
    for module in root.modules():
        loads = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
        assert loads == ([accept_original] if module is root else [])
        assert list(module._forward_hooks.values()) == ([unwrap_output] if module is root else [])
        assert not module._forward_pre_hooks
