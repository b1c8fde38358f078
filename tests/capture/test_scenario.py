"""Example inputs are accepted in every documented form, and nothing else is."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch

from te_convert.capture.run import other_mode
from te_convert.capture.scenario import normalize_inputs
from te_convert.errors import InputError

A, B = torch.ones(1), torch.zeros(2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, []),
        (A, [("inputs", (A,), {})]),
        ((A, B), [("inputs", (A, B), {})]),
        ({"x": A}, [("inputs", (), {"x": A})]),
        (UserDict(x=A), [("inputs", (), {"x": A})]),
        (((A,), {"y": B}), [("inputs", (A,), {"y": B})]),
        (((), {"y": B}), [("inputs", (), {"y": B})]),
        ((A, {"y": B}), [("inputs", (A, {"y": B}), {})]),
        ([A], [("inputs", (A,), {})]),
        ([A, {"x": B}], [("inputs[0]", (A,), {}), ("inputs[1]", (), {"x": B})]),
        ((), [("inputs", (), {})]),
    ],
)
def test_forms(given: Any, expected: list[Any]) -> None:
    scenarios = normalize_inputs(given)
    assert [(scenario.name, scenario.args, scenario.kwargs) for scenario in scenarios] == expected
    assert all(scenario.training is None and scenario.derived == "" for scenario in scenarios)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "empty list"),
        (3, "has a int"),
        ([A, "text"], "has a str"),
        ({1: A}, "not a string: 1"),
        (((A,), {1: B}), "not a string: 1"),
    ],
)
def test_errors(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        normalize_inputs(given)
    assert caught.value.hint


def test_the_other_mode_has_its_own_name() -> None:
    (scenario,) = normalize_inputs(A)
    assert (other_mode(scenario, training=True).name, other_mode(scenario, training=True).training) == ("inputs[train]", True)
    assert (other_mode(scenario, training=False).name, other_mode(scenario, training=False).training) == ("inputs[eval]", False)
    assert scenario.training is None
