from __future__ import annotations

import pytest
import torch
from torch import nn

import te_convert
from te_convert.errors import InputError
from te_convert.estimate.run import DEFAULT_TOKENS
from tests.estimate.models import Block, tokens


def test_a_model_on_meta_and_its_rest() -> None:
    with torch.device("meta"):
        model, inputs = Block(1024, 16).bfloat16(), torch.zeros(4, 512, 1024, dtype=torch.bfloat16)
    found = te_convert.estimate(model, inputs, gpu="h200")
    assert found.whole
    assert found.tokens == 2048
    assert found.flop_shares.keys() == {"linear", "attention"}
    assert any(site.fqn == "(rest of scale)" for site in found.recipe("bf16").sites)


def test_a_plan_has_its_sites_alone_and_says_so() -> None:
    plan = te_convert.analyze(Block(), tokens())
    found = te_convert.estimate(plan, gpu="h100", recipe="fp8-current", mode="inference", tokens=4096)
    assert not found.whole
    assert any("upper limits" in note for note in found.notes)
    whole = te_convert.estimate(Block(), tokens(), gpu="h100", recipe="fp8-current", mode="inference", tokens=4096)
    assert whole.original.gemm_us == pytest.approx(found.original.gemm_us)
    assert whole.original.memory_us > found.original.memory_us


def test_derived_inputs_do_not_stand_for_a_load() -> None:
    found = te_convert.estimate(nn.Sequential(nn.Linear(64, 64)), gpu="h100")
    assert found.tokens == DEFAULT_TOKENS
    assert any("8192 tokens assumed" in note for note in found.notes)


def test_a_plan_without_shapes_cannot_be_estimated() -> None:
    with pytest.raises(InputError, match="no shapes"):
        te_convert.estimate(te_convert.plan.model.Plan("X", ()), gpu="h100")


def test_the_package_is_the_function() -> None:
    import te_convert.estimate as package
    from te_convert.estimate.gpus import GPUS

    assert "h100" in GPUS
    assert package(nn.Linear(64, 64), torch.randn(4, 64), gpu="h100").gpu == "h100"  # type: ignore[operator]
