"""Activations are named by their values, and anything else is not named."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from te_convert.facts.activations import ACTIVATIONS, is_activation_candidate, probe_activation


def transformers_activation(name: str) -> nn.Module:
    module: nn.Module = importlib.import_module("transformers.activations").ACT2FN[name]
    return module


MODULES: list[tuple[str, nn.Module]] = [
    ("gelu", nn.GELU()),
    ("gelu_tanh", nn.GELU(approximate="tanh")),
    ("silu", nn.SiLU(inplace=True)),
    ("relu", nn.ReLU(inplace=True)),
    ("sigmoid", nn.Sigmoid()),
    ("tanh", nn.Tanh()),
    ("identity", nn.Identity()),
    ("identity", nn.Dropout(0.0)),
    ("relu6", nn.ReLU6()),
    ("leaky_relu", nn.LeakyReLU()),
    ("mish", nn.Mish()),
    ("elu", nn.ELU()),
    ("selu", nn.SELU()),
    ("hardswish", nn.Hardswish()),
    ("softplus", nn.Softplus()),
]


@pytest.mark.parametrize(("name", "module"), MODULES, ids=lambda value: str(value))
def test_torch_modules(name: str, module: nn.Module) -> None:
    assert is_activation_candidate(module)
    assert probe_activation(module) == name
    assert probe_activation(module.eval()) == name


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("gelu", "gelu"),
        ("gelu_python", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_accurate", "gelu_tanh"),
        ("quick_gelu", "qgelu"),
        ("relu2", "srelu"),
        ("silu", "silu"),
        ("linear", "identity"),
        ("gelu_10", None),  # clipped at 10
        ("laplace", None),
    ],
)
def test_transformers_modules(key: str, name: str | None) -> None:
    assert probe_activation(transformers_activation(key)) == name


def test_bloom_gelu_is_the_tanh_one() -> None:
    bloom: nn.Module = importlib.import_module("transformers.models.bloom.modeling_bloom").BloomGelu()
    assert probe_activation(bloom) == "gelu_tanh"


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_every_name_is_told_from_every_other(name: str) -> None:
    assert probe_activation(ACTIVATIONS[name]) == name


def scaled_gelu(x: Tensor, scale: float) -> Tensor:
    return functional.gelu(x) * scale


NEAR_MISSES: dict[str, Callable[[Tensor], object]] = {
    "quick gelu with 1.7": lambda x: x * torch.sigmoid(1.7 * x),
    "gelu, 0.01 % larger": functools.partial(scaled_gelu, scale=1.0001),
    "leaky relu 0.02": functools.partial(functional.leaky_relu, negative_slope=0.02),
    "clamped far out": lambda x: functional.relu(x).clamp(max=5000.0),
    "softmax": lambda x: torch.softmax(x, -1),
    "sorted": lambda x: x.flatten().sort().values.reshape(x.shape),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "glu": lambda x: functional.glu(x, -1),
    "tuple": lambda x: (x, x),
    "another dtype": lambda x: functional.relu(x).double(),
    "raises": lambda x: x + torch.ones(7, 11, 13),
    "no tensor": lambda x: None,
    "two arguments": lambda x, y: x * y,  # type: ignore[dict-item, misc]
    "nan": lambda x: x * float("nan"),
}


@pytest.mark.parametrize("case", sorted(NEAR_MISSES))
def test_near_misses_have_no_name(case: str) -> None:
    assert probe_activation(NEAR_MISSES[case]) is None


class TrainsDifferently(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x) if self.training else functional.gelu(x, approximate="tanh")


def test_what_returns_another_kind_of_tensor_has_no_name() -> None:
    """Its value may not be there yet, and asking for it may fail (the deferred norm of a converted model)."""

    class Later(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.double:
                raise RuntimeError("asked for")
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    assert probe_activation(lambda x: functional.relu(x).as_subclass(Later)) is None


def test_both_modes_count() -> None:
    assert probe_activation(TrainsDifferently()) is None
    assert probe_activation(TrainsDifferently().eval()) is None
    assert probe_activation(nn.Dropout(0.1)) is None


def test_modules_with_state_are_no_candidates() -> None:
    for module in (nn.PReLU(), nn.BatchNorm1d(4, affine=False), nn.Sequential(nn.GELU())):
        assert not is_activation_candidate(module)
        assert probe_activation(module) is None


def test_functions_and_partials() -> None:
    assert probe_activation(functools.partial(functional.gelu, approximate="tanh")) == "gelu_tanh"
    assert probe_activation(torch.relu_) == "relu"


def test_random_state_mode_and_hooks_are_left_alone() -> None:
    calls: list[nn.Module] = []
    module = nn.RReLU()  # draws random slopes in training mode
    module.register_forward_hook(lambda hooked, args, output: calls.append(hooked))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert probe_activation(module) is None
    assert torch.equal(torch.get_rng_state(), before)
    assert module.training
    assert calls == []


def test_caller_contexts_do_not_matter() -> None:
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert probe_activation(nn.GELU()) == "gelu"
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert probe_activation(transformers_activation("gelu_new")) == "gelu_tanh"
    finally:
        torch.set_default_dtype(default)
