"""Models that random testing found to go wrong once, made small, and whether the checks can fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import te_convert
from tests.property import checks
from tests.property.checks import check_conversion
from tests.property.composer import AttentionForm, BlockForm, ModelForm, NormForm, inputs

FOUND: dict[str, ModelForm] = {
    # The second conversion took a norm by hand, whose weight lives in a fusion, for an activation, and raised.
    "norm-by-hand-fused-with-one-linear": ModelForm(
        blocks=(BlockForm(norm=NormForm("rms-own"), attention=AttentionForm(packed=True, mask="float"), mlp=None),), width=32
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_found_before(name: str, tmp_path: Path) -> None:
    assert check_conversion(FOUND[name], tmp_path).converted


def test_everything_converts_in_the_usual_forms() -> None:
    """The properties would hold for a conversion that does nothing."""
    result = check_conversion(ModelForm(blocks=(BlockForm(), BlockForm(norm=NormForm("rms"))), order=(0, 1), head="own"))
    assert all(str(site.outcome) in ("CONVERTED", "FUSED") for site in result.report.sites)


def _bias(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_submodule("blocks.0.attention.proj").get_parameter("bias").mul_(1.01)


def _frozen(model: nn.Module) -> None:
    model.get_submodule("blocks.0.attention.proj").get_parameter("bias").requires_grad = False


def _flag(model: nn.Module) -> None:
    model.get_submodule("blocks.0.attention.proj").train()


def _buffer(model: nn.Module) -> None:
    model.get_buffer("scale").add_(0.01)


MISTAKES: dict[str, Callable[[nn.Module], None]] = {"bias": _bias, "frozen": _frozen, "flag": _flag, "buffer": _buffer}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_state_s_check_can_fail(mistake: str) -> None:
    original, _ = checks.hooked(ModelForm())
    model = te_convert.convert(original, inputs(ModelForm())).model
    checks.check_state(original, model)
    MISTAKES[mistake](model)
    with pytest.raises(AssertionError):
        checks.check_state(original, model)


@pytest.mark.parametrize("check", [checks.check_outputs, checks.check_training])
def test_the_checks_of_numbers_can_fail(check: Callable[[nn.Module, nn.Module, ModelForm], None]) -> None:
    form = ModelForm()
    original, _ = checks.hooked(form)
    model = te_convert.convert(original, inputs(form)).model
    _bias(model)
    with pytest.raises(AssertionError):
        check(original, model, form)
