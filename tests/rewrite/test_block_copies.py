"""Copies of models whose blocks, attentions or MLPs were converted as wholes: they run, and they revert completely."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import te_convert
from tests.rewrite.rewrite_samples import floats, perturb

WIDTH = 16
COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


class HasMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x))
        return y


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("make", [HasMlp, Attends, encoder])
def test_a_copy_reverts_to_the_original(make: Callable[[], nn.Module], copied: Callable[[nn.Module], nn.Module]) -> None:
    original, x = perturb(make()).eval(), floats(2, 5, WIDTH)
    model = te_convert.convert(original, (x,), backend="reference").model
    other = copied(model)
    assert torch.equal(other(x), model(x))
    assert {type(module).__name__ for module in other.modules()} == {type(module).__name__ for module in model.modules()}
    reverted = te_convert.revert(other)
    assert list(reverted.state_dict()) == list(original.state_dict())
    assert torch.equal(reverted(x), original(x))
    assert [type(module) for module in reverted.modules()] == [type(module) for module in original.modules()]
    assert torch.equal(te_convert.revert(model)(x), original(x))
