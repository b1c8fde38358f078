"""GroupedLinear against one nn.Linear for each group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from te_convert.reference import GroupedLinear, NotSupportedError
from tests.reference.twin_samples import assert_same, load, perturb, randn

D = torch.float64


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 8, 0]])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_each_group_has_its_linear(bias: bool, sizes: list[int], as_tensor: bool) -> None:
    experts = perturb(nn.ModuleList(nn.Linear(6, 4, bias=bias, dtype=D) for _ in range(3)))
    twin = GroupedLinear(3, 6, 4, bias=bias, params_dtype=D)
    pairs = load(twin, {f"{name.split('.')[1]}{name[0]}": value for name, value in experts.named_parameters()})
    splits = torch.tensor(sizes) if as_tensor else sizes

    def oracle(x: Tensor) -> Tensor:
        return torch.cat([torch.as_tensor(expert(rows)) for expert, rows in zip(experts, x.split(sizes), strict=True)])

    assert_same(lambda x: twin(x, splits), oracle, randn(8, 6), pairs)


def test_return_bias() -> None:
    twin = perturb(GroupedLinear(2, 6, 4, params_dtype=D, return_bias=True))
    x = randn(5, 6)
    out, biases = twin(x, [2, 3])
    torch.testing.assert_close(out[:2], x[:2] @ twin.get_parameter("weight0").T)
    assert [torch.equal(bias, twin.get_parameter(f"bias{index}")) for index, bias in enumerate(biases)] == [True, True]


def test_refusals() -> None:
    twin = GroupedLinear(2, 6, 4, params_dtype=D)
    with pytest.raises(NotSupportedError, match="m_splits has 3 sizes for 2 groups"):
        twin(randn(4, 6), [1, 2, 1])
    with pytest.raises(NotSupportedError, match="m_splits adds up to 3 of 4 rows"):
        twin(randn(4, 6), [1, 2])
    with pytest.raises(NotSupportedError, match="return_bias needs bias=True"):
        GroupedLinear(2, 6, 4, bias=False, return_bias=True)
