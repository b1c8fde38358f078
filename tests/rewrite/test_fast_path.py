"""torch's fused encoder layer would read the weights past the replacements: it is switched off, and on again by undo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.rewrite.apply import restore_site
from te_convert.rewrite.fused import get_fused
from te_convert.rewrite.site import is_converted
from tests.rewrite.rewrite_samples import converted, floats, perturb

INPUTS = (floats(2, 5, 16),)
FUSED: dict[str, Any] = {"include": ["*norm2", "*linear1", "*linear2"]}
"""The norm before an MLP fuses with its first Linear, and nothing else does."""


def encoder(depth: int = 2, norm_first: bool = False) -> Any:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0, norm_first=norm_first)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False).eval()


def switches(model: Any) -> list[int]:
    return [int(layer.activation_relu_or_gelu) for layer in model.layers]


def test_replacements_run_in_eval_without_gradients() -> None:
    model = perturb(encoder())
    expected = model(*INPUTS)
    root = converted(model, INPUTS, fuse=False)
    forward, seen = type(root.layers[0].linear1).forward, list[int]()

    class Counted(type(root.layers[0].linear1)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(1)
            result: torch.Tensor = forward(self, x)
            return result

    root.layers[0].linear1.__class__ = Counted
    with torch.no_grad():
        torch.testing.assert_close(root(*INPUTS), expected)
    assert seen == [1]


def test_a_fusion_runs_in_eval_without_gradients() -> None:
    model = perturb(encoder(norm_first=True))
    expected = model(*INPUTS)
    root = converted(model, INPUTS, **FUSED)
    records = [get_fused(layer.layernorm_linear1) for layer in root.layers]
    before = [record.executed for record in records]
    with torch.no_grad():
        torch.testing.assert_close(root(*INPUTS), expected)
    assert [record.executed for record in records] == [count + 1 for count in before]
    assert {record.fallbacks for record in records} == {0}


@pytest.mark.parametrize(
    ("norm_first", "options"),
    [(False, {"fuse": False}), (True, {"fuse": False}), (True, FUSED)],
    ids=["post-norm leaf", "pre-norm leaf", "fused"],
)
def test_revert_restores_the_switch(norm_first: bool, options: dict[str, Any]) -> None:
    model = encoder(norm_first=norm_first)
    before = switches(model)
    assert 0 not in before
    root = converted(model, INPUTS, **options)
    assert switches(root) == [0, 0]
    assert switches(te_convert.revert(root)) == before


def test_the_switch_stays_off_while_a_member_of_a_fusion_is_a_child() -> None:
    model = encoder(1, norm_first=True)
    before = switches(model)
    root = converted(model, INPUTS, **FUSED)
    for name in ("layers.0.linear2", "layers.0.layernorm_linear1"):
        assert switches(root) == [0]
        restore_site(root, root.get_submodule(name))
    assert switches(root) == before


def test_the_switch_stays_off_while_any_child_is_converted() -> None:
    model = encoder(1)
    before = switches(model)
    root = converted(model, INPUTS, include=["*linear1", "*linear2"])
    for name in ("layers.0.linear1", "layers.0.linear2"):
        assert switches(root) == [0]
        site = root.get_submodule(name)
        restore_site(root, site)
    assert switches(root) == before


@pytest.mark.parametrize("order", [("*linear1", "*"), ("*norm2", "*")])
def test_a_conversion_in_two_steps_reverts_to_the_original_switch(order: tuple[str, str]) -> None:
    model = encoder(1)
    before = switches(model)
    for pattern in order:
        model = converted(model, INPUTS, include=pattern)
    assert sum(map(is_converted, model.modules())) >= 4
    assert switches(te_convert.revert(model)) == before
