"""Emulated recipes in the twins: what is quantised in forward and backward, what is not, and delayed scaling's steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_convert import reference
from te_convert.reference.amax import Amax
from te_convert.reference.emulation import EMULATED, Emulation, active, emulate, high_precision
from te_convert.reference.quantize import (
    E4M3,
    E5M2,
    hadamard,
    quantize_blocks,
    quantize_mxfp8,
    quantize_nvfp4,
    quantize_tensor,
)
from te_convert.reference.unsupported import NotSupportedError
from tests.reference.twin_samples import perturb, randn

STATELESS = ("fp8-current", "fp8-block", "mxfp8", "nvfp4")
recipes = pytest.mark.parametrize("recipe", STATELESS)
Quantize = Callable[[Tensor], Tensor]


def e4m3(x: Tensor) -> Tensor:
    return quantize_tensor(x, E4M3).dequantize()


def e5m2(x: Tensor) -> Tensor:
    return quantize_tensor(x, E5M2).dequantize()


def block(x: Tensor) -> Tensor:
    return quantize_blocks(x, E4M3, (1, 128)).dequantize()


def square(x: Tensor) -> Tensor:
    return quantize_blocks(x, E4M3, (128, 128)).dequantize()


def mxfp8(x: Tensor) -> Tensor:
    return quantize_mxfp8(x).dequantize()


def nvfp4(x: Tensor) -> Tensor:
    return quantize_nvfp4(x).dequantize()


def nvfp4_square(x: Tensor) -> Tensor:
    return quantize_nvfp4(x, (16, 16)).dequantize()


def transformed(x: Tensor) -> Tensor:
    return quantize_nvfp4(hadamard(x)).dequantize()


QUANTIZED: dict[str, tuple[Quantize, Quantize, Quantize, Quantize, Quantize]] = {
    "fp8-current": (e4m3, e4m3, e5m2, e4m3, e5m2),
    "fp8-block": (block, square, block, block, block),
    "mxfp8": (mxfp8, mxfp8, mxfp8, mxfp8, mxfp8),
    "nvfp4": (nvfp4, nvfp4_square, nvfp4, transformed, transformed),
}
"""Of input, weight and gradient along the features, and of input and gradient along the rows (both for the weight's gradient)."""


@recipes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_forward_and_backward_by_hand(recipe: str, dtype: torch.dtype) -> None:
    twin = perturb(reference.Linear(144, 80, params_dtype=dtype))
    x, gradient = randn(3, 11, 144, dtype=dtype).requires_grad_(), randn(3, 11, 80, seed=2, dtype=dtype)
    with emulate(recipe):
        y = twin(x)
    y.backward(gradient)  # the recipe is that of the forward, as in TE
    of_input, of_weight, of_gradient, of_rows, of_gradient_rows = QUANTIZED[recipe]
    rows, outer = x.detach().reshape(-1, 144), gradient.reshape(-1, 80)
    weight = twin.weight.detach()
    assert twin.bias is not None
    expected = {
        "y": (of_input(rows) @ of_weight(weight).T + twin.bias.detach().float()).to(dtype),
        "x": (of_gradient(outer) @ of_weight(weight.T).T).to(dtype),
        "weight": (of_gradient_rows(outer.T) @ of_rows(rows.T).T).to(dtype),
        "bias": outer.float().sum(0).to(dtype),
    }
    found = {"y": y.detach().view(-1, 80), "x": x.grad, "weight": twin.weight.grad, "bias": twin.bias.grad}
    for key, value in expected.items():
        actual = found[key]
        assert actual is not None
        torch.testing.assert_close(actual.view_as(value), value, rtol=1e-5, atol=1e-5)


MODULES: dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]] = {
    "Linear": (reference.Linear(32, 32), lambda m, x: m(x)),
    "LayerNormLinear": (reference.LayerNormLinear(32, 32), lambda m, x: m(x)),
    "LayerNormMLP": (reference.LayerNormMLP(32, 64), lambda m, x: m(x)),
    "GroupedLinear": (reference.GroupedLinear(3, 32, 32), lambda m, x: m(x.reshape(-1, 32), [5, 0, 7])),
    "MultiheadAttention": (reference.MultiheadAttention(32, 4, attention_dropout=0.0), lambda m, x: m(x)),
    "TransformerLayer": (
        reference.TransformerLayer(32, 64, 4, attention_dropout=0.0, hidden_dropout=0.0),
        lambda m, x: m(x),
    ),
}


@pytest.mark.parametrize("recipe", EMULATED)
@pytest.mark.parametrize("name", MODULES)
def test_every_product_of_a_module_is_emulated(name: str, recipe: str) -> None:
    """Its output moves a little, by as much as the format says; outside the context nothing is left of it."""
    original, call = MODULES[name]
    twin = perturb(copy.deepcopy(original))
    x = randn(6, 2, 32, dtype=torch.float32)
    plain = call(twin, x)
    emulation = Emulation(recipe)
    emulation.calibrating = True
    with emulate(emulation):
        moved = call(twin, x)
        for parameter in twin.parameters():
            parameter.grad = None
        moved.sum().backward()
    assert 1e-3 < float((moved - plain).detach().norm() / plain.detach().norm()) < 0.4
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in twin.parameters())
    assert torch.equal(call(twin, x), plain)


def products(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many plain ``F.linear`` calls were made."""
    count = 0
    real = F.linear

    def counting(*args: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return real(*args)

    monkeypatch.setattr(F, "linear", counting)
    run()
    return count


@pytest.mark.parametrize(("name", "expected"), [("LayerNormMLP", 2), ("MultiheadAttention", 2), ("TransformerLayer", 4)])
def test_no_product_is_left_plain(name: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original, call = MODULES[name]
    x = randn(6, 2, 32, dtype=torch.float32)
    assert products(lambda: call(original, x), monkeypatch) == expected
    with emulate("mxfp8"):
        assert products(lambda: call(original, x), monkeypatch) == 0


def test_attention_stays_in_high_precision() -> None:
    attention = reference.DotProductAttention(4, 8)
    tensors = [randn(5, 2, 4, 8, seed=seed, dtype=torch.float32) for seed in range(3)]
    plain = attention(*tensors)
    with emulate("nvfp4"):
        assert torch.equal(attention(*tensors), plain)


def test_contexts_nest_and_end() -> None:
    assert active() is None
    with emulate("mxfp8") as outer:
        with high_precision():
            assert active() is None
        with emulate("nvfp4"):
            assert active() is not outer
        assert active() is outer
    assert active() is None
    with pytest.raises(RuntimeError, match="inside"), emulate("mxfp8"):
        raise RuntimeError("inside")
    assert active() is None


def test_unknown_recipes_are_refused() -> None:
    with pytest.raises(NotSupportedError, match="'fp7' is none of"), emulate("fp7"):
        pass


@recipes
def test_autocast_gives_its_dtype(recipe: str) -> None:
    twin, x = perturb(reference.Linear(32, 32)), randn(4, 32, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16), emulate(recipe):
        y = twin(x)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32
    assert twin.weight.grad is not None
    assert twin.weight.grad.dtype is torch.float32


def test_other_dtypes_fail_as_without_a_recipe() -> None:
    twin, x = reference.Linear(32, 32), randn(4, 32, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"), emulate("mxfp8"):
        twin(x)


def test_meta_and_empty_inputs_pass() -> None:
    with emulate("nvfp4"):
        assert reference.Linear(32, 16, device="meta")(torch.zeros(4, 32, device="meta")).shape == (4, 16)
        assert reference.Linear(32, 16)(torch.zeros(0, 32)).shape == (0, 16)


def test_compiles_with_and_without_a_recipe() -> None:
    twin, x = perturb(reference.LayerNormMLP(32, 64)), randn(8, 32, dtype=torch.float32)
    compiled = torch.compile(twin, fullgraph=True, backend="eager")
    plain = compiled(x)
    torch.testing.assert_close(plain, twin(x))
    with emulate("mxfp8"):
        torch.testing.assert_close(compiled(x), twin(x))
    assert torch.equal(compiled(x), plain)


# --- delayed scaling -----------------------------------------------------------------------------------------------------------


def test_amax_history_gives_te_s_scales() -> None:
    """Scale 1 first, then by the largest of the history; a step of 0, or one that is not finite, changes nothing."""
    amax = Amax(E4M3, 0, 3, torch.device("cpu"))
    scales = []
    for value in (2.0, 1.0, 0.5, 4.0, 0.0, 1.0, 1.0, math.inf):
        scales.append(float(amax.scale))
        amax.record(torch.tensor([[value, -value / 2]]))
        amax.update()
    assert scales == [1.0, 224.0, 224.0, 224.0, 112.0, 112.0, 112.0, 112.0]
    assert float(amax.scale) == 112.0
    with_margin = Amax(E4M3, 2, 3, torch.device("cpu"))
    with_margin.record(torch.tensor([2.0]))
    with_margin.update()
    assert float(with_margin.scale) == 56.0


def test_the_first_step_has_scale_one_and_the_next_those_of_the_first() -> None:
    twin, x = perturb(reference.Linear(32, 16, bias=False)), 300 * randn(4, 32, dtype=torch.float32)
    gradient, emulation = 1e-6 * randn(4, 16, dtype=torch.float32), Emulation("fp8-delayed")
    gradients = []
    outputs = []
    for _ in range(3):
        inp = x.clone().requires_grad_()
        with emulate(emulation):
            y = twin(inp)
        y.backward(gradient)
        assert inp.grad is not None
        outputs.append(y.detach())
        gradients.append(inp.grad)
    weight, one = twin.weight.detach(), torch.ones(())
    first = quantize_tensor(x, E4M3, one).dequantize() @ quantize_tensor(weight, E4M3, one).dequantize().T
    torch.testing.assert_close(outputs[0], first)
    assert float(x.abs().max()) > 448  # so the first step saturates
    later = e4m3(x) @ e4m3(weight).T
    torch.testing.assert_close(outputs[1], later)
    assert torch.equal(outputs[1], outputs[2])
    assert torch.equal(gradients[0], torch.zeros_like(gradients[0]))  # 1e-6 is below E5M2's subnormals
    torch.testing.assert_close(gradients[1], e5m2(gradient) @ e4m3(weight.T).T)


def test_scales_stay_without_gradients() -> None:
    """TE updates them only where gradients are enabled."""
    twin, x, emulation = reference.Linear(32, 16), randn(4, 32, dtype=torch.float32), Emulation("fp8-delayed")
    assert Emulation("fp8").recipe == "fp8-current"
    with torch.no_grad():
        outputs = []
        for _ in range(2):
            with emulate(emulation):
                outputs.append(twin(x))
    assert torch.equal(*outputs)
    with emulate(emulation):
        twin(x)
    with emulate(emulation):
        assert not torch.equal(twin(x), outputs[0])


def test_a_step_takes_the_largest_of_its_calls() -> None:
    twin, emulation = reference.Linear(32, 16, bias=False), Emulation("fp8-delayed")
    x = randn(4, 32, dtype=torch.float32)
    with emulate(emulation):
        twin(x)
        twin(8 * x)
        twin(x)
    held = emulation.histories.get(twin, ".input", E4M3, x.device)
    assert float(held.scale) == float(torch.tensor(448.0) / (8 * x).abs().max())


def test_histories_go_with_their_modules() -> None:
    emulation = Emulation("fp8-delayed")
    twin = reference.Linear(32, 16)
    with emulate(emulation):
        twin(torch.ones(2, 32))
    assert len(emulation.histories._forward) == 1
    del twin
    assert len(emulation.histories._forward) == 0
