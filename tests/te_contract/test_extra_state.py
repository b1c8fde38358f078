"""TE's ``_extra_state``: nothing for recipes without memory, a pickle for delayed scaling, which nobody reads or writes unasked."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import te_convert
from te_convert.errors import TeConvertError
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu
from tests.te_contract.test_converted_models import CASES

pytestmark = needs_te


@pytest.fixture(autouse=True)
def te() -> Iterator[Any]:
    with te_on_cpu() as package:
        yield package


def pickled() -> Tensor:
    """The form in which TE keeps the history of delayed scaling."""
    buffer = io.BytesIO(pickle.dumps({"recipe": None, "scale_fwd": torch.ones(3)}))
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


@pytest.mark.report("NVIDIA/TransformerEngine:transformer_engine/pytorch/_extra_state.py")
def test_a_pickled_history_is_refused_by_te_and_by_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", raising=False)
    case = CASES["blocks"]
    for backend in ("te", "reference"):
        model = te_convert.convert(case.model(), case.inputs, backend=backend).model
        state = {**model.state_dict(), "0._extra_state": pickled()}
        with pytest.raises(RuntimeError, match=r"pickle|delayed"):
            model.load_state_dict(state)
        model.load_state_dict({**state, "0._extra_state": torch.empty(0, dtype=torch.uint8)})


def test_state_dicts_of_other_layouts_leave_a_history_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And no directory is written with one."""
    case = CASES["gpt2"]
    result = te_convert.convert(case.model(), case.inputs, backend="te")
    head = result.model.get_submodule("lm_head")
    monkeypatch.setattr(type(head), "get_extra_state", lambda self: pickled())
    assert result.model.state_dict()["lm_head._extra_state"].numel() > 0
    assert not [key for key in te_convert.original_state_dict(result.model) if "_extra_state" in key]
    with pytest.raises(TeConvertError, match="_extra_state"):
        result.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.report("NVIDIA-NeMo/Automodel#2247")
def test_a_strict_load_misses_nothing_but_that_key() -> None:
    model = te_convert.convert(CASES["blocks"].model(), CASES["blocks"].inputs, backend="te").model
    state = dict(model.state_dict())
    assert not [key for key in state if key.endswith("_extra_state")]
    model.load_state_dict(state)
    del state["0.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"0.weight\""):
        model.load_state_dict(state)
