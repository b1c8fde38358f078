"""The check of norm statistics (verify/norm_statistics.py) finds and runs the norms of real Transformer Engine modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_convert
from te_convert.replacements.specs import LayerNormLinearSpec, LayerNormMLPSpec, LayerNormSpec, RMSNormSpec, Spec
from te_convert.verify.norm_statistics import statistics_spread
from te_convert.verify.tolerance import STATISTICS_SPREAD
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu
from tests.te_contract.test_converted_models import CASES
from tests.te_contract.test_modules import build
from tests.verify.model_zoo import cast

pytestmark = needs_te

SPECS: list[Spec] = [
    LayerNormSpec(32, 1e-5, zero_centered_gamma=False, dtype="bfloat16"),
    RMSNormSpec(32, 1e-6, zero_centered_gamma=True, dtype="bfloat16"),
    LayerNormLinearSpec(32, 48, True, 1e-5, "LayerNorm", zero_centered_gamma=False, dtype="bfloat16"),
    LayerNormMLPSpec(32, 64, True, 1e-6, "RMSNorm", "swiglu", zero_centered_gamma=True, dtype="bfloat16"),
]


@pytest.fixture(autouse=True)
def te() -> Iterator[Any]:
    with te_on_cpu() as package:
        yield package


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_modules_have_statistics_in_float32(spec: Spec) -> None:
    spread = statistics_spread(build(spec, "te"))
    assert spread is not None
    assert spread < STATISTICS_SPREAD / 3


@pytest.mark.parametrize("name", ["gpt2", "blocks"])
def test_every_norm_of_a_model_is_judged(name: str) -> None:
    case = CASES[name]
    model = case.model().to(torch.bfloat16)
    result = te_convert.convert(model, cast(case.inputs, torch.bfloat16), backend="te", allow=case.allow)
    sites = [module for module in result.model.modules() if getattr(module, "layer_norm_weight", None) is not None]
    assert sites
    assert not [note for note in result.report.parity.notes if "statistics" in note]
    for site in sites:
        spread = statistics_spread(site)
        assert spread is not None
        assert spread < STATISTICS_SPREAD / 3
