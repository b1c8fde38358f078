"""A module counts as a Linear when a run of it shows that it is one."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Hashable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from te_convert.facts.linears import (
    Layout,
    LinearFacts,
    NotALinear,
    looks_like_linear,
    packed_weight,
    probe_linear,
    probe_linear_cached,
)


def load(path: str, *args: Any, **kwargs: Any) -> nn.Module:
    """Build ``package.module:Class``."""
    module, name = path.split(":")
    built: nn.Module = getattr(importlib.import_module(module), name)(*args, **kwargs)
    return built


class Matrix(nn.Module):
    """``x @ w + b`` or ``x @ w.T + b`` with names of its own; subclasses change the formula."""

    def __init__(self, rows: int, columns: int, *, transposed: bool, bias: bool = True) -> None:
        super().__init__()
        self.transposed = transposed
        self.kernel = nn.Parameter(torch.randn(rows, columns))
        self.offset = nn.Parameter(torch.randn(columns if not transposed else rows)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ (self.kernel.t() if self.transposed else self.kernel)
        return y if self.offset is None else y + self.offset


class Overriding(nn.Linear):
    """A subclass whose forward is the formula of each near miss."""

    def __init__(self, formula: Callable[[nn.Linear, Tensor], object], inputs: int = 6, outputs: int = 4) -> None:
        super().__init__(inputs, outputs)
        self.formula = formula

    def forward(self, x: Tensor) -> Any:
        return self.formula(self, x)


def detail(module: nn.Module) -> str:
    facts = probe_linear(module)
    assert isinstance(facts, NotALinear), facts
    return facts.detail


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_linear_is_not_run(bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Tensor:
        raise AssertionError("a plain nn.Linear needs no run")

    monkeypatch.setattr("te_convert.facts.linears.run_stand_in", refuse)
    module = nn.Linear(6, 4, bias=bias, dtype=dtype, device="meta")
    assert looks_like_linear(module)
    assert probe_linear(module) == LinearFacts(6, 4, "linear", "weight", "bias" if bias else None)


@pytest.mark.parametrize(("inputs", "outputs"), [(6, 4), (5, 5), (1, 3), (3, 1), (2, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_falcon_linear(inputs: int, outputs: int, bias: bool) -> None:
    module = load("transformers.models.falcon.modeling_falcon:FalconLinear", inputs, outputs, bias=bias)
    assert looks_like_linear(module)
    assert probe_linear(module) == LinearFacts(inputs, outputs, "linear", "weight", "bias" if bias else None)


@pytest.mark.parametrize(("inputs", "outputs"), [(6, 4), (5, 5), (2, 2)])
def test_transformers_conv1d(inputs: int, outputs: int) -> None:
    module = load("transformers.pytorch_utils:Conv1D", outputs, inputs)
    assert looks_like_linear(module)
    assert probe_linear(module) == LinearFacts(inputs, outputs, "conv1d", "weight", "bias")


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), transposed=st.booleans(), bias=st.booleans())
def test_layout_and_names_follow_the_numbers(rows: int, columns: int, transposed: bool, bias: bool) -> None:
    facts = probe_linear(Matrix(rows, columns, transposed=transposed, bias=bias))
    inputs, outputs = (columns, rows) if transposed else (rows, columns)
    layout: Layout = "linear" if transposed else "conv1d"
    if rows == columns == 1:  # both layouts are the same function, and the same bytes
        layout = "linear"
    assert facts == LinearFacts(inputs, outputs, layout, "kernel", "offset" if bias else None)


def test_llama4_router_returns_a_tuple() -> None:
    config = SimpleNamespace(hidden_size=6, num_local_experts=4, num_experts_per_tok=2)
    module = load("transformers.models.llama4.modeling_llama4:Llama4Router", config)
    assert looks_like_linear(module)
    assert detail(module) == "forward returns a tuple, not one tensor"


def edit_input(module: nn.Linear, x: Tensor) -> Tensor:
    y = functional.linear(x, module.weight, module.bias)
    x.zero_()
    return y


def renormalise(module: nn.Linear, x: Tensor) -> Tensor:
    module.weight.data.copy_(torch.renorm(module.weight.data, 2, 0, 1.0))
    return functional.linear(x, module.weight, module.bias)


NEAR_MISSES: dict[str, tuple[Callable[[nn.Linear, Tensor], object], str]] = {
    "scaled weight": (lambda m, x: functional.linear(x, m.weight * 1.0001, m.bias), "differs from F.linear"),
    "scaled bias": (lambda m, x: functional.linear(x, m.weight, m.bias * 0.5), "differs from F.linear"),
    "bias forgotten": (lambda m, x: functional.linear(x, m.weight), "differs from F.linear"),
    "activation": (lambda m, x: functional.linear(x, m.weight, m.bias).relu(), "differs from F.linear"),
    "clamped input": (lambda m, x: functional.linear(x.clamp(-100, 100), m.weight, m.bias), "differs from F.linear"),
    "residual": (lambda m, x: functional.linear(x, m.weight, m.bias) + x[..., :4], "differs from F.linear"),
    "quantised weight": (lambda m, x: functional.linear(x, m.weight.sign(), m.bias), "differs from F.linear"),
    "float32 inside": (
        lambda m, x: functional.linear(x.float(), m.weight.float(), m.bias.float()).to(x.dtype),
        "differs from F.linear",
    ),
    "float32 out": (lambda m, x: functional.linear(x.float(), m.weight.float(), m.bias.float()), "it returns float32[5, 4]"),
    "dropout": (
        lambda m, x: functional.dropout(functional.linear(x, m.weight, m.bias), 0.3, m.training),
        "in training mode",
    ),
    "flattened": (lambda m, x: functional.linear(x.flatten(0, -2), m.weight, m.bias), "where F.linear"),
    "edits its input": (edit_input, "changes its input in place"),
    "edits its weight": (renormalise, "differs from F.linear"),
    "nan": (lambda m, x: functional.linear(x, m.weight, m.bias) * float("nan"), "NaN or infinity"),
    "raises": (lambda m, x: x.view(7, 7), "forward raised RuntimeError: shape '[7, 7]' is invalid"),
    "none": (lambda m, x: None, "returns a NoneType"),
}


@pytest.mark.parametrize("case", sorted(NEAR_MISSES))
def test_near_misses_say_what_was_seen(case: str) -> None:
    formula, expected = NEAR_MISSES[case]
    module = Overriding(formula)
    assert looks_like_linear(module)
    assert expected in detail(module)
    assert isinstance(probe_linear(Overriding(lambda m, x: functional.linear(x, m.weight, m.bias))), LinearFacts)


class TwoInputs(nn.Linear):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + residual


class CalledOtherwise(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return 2.0 * self.forward(x)


class ScaledOnLookup(nn.Linear):
    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        return value * 2.0 if name == "weight" else value


class LowRank(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 4)
        self.down = nn.Linear(6, 2)


def test_more_arguments() -> None:
    assert "missing 1 required positional argument: 'residual'" in detail(TwoInputs(6, 4))


def test_a_bias_of_another_size() -> None:
    odd = Matrix(6, 4, transposed=False)
    odd.offset = nn.Parameter(torch.ones(3))
    assert detail(odd) == "its parameters do not fit together: kernel float32[6, 4], offset float32[3]"


def test_call_may_be_overridden() -> None:
    assert "differs from F.linear" in detail(CalledOtherwise(6, 4))


def test_instance_forward_is_run_on_the_copy() -> None:
    def doubled(self: nn.Linear, x: Tensor) -> Tensor:
        return 2.0 * functional.linear(x, self.weight, self.bias)

    def same(self: nn.Linear, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    module = nn.Linear(6, 4)
    module.forward = MethodType(doubled, module)  # type: ignore[method-assign]
    assert "differs from F.linear" in detail(module)
    module.forward = MethodType(same, module)  # type: ignore[method-assign]
    assert probe_linear(module) == LinearFacts(6, 4, "linear", "weight", "bias")


def test_children_buffers_and_extra_parameters() -> None:
    low_rank, buffered, extended = LowRank(), nn.Linear(6, 4), nn.Linear(6, 4)
    buffered.register_buffer("scale", torch.ones(1))
    extended.lora_a = nn.Parameter(torch.ones(2, 6))
    assert all(looks_like_linear(module) for module in (low_rank, buffered, extended))
    assert detail(low_rank) == "it has child modules: down"
    assert detail(buffered) == "it has buffers: scale"
    assert detail(extended).endswith("weight float32[4, 6], bias float32[4], lora_a float32[2, 6]")


def test_weights_computed_before_each_call() -> None:
    assert detail(parametrizations.weight_norm(nn.Linear(6, 4))) == "a parametrization computes weight before each call"
    assert detail(prune.l1_unstructured(nn.Linear(6, 4), "weight", 0.5)) == "it has buffers: weight_mask"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = nn.utils.weight_norm(nn.Linear(6, 4))
    assert "weight_g float32[4, 1], weight_v float32[4, 6]" in detail(old)
    conv1d = load("transformers.pytorch_utils:Conv1D", 4, 6)
    assert looks_like_linear(parametrizations.weight_norm(conv1d))
    assert "a parametrization computes weight" in detail(conv1d)


def test_weight_behind_an_attribute_lookup_is_run() -> None:
    assert "differs from F.linear" in detail(ScaledOnLookup(6, 4))


def test_lazy_empty_and_integer_weights() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lazy, empty = nn.LazyLinear(4), nn.Linear(0, 4)
    packed = nn.Linear(6, 4, bias=False)
    packed.weight = nn.Parameter(torch.zeros(12, 1, dtype=torch.uint8), requires_grad=False)
    assert all(looks_like_linear(module) for module in (lazy, empty, packed))
    assert detail(lazy) == "its parameter weight is lazy and has no shape yet"
    assert detail(empty) == "its parameter weight has no elements"
    assert detail(packed) == "its parameter weight is uint8[12, 1], not floating point"


class Sized(nn.Module):
    """Says the sizes of a Linear, and holds what it is given."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = 6, 4
        for name, value in held.items():
            if type(value) is torch.Tensor:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize("kind", [torch.qint8, torch.float16])
def test_a_linear_that_torch_has_quantised(kind: torch.dtype) -> None:
    made = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 4)), {nn.Linear}, dtype=kind)
    assert packed_weight(made[0]) == "its weight is packed in _packed_params, a LinearPackedParamsBase"


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_a_linear_with_its_weight_in_a_buffer(kind: torch.dtype) -> None:
    made = Sized(scales=torch.ones(1, 4), qweight=torch.zeros(2, 4).to(kind))
    assert packed_weight(made) == f"its weight is in qweight, {str(kind).removeprefix('torch.')}[2, 4]"


NOT_PACKED: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Linear(6, 4),
    "holds nothing": lambda: Sized(),
    "a fixed projection": lambda: Sized(weight=torch.randn(4, 6)),
    "an index": lambda: Sized(index=torch.arange(4)),
    "a parameter": lambda: Sized(qweight=torch.zeros(2, 4, dtype=torch.int8), bias=nn.Parameter(torch.zeros(4))),
    "a child's parameter": lambda: Sized(qweight=torch.zeros(2, 4, dtype=torch.int8), inner=nn.Linear(6, 4)),
    "no sizes": lambda: nn.Identity(),
}


@pytest.mark.parametrize("case", NOT_PACKED)
def test_what_is_no_packed_linear(case: str) -> None:
    assert packed_weight(NOT_PACKED[case]()) == ""


def test_uncopyable_attributes() -> None:
    module = Overriding(lambda m, x: functional.linear(x, m.weight, m.bias))
    vars(module)["stream"] = (item for item in "")
    assert detail(module).startswith("its attributes cannot be copied (TypeError: cannot pickle 'generator' object")


def test_what_does_not_look_like_a_linear() -> None:
    for module in (
        nn.Embedding(3, 4),
        nn.LayerNorm(4),
        nn.Conv1d(2, 2, 1),
        nn.Bilinear(2, 2, 2),
        nn.Sequential(nn.Linear(2, 2)),
    ):
        assert not looks_like_linear(module)
        assert isinstance(probe_linear(module), NotALinear)
    assert detail(nn.Embedding(3, 4)).startswith("it is an embedding")


def test_large_weights_are_probed_in_float32() -> None:
    seen: list[torch.dtype] = []

    def formula(module: nn.Linear, x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return functional.linear(x, module.weight, module.bias)

    with torch.device("meta"):
        module = Overriding(formula, 4097, 4097)
    assert isinstance(probe_linear(module), LinearFacts)
    assert set(seen) == {torch.float32}


def test_module_gradients_hooks_and_random_state_are_untouched() -> None:
    calls: list[nn.Module] = []
    module = Overriding(NEAR_MISSES["dropout"][0])
    module.register_forward_pre_hook(lambda hooked, args: calls.append(hooked))
    module(torch.randn(2, 6)).sum().backward()
    assert calls == [module]
    assert module.weight.grad is not None
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    identities, gradient = [id(p) for p in module.parameters()], module.weight.grad.clone()
    attributes, version, state = dict(vars(module)), module.weight._version, torch.get_rng_state()
    assert "in training mode" in detail(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert calls == [module]
    assert module.training
    assert vars(module) == attributes
    assert [id(p) for p in module.parameters()] == identities
    assert module.weight._version == version
    assert torch.equal(module.weight.grad, gradient)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_equal_layers_are_probed_once() -> None:
    runs: list[int] = []

    def formula(module: nn.Linear, x: Tensor) -> Tensor:
        runs.append(1)
        return functional.linear(x, module.weight, module.bias)

    cache: dict[Hashable, LinearFacts | NotALinear] = {}
    first = probe_linear_cached(Overriding(formula), cache)
    count = len(runs)
    assert count > 0
    assert all(probe_linear_cached(Overriding(formula), cache) is first for _ in range(5))
    assert len(runs) == count
    assert probe_linear_cached(Overriding(formula, 6, 5), cache) == LinearFacts(6, 5, "linear", "weight", "bias")
    assert len(cache) == 2
