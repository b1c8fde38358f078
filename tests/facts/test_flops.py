"""Floating-point operations, against hand counts and against torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from te_convert.capture.run import record
from te_convert.capture.scenario import normalize_inputs
from te_convert.facts.flops import recording_flops
from te_convert.match.leaves import LeafPolicy
from tests.capture.architectures import ARCHITECTURES
from tests.capture.small_models import Forward, X, make_model


def flops(model: nn.Module, inputs: Any) -> tuple[int, dict[str, int]]:
    return recording_flops(model, record(model, normalize_inputs(inputs)[0], LeafPolicy()))


MODULES: dict[str, tuple[Callable[[], nn.Module], Any, int]] = {
    "linear": (lambda: nn.Linear(8, 5), torch.ones(3, 2, 8), 2 * 6 * 8 * 5),
    "linear of one row": (lambda: nn.Linear(8, 5), torch.ones(8), 2 * 8 * 5),
    "convolution": (lambda: nn.Conv2d(3, 4, (3, 5)), torch.ones(2, 3, 10, 10), 2 * (2 * 4 * 8 * 6) * 3 * 15),
    "grouped convolution": (lambda: nn.Conv1d(4, 6, 3, groups=2), torch.ones(2, 4, 10), 2 * (2 * 6 * 8) * 2 * 3),
    "transposed convolution": (lambda: nn.ConvTranspose1d(4, 6, 4, stride=2), torch.ones(2, 4, 5), 2 * (2 * 4 * 5) * 6 * 4),
    "embedding": (lambda: nn.Embedding(9, 4), torch.ones(3, dtype=torch.long), 0),
    "norm": (lambda: nn.LayerNorm(8), X, 0),
    "lazy": (lambda: nn.LazyLinear(5), X, 0),
}


@pytest.mark.parametrize("case", sorted(MODULES))
def test_modules(case: str) -> None:
    make, inputs, expected = MODULES[case]
    assert flops(make(), inputs) == (expected, {"": expected} if expected else {})


def attention(m: Any, x: Tensor) -> Any:
    q, k = x.view(1, 2, 2, 4), torch.ones(1, 2, 7, 4)
    return F.scaled_dot_product_attention(q, k, torch.ones(1, 2, 7, 3))


FUNCTIONS: dict[str, tuple[Forward, int]] = {
    "linear": (lambda m, x: F.linear(x, m.fc.weight, m.fc.bias), 2 * 2 * 64),
    "operator": (lambda m, x: x @ m.fc.weight, 2 * 2 * 64),
    "matmul": (lambda m, x: torch.matmul(x, m.fc.weight.T[:, :3]), 2 * 2 * 8 * 3),
    "vector": (lambda m, x: x @ x[0], 2 * 2 * 8),
    "bmm": (lambda m, x: torch.bmm(x.view(2, 1, 8), x.view(2, 8, 1)), 2 * 2 * 8),
    "addmm": (lambda m, x: torch.addmm(m.fc.bias, x, m.fc.weight), 2 * 2 * 64),
    "addmm by name": (lambda m, x: torch.addmm(m.fc.bias, mat1=x, mat2=m.fc.weight), 2 * 2 * 64),
    "baddbmm": (lambda m, x: torch.ones(2, 1, 1).baddbmm(x.view(2, 1, 8), x.view(2, 8, 1)), 2 * 2 * 8),
    "attention": (attention, 2 * 4 * 7 * (4 + 3)),
    "element-wise": (lambda m, x: x * m.fc.weight[0] + m.fc.bias, 0),
}


@pytest.mark.parametrize("case", sorted(FUNCTIONS))
def test_functions(case: str) -> None:
    forward, expected = FUNCTIONS[case]
    assert flops(make_model(forward), X) == (expected, {})


def test_each_call_counts_for_its_module() -> None:
    total, per_module = flops(make_model(lambda m, x: m.out(m.fc(m.fc(x))) @ m.fc.weight), X)
    assert per_module == {"fc": 2 * 256, "out": 256}
    assert total == 4 * 256


def test_multihead_attention() -> None:
    x = torch.ones(5, 2, 8)
    model = nn.MultiheadAttention(8, 2)
    total, _ = flops(model, (x, x, x))
    assert total == 2 * 10 * 8 * 8 * 4 + 2 * 2 * 2 * 5 * 5 * 8


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "gpt2"])
def test_against_torch(name: str) -> None:
    make, inputs = ARCHITECTURES[name]
    model = make()
    (scenario,) = normalize_inputs(inputs)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:  # the counter knows no other CPU kernel of attention
        scenario.call(model)
    total, per_module = flops(model, inputs)
    assert total == counter.get_total_flops()
    assert sum(per_module.values()) <= total
    assert per_module
