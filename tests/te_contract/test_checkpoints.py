"""Activation checkpointing of converted models under a recipe, with a backward after the autocast, as in training."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_convert
from te_convert.replacements import recipes
from te_convert.replacements.recipes import recipe_in_force
from te_convert.rewrite.checkpoints import checkpoints_on_te
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu
from tests.te_contract.test_converted_models import CASES, Block
from tests.te_contract.test_quantizers import bgrad_quantize, current_scaling, layout_decides

pytestmark = [needs_te, pytest.mark.usefixtures("layout_decides")]
__all__ = ["layout_decides"]

WIDTH = 32


@pytest.fixture(autouse=True)
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """With TE's random states, and the recipes of te_convert.autocast, in reach of a CPU."""
    with te_on_cpu() as package:
        from transformer_engine.common.recipe import CustomRecipe
        from transformer_engine.pytorch import distributed
        from transformer_engine.pytorch.custom_recipes.reference_current_scaling import current_scaling_ref_factory
        from transformer_engine.pytorch.module import base

        monkeypatch.setattr(base.tex, "bgrad_quantize", bgrad_quantize)
        monkeypatch.setattr(distributed, "_USE_REENTRANT_ACTIVATION_RECOMPUTE", True)  # which TE leaves as the last call had it
        monkeypatch.setattr(distributed, "_get_cuda_rng_state", lambda *_, **__: torch.empty(0))
        monkeypatch.setattr(distributed, "_set_cuda_rng_state", lambda *_, **__: None)
        monkeypatch.setattr(recipes, "build_recipe", lambda name: CustomRecipe(qfactory=current_scaling_ref_factory))
        yield package


class Stack(nn.Module):
    """Checkpoints its blocks by a name that it imported, by torch's own, or not."""

    def __init__(self, how: str | None, reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.how, self.reentrant = nn.ModuleList(Block() for _ in range(2)), how, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.how == "name":
                x = checkpoint(block, x, use_reentrant=self.reentrant, preserve_rng_state=True)
            elif self.how == "attribute":
                x = torch.utils.checkpoint.checkpoint(lambda y, block=block: block(y), x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return x


def stack(how: str | None, reentrant: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Stack(None, reentrant).train()
    result = te_convert.convert(model, (torch.randn(2, 16, WIDTH),), backend="te", recipe="fp8-current", min_sqnr=1.0)
    assert result.report.parity.passed
    root: Any = result.model
    root.how = how
    return result.model


def gradients(model: nn.Module, inputs: Any, context: Any) -> dict[str, Tensor]:
    """The backward comes after the autocast."""
    with context:
        y = model(**inputs)["logits"] if isinstance(inputs, dict) else model(*inputs)
    assert recipe_in_force() is None
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def batch() -> tuple[Tensor]:
    return (torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(2), requires_grad=True),)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("how", ["name", "attribute"])
@pytest.mark.report("NVIDIA/TransformerEngine#1190", "NVIDIA/Megatron-LM#7538")
def test_gradients_are_those_without_checkpoints(how: str, reentrant: bool) -> None:
    plain, checked = (stack(kind, reentrant) for kind in (None, how))
    expected = gradients(plain, batch(), te_convert.autocast(plain))
    actual = gradients(checked, batch(), te_convert.autocast(checked))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.report("NVIDIA/TransformerEngine#1190", "NVIDIA/Megatron-LM#7538")
def test_torchs_own_checkpoint_would_fail_or_lie(te: Any) -> None:
    """So the test above can fail: TE's autocast alone does not route."""
    plain = stack(None, True)
    expected = gradients(plain, batch(), te_convert.autocast(plain))
    lied = gradients(stack("name", True), batch(), current_scaling(te))
    assert any(not torch.equal(lied[name], value) for name, value in expected.items())
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        gradients(stack("name", False), batch(), current_scaling(te))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradient_checkpointing_of_transformers(name: str, reentrant: bool) -> None:
    case = CASES[name]
    found = []
    for checked in (False, True):
        model: Any = te_convert.convert(case.model().eval(), case.inputs, backend="te", recipe="fp8-current", min_sqnr=1.0).model
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = 0.0
        if checked:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": reentrant})
        inputs = {**case.inputs, "use_cache": False}
        found.append(gradients(model, inputs, te_convert.autocast(model)))
        kept = {id(f.func) for m in model.modules() if isinstance(f := m.__dict__.get("_gradient_checkpointing_func"), partial)}
        assert kept == ({id(checkpoint)} if checked else set())  # put back
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-6, atol=1e-7)


def test_nothing_changes_in_high_precision_or_without_te(te: Any) -> None:
    model, seen = stack("name", False), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[0])
        return original(*args, **kwargs)

    original = te.checkpoint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(te, "checkpoint", counted)
        with checkpoints_on_te(model):
            model(*batch()).sum().backward()
            assert not seen
            with current_scaling(te):
                checkpoint_of_torch = torch.utils.checkpoint.checkpoint
                checkpoint_of_torch(nn.Linear(WIDTH, WIDTH), batch()[0], use_reentrant=False)
                assert not seen
                model(*batch())
                assert len(seen) == 2
    assert torch.utils.checkpoint.checkpoint is checkpoint
