"""Conversions of forwards that are random Python code: nothing raises, and outputs and gradients stay.

50 programs in CI, the same in every run.  ``make fuzz`` runs 2000 others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import te_convert
from te_convert.capture.tensors import iter_tensors
from tests.property.programs import RETURNS, STATEMENTS, ProgramForm, Step, build, source
from tests.property.test_composed import PROFILE

INDEX = st.integers(0, 3)
STEP = st.builds(Step, st.sampled_from(list(STATEMENTS)), st.tuples(INDEX, INDEX), st.tuples(INDEX, INDEX, INDEX), st.booleans())
PROGRAM = st.builds(
    ProgramForm,
    st.lists(STEP, min_size=1, max_size=6).map(tuple),
    st.sampled_from(list(RETURNS)),
    st.sampled_from((("layer", "rms"), ("layer",), ("rms",))),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@pytest.mark.timeout(0)
@PROFILE
@given(PROGRAM)
def test_random_code_computes_the_same(form: ProgramForm) -> None:
    check_program(form)


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEMENTS)
def test_each_statement_alone(name: str) -> None:
    check_program(ProgramForm((Step(name),), "tuple"))


def check_program(form: ProgramForm) -> None:
    model, inputs = build(form), [values(2, 6), values(2, 6), values(1, 3), values(3, 9)]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = te_convert.convert(model, (inputs[0],), backend="reference")
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    parity = result.report.parity
    assert not result.converted or parity.passed, f"{source(form)}\n{result.report}"
    for x in inputs:
        compare(run(model, x), run(result.model, x), source(form))
    reverted = te_convert.revert(result.model)
    assert {key: value.shape for key, value in reverted.state_dict().items()} == {key: value.shape for key, value in before.items()}
    assert all(torch.equal(value, before[key]) for key, value in reverted.state_dict().items())
    compare(([], gradients(model)), ([], gradients(reverted)), source(form))


def values(batch: int, tokens: int) -> Tensor:
    return torch.randn(batch, tokens, 16, generator=torch.Generator().manual_seed(batch * tokens))


def run(model: nn.Module, x: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs, and the gradient of the input; parameters keep theirs."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    outputs = [tensor for _, tensor in iter_tensors(model(x))]
    loss: Any = sum((tensor * torch.linspace(-1, 1, tensor.numel()).view(tensor.shape)).sum() for tensor in outputs)
    if loss.requires_grad:
        loss.backward()
    return [tensor.detach() for tensor in outputs], {"input": torch.zeros_like(x) if x.grad is None else x.grad}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those of the last run; a parameter that it did not use has zeros."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def compare(one: tuple[list[Tensor], dict[str, Tensor]], other: tuple[list[Tensor], dict[str, Tensor]], code: str) -> None:
    assert len(one[0]) == len(other[0])
    for a, b in zip(one[0], other[0], strict=True):
        assert (a - b).abs().max() <= 1e-4 * a.abs().max().clamp(min=1e-3), code
    for key, a in one[1].items():
        assert (a - other[1][key]).abs().max() <= 1e-3 * a.abs().max().clamp(min=1e-3), f"{key}\n{code}"
