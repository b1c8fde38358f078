"""Linears that peers skip, tear apart or convert into something that fails later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_convert
from te_convert.plan.model import Outcome
from te_convert.rewrite.site import is_converted
from tests.integration.language_models import build, ids
from tests.rewrite.rewrite_samples import perturb


def x_of(width: int, rows: int = 32) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


def codes(result: te_convert.Result, fqn: str) -> set[str]:
    return {reason.code for reason in result.report.site(fqn).reasons}


def convert(model: nn.Module, x: Tensor, **options: Any) -> te_convert.Result:
    perturb(model)
    result = te_convert.convert(model, (x,), **options)
    with torch.no_grad():
        assert torch.allclose(result.model.eval()(x), model.eval()(x), atol=1e-5)
    return result


@pytest.mark.report("huggingface/accelerate#1188", "peer:siblings-after-an-odd-layer", "peer:default-filter")
@pytest.mark.parametrize("recipe", [None, "fp8-delayed"])
def test_accelerate_1188_siblings_after_an_odd_layer(recipe: str | None) -> None:
    """https://github.com/huggingface/accelerate/issues/1188: its check of sizes returns from the loop over the children."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 10), nn.Linear(10, 16), nn.Linear(16, 16), nn.LayerNorm(16))
    result = convert(model, x_of(16), recipe=recipe, min_sqnr=0.0 if recipe else None)
    assert all(is_converted(module) for module in result.model.children())
    assert result.report.parity.passed
    high = [decision.fqn for decision in result.plan.swaps if decision.precision == "high" and decision.kind == "Linear"]
    assert high == (["1", "2"] if recipe else [])


@pytest.mark.report("peer:which-dimension-is-aligned")
@pytest.mark.parametrize(("sizes", "odd"), [((24, 32), "in 24"), ((32, 24), "out 24"), ((40, 8), "in 40, out 8")])
def test_both_dimensions_of_a_weight_have_to_fit(sizes: tuple[int, int], odd: str) -> None:
    """TE asks for multiples of 16 in the last dimension of the input, the weight and the gradient of the output."""
    result = convert(nn.Sequential(nn.Linear(*sizes)), x_of(sizes[0]), recipe="fp8-delayed")
    (reason,) = [reason for reason in result.report.site("0").reasons if reason.code == "alignment.features"]
    assert reason.detail.startswith(odd)
    assert result.plan.get("0").precision == "high"


@pytest.mark.report("modelscope/ms-swift#9722", "NVIDIA-NeMo/Speech#8869")
@pytest.mark.parametrize(
    ("recipe", "width", "precision"),
    [
        ("fp8-delayed", 48, "recipe"),
        ("fp8-current", 48, "recipe"),
        ("mxfp8", 48, "high"),
        ("nvfp4", 48, "high"),
        ("mxfp8", 64, "recipe"),
    ],
)
def test_ms_swift_9722_each_recipe_has_its_own_multiples(recipe: str, width: int, precision: str) -> None:
    """https://github.com/modelscope/ms-swift/issues/9722: MXFP8 scales 32 values together."""
    plan = te_convert.analyze(nn.Sequential(nn.Linear(width, width)), (x_of(width),), recipe=recipe)
    assert plan.get("0").precision == precision
    assert ("alignment.features" in {reason.code for reason in plan.get("0").reasons}) == (precision == "high")


@pytest.mark.report("hpcaitech/ColossalAI#6390", "hpcaitech/ColossalAI#6393")
def test_colossalai_6390_a_head_with_two_labels() -> None:
    """https://github.com/hpcaitech/ColossalAI/issues/6390: only the input's size was looked at."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=100, num_labels=2
    )
    torch.manual_seed(0)
    model: Any = perturb(transformers.BertForSequenceClassification(config)).eval()
    result = te_convert.convert(model, {"input_ids": ids() % 90}, recipe="fp8-delayed")
    assert result.report.parity.passed
    assert "alignment.features" in codes(result, "classifier")
    assert result.plan.get("classifier").precision == "high"
    assert result.plan.get("bert.encoder.layer.0.output.dense").replacement


@pytest.mark.report("pytorch/ao#1871", "peer:frozen-parameters")
def test_ao_1871_frozen_weights_stay_frozen() -> None:
    """https://github.com/pytorch/ao/issues/1871."""
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." in name)
    result = te_convert.convert(model, {"input_ids": ids()}, strict=True)
    counts = [sum(p.numel() for p in each.parameters() if p.requires_grad) for each in (model, result.model)]
    assert counts[0] == counts[1] > 0
    flags = [(name, p.requires_grad) for name, p in model.named_parameters()]
    assert [(name, p.requires_grad) for name, p in te_convert.revert(result.model).named_parameters()] == flags


@pytest.mark.report("pytorch/ao#2241", "peer:root-linear")
def test_ao_2241_a_root_linear() -> None:
    """https://github.com/pytorch/ao/issues/2241: there is no parent in which it could be exchanged."""
    linear = nn.Linear(16, 32)
    result = convert(linear, x_of(16))
    assert is_converted(result.model)
    assert type(linear) is nn.Linear
    assert result.report.parity.passed


@pytest.mark.report("ModelTC/MQBench#57", "peer:weight-norm")
def test_mqbench_57_weight_norm() -> None:
    """https://github.com/ModelTC/MQBench/issues/57: the weight is computed from two Parameters before each call."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), nn.Linear(16, 16))
    result = convert(model, x_of(16))
    assert codes(result, "0") == {"module.parametrized"}
    assert [name for name, _ in result.model.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert result.report.site("1").outcome is Outcome.CONVERTED


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.report("peer:subclass-with-its-own-forward")
def test_a_subclass_with_its_own_forward() -> None:
    """Replaced by its base class, it would compute something else."""
    result = convert(nn.Sequential(Doubled(16, 16), nn.Linear(16, 16)), x_of(16))
    assert codes(result, "0") == {"module.subclass"}
    assert type(result.model[0]) is Doubled  # type: ignore[index]


@pytest.mark.report("peer:one-module-twice", "peer:tied-weights")
def test_a_module_under_two_names_and_a_weight_in_two_modules() -> None:
    """Walking over names converts one of them; the other keeps the old module and trains on its own."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model[2] = model[0]
    model[4].weight = model[0].weight
    result = convert(model, x_of(16))
    converted: Any = result.model
    assert converted[2] is converted[0]
    assert converted[4].weight is converted[0].weight
    assert result.report.site("0").aliases == ("2",)
    assert result.report.parity.passed


@pytest.mark.report("peer:train-flags", "peer:hooks")
def test_modes_and_hooks() -> None:
    """A new module is in train mode and has no hooks."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).eval()
    model[1].train()
    seen: list[int] = []
    handle = model[0].register_forward_hook(lambda module, args, output: seen.append(1))
    result = te_convert.convert(model, (x_of(16),), inplace=True)
    seen.clear()
    assert [module.training for module in result.model.modules()] == [False, False, True]
    result.model(x_of(16))
    assert seen == [1]
    handle.remove()
    result.model(x_of(16))
    assert seen == [1]


@pytest.mark.report("pytorch/pytorch#58969", "peer:attention-out-proj")
@pytest.mark.parametrize("fuse", [True, False])
def test_pytorch_58969_out_proj_of_multihead_attention(fuse: bool) -> None:
    """https://github.com/pytorch/pytorch/issues/58969: its forward reads the weight and never calls the module."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x, x, x, need_weights=False)[0]
            return out

    x = torch.randn(2, 5, 16)
    result = convert(Net(), x, fuse=fuse)
    if fuse:
        assert result.report.site("attention").replacement == "te.MultiheadAttention"
        assert (result.report.site("attention").executed or 0) > 0
        return
    assert not result.converted
    assert codes(result, "attention.out_proj") == {"module.weight-read-elsewhere"}


@pytest.mark.report("NVIDIA/TransformerEngine#1556")
def test_te_1556_a_model_without_anything_that_runs_on_te_says_so_first() -> None:
    """https://github.com/NVIDIA/TransformerEngine/issues/1556: entering an autocast converts nothing."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
    result = te_convert.convert(model, (torch.randn(2, 3, 8, 8),), recipe="fp8")
    assert not result.converted
    assert "0 sites would run on Transformer Engine" in str(result.report).splitlines()[0]


@pytest.mark.report("linkedin/Liger-Kernel#764", "linkedin/Liger-Kernel#392")
def test_liger_764_what_was_planned_is_converted_and_attributes_stay() -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/764: a patched instance lacked an attribute; #392: layers were missed."""
    model = build("llama")
    planned = [d.fqn for d in te_convert.analyze(model, {"input_ids": ids()}) if d.replacement]
    result = te_convert.convert(model, {"input_ids": ids()}, strict=True)
    assert [site.fqn for site in result.report.sites if site.replacement] == planned
    assert {site.fqn.split(".")[2] for site in result.report.sites if ".layers." in site.fqn} == {"0", "1"}
    converted = dict(result.model.named_modules())
    for name, module in model.named_modules():
        for attribute in vars(module):
            if not attribute.startswith("_"):
                assert hasattr(converted[name], attribute), f"{name}.{attribute}"
