"""Converted models on real TE modules under a quantising recipe take any number of tokens, as their twins in the emulation do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_convert
from te_convert.reference.emulation import emulate
from te_convert.replacements.build import constructor_arguments, module_class
from te_convert.replacements.recipes import recipe_in_force, rows_multiple
from te_convert.replacements.specs import LinearSpec
from tests.rewrite import attention_models
from tests.rewrite.rewrite_samples import perturb
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu
from tests.te_contract.test_converted_models import CASES, Mlp, encoder
from tests.te_contract.test_quantizers import bgrad_quantize, current_scaling, layout_decides

pytestmark = [needs_te, pytest.mark.usefixtures("layout_decides")]
__all__ = ["layout_decides"]

WIDTH = 32


@pytest.fixture(autouse=True)
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with te_on_cpu() as package:
        from transformer_engine.pytorch.module import base

        monkeypatch.setattr(base.tex, "bgrad_quantize", bgrad_quantize)
        yield package


class Net(nn.Module):
    """te.Linear, te.LayerNormLinear and te.LayerNormMLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48)
        self.mlp, self.inner = Mlp(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.mlp(self.inner(x))
        y: Tensor = self.last(self.norm(x))
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "modules": Net,
    "layers": partial(encoder, True, True),
    "layers, post-norm": partial(encoder, False, True),
}


def converted(name: str, backend: str) -> nn.Module:
    torch.manual_seed(0)
    model = perturb(MODELS[name]()).train()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # TE rounds biases to bfloat16
            parameter.data.copy_(parameter.data.bfloat16())
    result = te_convert.convert(model, (torch.randn(2, 16, WIDTH),), backend=backend, recipe="fp8-current", min_sqnr=1.0)
    assert result.report.parity.passed
    return result.model


def run(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)))
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("shape", [(1, 1, WIDTH), (1, 7, WIDTH), (3, 5, WIDTH), (2, 16, WIDTH)], ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.report("NVIDIA/TransformerEngine#1422", "NVIDIA/TransformerEngine#1571", "NVIDIA/TransformerEngine#232")
def test_any_number_of_tokens(name: str, shape: tuple[int, ...], te: Any) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
    on_te, on_twins, plainly = (converted(name, backend) for backend in ("te", "reference", "reference"))
    with current_scaling(te):
        theirs = run(on_te, x)
    with emulate("fp8-current"):
        ours = run(on_twins, x)
    plain = run(plainly, x)
    assert theirs.keys() == ours.keys()
    for key, value in theirs.items():
        assert float((ours[key] - value).norm()) <= 1e-4 * float(value.norm()) + 1e-7, key
    assert float((plain["y"] - theirs["y"]).norm()) > 1e-3 * float(plain["y"].norm())  # it was quantised


def test_te_alone_raises(te: Any) -> None:
    """So the test above can fail."""
    spec = LinearSpec(WIDTH, WIDTH, True, "float32")
    args, kwargs = constructor_arguments(spec, module_class(spec, "te"))
    module: nn.Module = module_class(spec, "te")(*args, **kwargs)
    module._parameters.update(nn.Linear(WIDTH, WIDTH)._parameters)
    with current_scaling(te), pytest.raises(ValueError, match="divisible by"):
        module(torch.randn(1, WIDTH))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.report("Lightning-AI/lit-llama#249")
def test_decoding_with_a_cache_under_a_recipe(name: str, te: Any) -> None:
    """One token at a time; the dimensions that do not align stay in high precision, on TE and on twins."""
    case = CASES[name]
    models: Any = [
        te_convert.convert(case.model(), case.inputs, backend=backend, recipe="fp8-current", min_sqnr=1.0).model
        for backend in ("te", "reference")
    ]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with current_scaling(te):
        theirs = models[0].generate(attention_models.ids()[:1, :5], **options)
    with emulate("fp8-current"):
        ours = models[1].generate(attention_models.ids()[:1, :5], **options)
    assert len(theirs.logits) == 4
    torch.testing.assert_close(theirs.logits[0], ours.logits[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(theirs.logits[1], ours.logits[1], rtol=0.02, atol=0.02)


def test_what_the_recipes_ask_for(te: Any) -> None:
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager, get_align_size_for_quantization

    assert recipe_in_force() is None
    assert rows_multiple() == rows_multiple(grouped=True) == 1
    expected = {"DelayedScaling": 16, "Float8CurrentScaling": 16, "Float8BlockScaling": 16, "MXFP8BlockScaling": 32}
    for name, rows in {**expected, "NVFP4BlockScaling": 32}.items():
        made = getattr(recipes, name)()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FP8GlobalStateManager, "is_fp8_enabled", lambda: True)
            patch.setattr(FP8GlobalStateManager, "get_fp8_recipe", lambda made=made: made)
            assert rows_multiple() == rows
            assert rows_multiple(grouped=True) == get_align_size_for_quantization(made)
    with current_scaling(te):
        assert rows_multiple() == 32
        assert rows_multiple(grouped=True) == 128
        with te.autocast(enabled=False):
            assert rows_multiple() == 1
