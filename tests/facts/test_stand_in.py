"""Foreign code runs on a stand-in and leaves its module alone."""

from __future__ import annotations

import torch
from torch import nn

from te_convert.facts.stand_in import kind_key


def test_kind_key_counts_attributes_by_value_and_objects_by_identity() -> None:
    assert kind_key(nn.LeakyReLU(0.1)) == kind_key(nn.LeakyReLU(0.1).eval())
    assert kind_key(nn.LeakyReLU(0.1)) != kind_key(nn.LeakyReLU(0.2))
    assert kind_key(nn.LeakyReLU(1)) != kind_key(nn.LeakyReLU(True))
    first, second = nn.Identity(), nn.Identity()
    first.table, second.table = torch.ones(2), torch.ones(2)
    assert kind_key(first) != kind_key(second)
    second.table = first.table
    assert kind_key(first) == kind_key(second)
    assert kind_key(nn.Linear(2, 3)) != kind_key(nn.Linear(2, 3, bias=False))
    assert kind_key(nn.Linear(2, 3)) != kind_key(nn.Linear(2, 3, dtype=torch.bfloat16))
