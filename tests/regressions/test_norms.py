"""Norms that peers lose, crash on or take for another: https://github.com/huggingface/accelerate/issues/3171 and the like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.plan.model import Outcome
from tests.integration.language_models import build, ids
from tests.rewrite.rewrite_samples import perturb

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def before_linear(norm: nn.Module, inputs: torch.Tensor = X) -> te_convert.Result:
    torch.manual_seed(1)
    model = perturb(nn.Sequential(norm, nn.Linear(16, 32)))
    result = te_convert.convert(model, (inputs,))
    assert result.report.parity.passed
    assert result.report.site("1").replacement
    with torch.no_grad():
        assert torch.allclose(result.model(inputs), model(inputs), atol=1e-5)
    return result


def refusal(result: te_convert.Result, fqn: str) -> list[str]:
    site = result.report.site(fqn)
    assert site.outcome is Outcome.REFUSED
    return [reason.code for reason in site.reasons]


@pytest.mark.report("huggingface/accelerate#3171", "Lightning-AI/pytorch-lightning#21755", "peer:norm-without-affine")
def test_accelerate_3171_layer_norm_without_affine() -> None:
    """https://github.com/huggingface/accelerate/issues/3171: the conversion read the dtype of a weight that is None."""
    result = before_linear(nn.LayerNorm(16, elementwise_affine=False))
    assert refusal(result, "0") == ["norm.no-affine"]
    assert type(result.model[0]) is nn.LayerNorm  # type: ignore[index]


@pytest.mark.report("peer:norm-over-two-dimensions")
def test_a_norm_over_two_dimensions_is_left_alone() -> None:
    """Taking the first of its sizes makes a TE module of another shape."""
    result = before_linear(nn.LayerNorm((4, 16)), torch.randn(2, 4, 16))
    assert refusal(result, "0") == ["norm.multi-dim"]


@pytest.mark.report("peer:norm-without-bias")
def test_a_norm_without_bias_gains_nothing_to_train() -> None:
    """TE's LayerNorm has a bias always; a new one must not be trained."""
    norm = nn.LayerNorm(16, bias=False)
    result = before_linear(norm)
    assert result.report.site("0").outcome is Outcome.FUSED
    assert sum(p.numel() for p in result.model.parameters() if p.requires_grad) == 16 + 16 * 32 + 32
    assert not any("layer_norm_bias" in key for key in result.model.state_dict())
    assert list(te_convert.original_state_dict(result.model)) == ["0.weight", "1.weight", "1.bias"]


def transformers_norm(name: str) -> nn.Module:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    made: nn.Module = {"llama": LlamaRMSNorm, "t5": T5LayerNorm, "gemma": GemmaRMSNorm}[name](16, eps=1e-6)
    return made


@pytest.mark.report("Lightning-AI/pytorch-lightning#20804", "peer:rms-norm")
@pytest.mark.parametrize(
    ("make", "eps"),
    [
        (lambda: nn.RMSNorm(16), torch.finfo(torch.float32).eps),
        (lambda: transformers_norm("llama"), 1e-6),
        (lambda: transformers_norm("t5"), 1e-6),
    ],
    ids=["torch", "llama", "t5"],
)
def test_lightning_20804_rms_norms(make: Any, eps: float) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/20804; the eps of None is that of the dtype."""
    (fusion,) = before_linear(make()).plan.fusions
    spec: Any = fusion.spec
    assert (spec.normalization, spec.zero_centered_gamma) == ("RMSNorm", False)
    assert spec.eps == pytest.approx(eps, rel=1e-3)


@pytest.mark.report("linkedin/Liger-Kernel#74", "axolotl-ai-cloud/axolotl#1886", "linkedin/Liger-Kernel#370")
@pytest.mark.parametrize(("name", "centred"), [("gemma", True), ("llama", False)])
def test_liger_74_gemma_multiplies_by_one_plus_w(name: str, centred: bool) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/74: the output is silently wrong when the two are mixed up."""
    (fusion,) = before_linear(transformers_norm(name)).plan.fusions
    spec: Any = fusion.spec
    assert spec.zero_centered_gamma is centred


@pytest.mark.report("NVIDIA-NeMo/Speech#11951")
def test_nemo_speech_11951_the_four_norms_of_a_gemma_2_layer() -> None:
    """https://github.com/NVIDIA-NeMo/Speech/issues/11951: one norm took another's weight, and one stayed zero."""
    model = build("gemma2")
    result = te_convert.convert(model, {"input_ids": ids()}, strict=True)
    norms = [site for site in result.report.sites if "layernorm" in site.fqn]
    assert len(norms) == 8
    assert all(site.outcome in (Outcome.FUSED, Outcome.CONVERTED) for site in norms)
    kept = te_convert.original_state_dict(result.model)
    assert list(kept) == list(model.state_dict())
    assert all(torch.equal(kept[key], value) for key, value in model.state_dict().items())
    used = [source for fusion in result.plan.fusions for source in _sources(fusion)]
    used += [f"{swap.fqn}.{source}" for swap in result.plan.swaps if swap.weights for source in swap.weights.sources]
    assert len(used) == len(set(used))
    names = {name for name, _ in model.named_parameters()}
    assert names - set(used) <= {"model.embed_tokens.weight"}


def _sources(fusion: Any) -> list[str]:
    return [f"{fusion.scope}.{source}" if fusion.scope else source for source in fusion.weights.sources]
