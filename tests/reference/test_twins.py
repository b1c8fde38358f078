"""Twins have TE's mathematics, keys and manners, in every dtype, without TE."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from te_convert import reference
from te_convert.reference.module import TwinModule

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
Twin = Callable[..., TwinModule]
TWINS: list[tuple[str, Twin]] = [
    ("Linear", lambda **k: reference.Linear(6, 4, **{"params_dtype" if key == "dtype" else key: v for key, v in k.items()})),
    ("LayerNorm", lambda **k: reference.LayerNorm(6, **k)),
    ("RMSNorm", lambda **k: reference.RMSNorm(6, **k)),
]
every_twin = pytest.mark.parametrize("build", [build for _, build in TWINS], ids=[name for name, _ in TWINS])


def randomized(twin: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.5)
    return twin


def data(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_equals_torch(dtype: torch.dtype, bias: bool) -> None:
    twin = randomized(reference.Linear(6, 4, bias=bias, params_dtype=dtype))
    assert isinstance(twin, reference.Linear)
    x = data(2, 3, 6, dtype=dtype)
    assert torch.equal(twin(x), functional.linear(x, twin.weight, twin.bias))
    assert list(twin.state_dict()) == (["weight", "bias", "_extra_state"] if bias else ["weight", "_extra_state"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_layer_norm_is_the_formula_in_float32_rounded_once(dtype: torch.dtype, zero_centered: bool) -> None:
    twin = randomized(reference.LayerNorm(6, 1e-3, zero_centered_gamma=zero_centered, dtype=dtype))
    assert isinstance(twin, reference.LayerNorm)
    x = data(5, 6, dtype=dtype) * 3
    wide = x.double()
    gamma = twin.weight.double() + (1 if zero_centered else 0)
    centered = wide - wide.mean(-1, keepdim=True)
    exact = centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-3) * gamma + twin.bias.double()
    assert_rounded_once(twin(x), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_is_the_formula_in_float32_rounded_once(dtype: torch.dtype, zero_centered: bool) -> None:
    twin = randomized(reference.RMSNorm(6, 1e-3, zero_centered_gamma=zero_centered, dtype=dtype))
    assert isinstance(twin, reference.RMSNorm)
    x = data(5, 6, dtype=dtype) * 3
    gamma = twin.weight.double() + (1 if zero_centered else 0)
    exact = x.double() / torch.sqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-3) * gamma
    assert_rounded_once(twin(x), exact)


def assert_rounded_once(y: torch.Tensor, exact: torch.Tensor) -> None:
    """Within half an ulp of the exact result, and some float32 rounding from inside."""
    half_ulp = torch.finfo(y.dtype).eps / 2
    inside = 1e-14 if y.dtype is torch.float64 else 1e-6
    error = (y.double() - exact).abs()
    assert bool((error <= exact.abs() * half_ulp * 1.001 + inside).all()), error.max()


@pytest.mark.parametrize(("cls", "torch_cls"), [(reference.LayerNorm, nn.LayerNorm), (reference.RMSNorm, nn.RMSNorm)])
def test_norms_agree_with_torch(cls: type[nn.Module], torch_cls: type[nn.Module]) -> None:
    twin, other = randomized(cls(6, 1e-5)), torch_cls(6, 1e-5)
    state = {key: value for key, value in twin.state_dict().items() if key != "_extra_state"}
    other.load_state_dict(state)
    torch.testing.assert_close(twin(data(4, 6)), other(data(4, 6)), rtol=1e-6, atol=1e-6)


@every_twin
def test_a_fresh_twin_starts_as_te_does(build: Twin) -> None:
    twin = build()
    if isinstance(twin, reference.Linear):
        assert twin.bias is not None
        assert torch.equal(twin.bias, torch.zeros(4))
        assert 0.005 < float(twin.weight.detach().std()) < 0.06
    else:
        torch.testing.assert_close(twin(data(3, 6)).pow(2).mean(), torch.tensor(1.0), rtol=1e-2, atol=1e-2)
        assert torch.equal(build(zero_centered_gamma=True)(data(3, 6)), twin(data(3, 6)))


@every_twin
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_is_autocasts_under_autocast_and_the_weights_else(build: Twin, dtype: torch.dtype) -> None:
    twin, x = build(dtype=dtype), data(3, 6, dtype=dtype)
    assert twin(x).dtype is dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert twin(x).dtype is torch.bfloat16


def test_norms_compute_in_float32_under_autocast() -> None:
    twin, x = randomized(reference.RMSNorm(6)), data(3, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = twin(x)
    assert torch.equal(inside, twin(x).to(torch.bfloat16))


@every_twin
def test_gradients_are_exact_in_float64(build: Twin) -> None:
    twin = randomized(build(dtype=torch.float64))
    inputs = (data(3, 6, dtype=torch.float64).requires_grad_(), *(p.detach().clone().requires_grad_() for p in twin.parameters()))

    def call(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        named = dict(zip(dict(twin.named_parameters()), parameters, strict=True))
        result: torch.Tensor = torch.func.functional_call(twin, named, (x,))
        return result

    assert torch.autograd.gradcheck(call, inputs)


@every_twin
def test_meta_allocates_nothing_and_draws_no_random_number(build: Twin) -> None:
    before = torch.get_rng_state()
    twin = build(device="meta")
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.is_meta for parameter in twin.parameters())
    assert twin(torch.empty(2, 6, device="meta")).is_meta


@every_twin
def test_copies_compute_the_same(build: Twin) -> None:
    twin, x = randomized(build()), data(3, 6)
    buffer = io.BytesIO()
    torch.save(twin, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin)), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), twin(x))
        assert next(other.parameters()) is not next(twin.parameters())


@every_twin
def test_extra_state_is_tes_empty_tensor_and_a_pickled_history_is_refused(build: Twin) -> None:
    twin = build()
    state = twin.state_dict()["_extra_state"]
    assert (state.dtype, state.numel()) == (torch.uint8, 0)
    twin.load_state_dict(twin.state_dict())
    twin.set_extra_state(None)
    for history in (torch.zeros(12, dtype=torch.uint8), io.BytesIO(b"pickle"), {"scale": 1}):
        with pytest.raises(RuntimeError, match="delayed-scaling history"):
            twin.set_extra_state(history)


@every_twin
def test_repr_shows_the_constructor_facts(build: Twin) -> None:
    assert "6" in repr(build())
