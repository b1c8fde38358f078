"""Activations by TE's names: tanh GELU, first half activated, float32 inside."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_convert.reference import ACTIVATION_NAMES, NotSupportedError, activate, is_gated
from tests.reference.twin_samples import randn

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "qgelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x.clamp(min=0),
    "srelu": lambda x: x.clamp(min=0) ** 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
}
GATES = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}


def test_all_twelve_are_there() -> None:
    assert set(ACTIVATION_NAMES) == {*PLAIN, *GATES, "glu", "clamped_swiglu"}
    assert {name for name in ACTIVATION_NAMES if is_gated(name)} == {*GATES, "glu", "clamped_swiglu"}


@pytest.mark.parametrize("name", PLAIN)
def test_plain(name: str) -> None:
    x = 3 * randn(5, 8)
    torch.testing.assert_close(activate(name, x), PLAIN[name](x))


@pytest.mark.parametrize("name", GATES)
def test_gated_activates_the_first_half(name: str) -> None:
    x = 3 * randn(5, 8)
    torch.testing.assert_close(activate(name, x), PLAIN[GATES[name]](x[:, :4]) * x[:, 4:])


def test_glu_has_the_halves_of_torch_swapped() -> None:
    x = randn(5, 8)
    torch.testing.assert_close(activate("glu", x), F.glu(torch.cat((x[:, 4:], x[:, :4]), dim=-1)))


def test_gelu_is_not_erf() -> None:
    x = randn(100)
    assert (activate("gelu", x) - F.gelu(x)).abs().max() > 1e-5
    torch.testing.assert_close(activate("gelu", x), F.gelu(x, approximate="tanh"))


def test_clamped_swiglu_is_that_of_gpt_oss() -> None:
    """Interleaved there, halves here: ``transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts``."""
    x = 10 * randn(5, 8)
    gate, up = x[:, :4].clamp(max=7.0), x[:, 4:].clamp(-7.0, 7.0)
    torch.testing.assert_close(activate("clamped_swiglu", x), (up + 1) * gate * torch.sigmoid(gate * 1.702))
    params = {"limit": 1.0, "alpha": 2.0, "glu_linear_offset": 0.0}
    gate, up = x[:, :4].clamp(max=1.0), x[:, 4:].clamp(-1.0, 1.0)
    torch.testing.assert_close(activate("clamped_swiglu", x, params), up * gate * torch.sigmoid(gate * 2))


@pytest.mark.parametrize("name", ACTIVATION_NAMES)
def test_bfloat16_is_rounded_once(name: str) -> None:
    x = (3 * randn(64, 32)).bfloat16()
    y = activate(name, x)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, activate(name, x.float()).bfloat16())


def test_refusals() -> None:
    with pytest.raises(NotSupportedError, match="'tanh' is none of gelu"):
        is_gated("tanh")
    with pytest.raises(NotSupportedError, match="'gelu' takes no activation_params limit"):
        activate("gelu", randn(4), {"limit": 1.0})
    with pytest.raises(NotSupportedError, match="'clamped_swiglu' takes no activation_params beta"):
        activate("clamped_swiglu", randn(4), {"beta": 1.0})
