"""LayerNormLinear and LayerNormMLP against a norm and Linears of PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_convert.reference import LayerNormLinear, LayerNormMLP, NotSupportedError
from tests.reference.twin_samples import assert_same, load, perturb, randn

D = torch.float64


def torch_norm(kind: str, centred: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """A norm with random weights, and its parameters under the names that a twin has for them."""
    make: type[nn.Module] = nn.LayerNorm if kind == "LayerNorm" else nn.RMSNorm
    norm = perturb(make(16, eps=1e-5, dtype=D))
    weights: dict[str, Tensor] = {f"layer_norm_{name}": parameter for name, parameter in norm.named_parameters()}
    if centred:
        weights["layer_norm_weight"] = weights["layer_norm_weight"].detach() - 1
    return norm, weights


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_norm_and_linear(kind: str, centred: bool, bias: bool) -> None:
    norm, weights = torch_norm(kind, centred)
    linear = perturb(nn.Linear(16, 24, bias=bias, dtype=D), seed=2)
    twin = LayerNormLinear(16, 24, normalization=kind, zero_centered_gamma=centred, bias=bias, params_dtype=D)
    pairs = load(twin, {**weights, **dict(linear.named_parameters())})
    assert_same(twin, lambda x: torch.as_tensor(linear(norm(x))), randn(3, 5, 16), pairs)


@pytest.mark.parametrize("split", [("query", "key_", "value"), {"query_": 12, "key": 6, "value": 6}], ids=["even", "sizes"])
def test_row_blocks_are_one_weight(split: Any) -> None:
    whole, blocks = LayerNormLinear(16, 24, params_dtype=D), LayerNormLinear(16, 24, parameters_split=split, params_dtype=D)
    rows = [8, 8, 8] if isinstance(split, tuple) else [12, 6, 6]
    perturb(whole)
    weights = {"layer_norm_weight": whole.layer_norm_weight, "layer_norm_bias": whole.layer_norm_bias}
    for kind in ("weight", "bias"):
        parts = whole.get_parameter(kind).detach().split(rows)
        weights |= {f"{name}_{kind}": part for name, part in zip(("query", "key", "value"), parts, strict=True)}
    load(blocks, {name: value for name, value in weights.items() if value is not None})
    x = randn(4, 16)
    torch.testing.assert_close(blocks(x), whole(x))


def test_outputs_come_in_the_order_of_te() -> None:
    twin = perturb(LayerNormLinear(16, 24, params_dtype=D, return_bias=True, return_layernorm_output=True))
    x = randn(4, 16)
    out, bias, normed = twin(x)
    torch.testing.assert_close(normed, F.layer_norm(x, (16,), twin.layer_norm_weight, twin.layer_norm_bias))
    torch.testing.assert_close(out, normed @ twin.get_parameter("weight").T)
    torch.testing.assert_close(bias, twin.get_parameter("bias").data)
    assert LayerNormLinear(16, 24, bias=False, return_bias=True, params_dtype=D)(x)[1] is None


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bias", [True, False])
def test_gated_mlp_takes_the_gate_first(kind: str, bias: bool) -> None:
    norm, weights = torch_norm(kind, centred=False)
    gate, up, down = (perturb(nn.Linear(*size, bias=bias, dtype=D), seed) for seed, size in enumerate([(16, 24)] * 2 + [(24, 16)]))
    twin = LayerNormMLP(16, 24, normalization=kind, activation="swiglu", bias=bias, params_dtype=D)
    weights |= {"fc1_weight": torch.cat((gate.weight, up.weight)).detach(), "fc2_weight": down.weight}
    if bias:
        weights |= {"fc1_bias": torch.cat((gate.bias, up.bias)).detach(), "fc2_bias": down.bias}
    pairs = load(twin, weights)

    def oracle(x: Tensor) -> Tensor:
        y = norm(x)
        return torch.as_tensor(down(F.silu(gate(y)) * up(y)))

    assert_same(twin, oracle, randn(3, 5, 16), pairs)


def test_plain_mlp() -> None:
    norm, weights = torch_norm("LayerNorm", centred=True)
    mlp = perturb(nn.Sequential(nn.Linear(16, 24), nn.GELU(approximate="tanh"), nn.Linear(24, 16)).to(D))
    twin = LayerNormMLP(16, 24, zero_centered_gamma=True, params_dtype=D)
    names = {"0": "fc1", "2": "fc2"}
    weights |= {f"{names[name[0]]}_{name[2:]}": parameter for name, parameter in mlp.named_parameters()}
    assert_same(twin, lambda x: torch.as_tensor(mlp(norm(x))), randn(7, 16), load(twin, weights))


def test_mlp_returns_bias_and_norm_output() -> None:
    x, plain = randn(4, 16), perturb(LayerNormMLP(16, 24, params_dtype=D))
    twin = LayerNormMLP(16, 24, params_dtype=D, return_bias=True, return_layernorm_output=True)
    twin.load_state_dict(plain.state_dict())
    out, bias, normed = twin(x)
    torch.testing.assert_close(out + bias, plain(x))
    torch.testing.assert_close(normed, F.layer_norm(x, (16,), plain.layer_norm_weight, plain.layer_norm_bias))


@pytest.mark.parametrize("make", [LayerNormLinear, LayerNormMLP])
def test_bfloat16_rounds_the_norm_once(make: type[LayerNormLinear | LayerNormMLP]) -> None:
    twin = perturb(make(16, 24, normalization="RMSNorm", params_dtype=torch.bfloat16, return_layernorm_output=True))
    x = randn(8, 16).bfloat16()
    out, normed = twin(x)
    exact = F.rms_norm(x.double(), (16,), twin.layer_norm_weight.double(), 1e-5)
    assert out.dtype is torch.bfloat16
    assert torch.equal(normed, exact.bfloat16())


def test_autocast_casts_input_and_norm_output() -> None:
    twin = perturb(LayerNormLinear(16, 24, return_layernorm_output=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, normed = twin(randn(8, 16).float())
    assert out.dtype is normed.dtype is torch.bfloat16


def test_refusals() -> None:
    with pytest.raises(NotSupportedError, match="normalization 'BatchNorm'"):
        LayerNormLinear(8, 8, normalization="BatchNorm")
    with pytest.raises(NotSupportedError, match="adds up to 9 rows, not out_features=10"):
        LayerNormLinear(8, 10, parameters_split=("a", "b", "c"))
    with pytest.raises(NotSupportedError, match="names no parameter"):
        LayerNormLinear(8, 10, parameters_split=())
    with pytest.raises(NotSupportedError, match="names a parameter twice"):
        LayerNormLinear(8, 8, parameters_split=("a", "a_"))
    with pytest.raises(NotSupportedError, match="activation 'tanh'"):
        LayerNormMLP(8, 8, activation="tanh")
    with pytest.raises(NotSupportedError, match="takes no activation_params"):
        LayerNormMLP(8, 8, activation_params={"limit": 7.0})
