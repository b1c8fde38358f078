"""Checkpoints of tied models, and models that no tracer takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn

import te_convert
from te_convert.plan.model import Outcome
from tests.integration.language_models import LLAMA, SMALL, ids
from tests.rewrite.rewrite_samples import perturb


def tied() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SMALL, **LLAMA, tie_word_embeddings=True)
    return perturb(transformers.Qwen2ForCausalLM(config)).eval()


@pytest.mark.report("NVIDIA/TransformerEngine#1482", "THUDM/slime#345", "NVIDIA/TensorRT-LLM#1733", "peer:tied-weights")
def test_te_1482_a_tied_model_is_saved_and_read_again(tmp_path: Path) -> None:
    """https://github.com/NVIDIA/TransformerEngine/issues/1482; the file has no lm_head, which THUDM/slime#345 stumbled over."""
    model = tied()
    result = te_convert.convert(model, {"input_ids": ids()}, strict=True)
    assert result.model.lm_head.weight is result.model.model.embed_tokens.weight  # type: ignore[union-attr]
    result.model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        assert torch.equal(again(ids()).logits, model(ids()).logits)
    second = te_convert.convert(again, {"input_ids": ids()}, strict=True)
    assert second.model.lm_head.weight is second.model.model.embed_tokens.weight  # type: ignore[union-attr]


@pytest.mark.report("THUDM/slime#345", "NVIDIA/TensorRT-LLM#1733")
def test_slime_345_a_state_without_the_tied_head_loads(tmp_path: Path) -> None:
    """https://github.com/THUDM/slime/issues/345: the head is filled in by the tie, and nothing else is forgiven."""
    model, twin = tied(), te_convert.convert(tied(), {"input_ids": ids()}, strict=True).model
    state = {name: tensor * 1.5 for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    missing, unexpected = te_convert.load_original_state_dict(twin, state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    assert torch.equal(twin.lm_head.weight, state["model.embed_tokens.weight"])  # type: ignore[arg-type,union-attr]
    del state["model.norm.weight"]
    missing, _ = te_convert.load_original_state_dict(twin, state, strict=False)
    assert len(missing) == 2


class Branches(nn.Module):
    """Everything that stops a symbolic tracer: unpacked shapes, branches on devices and on values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj, self.out = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        hidden = self.proj(self.norm(x))
        hidden = hidden.view(*hidden.shape[:-1], 4, 8)
        if hidden.device.type == "cpu" and bool((hidden > -1e9).all()):
            hidden = hidden * options.get("scale", 1.0)
        out: Tensor = self.out(hidden.flatten(-2))
        return out


@pytest.mark.report("huggingface/transformers#36022", "huggingface/transformers#31414")
def test_transformers_36022_what_cannot_be_traced_symbolically() -> None:
    """https://github.com/huggingface/transformers/issues/36022."""
    model, x = perturb(Branches()).eval(), torch.randn(2, 5, 16)
    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(model)
    result = te_convert.convert(model, (x,))
    assert result.report.parity.passed
    assert [str(site.outcome) for site in result.report.sites] == ["FUSED", "FUSED", "CONVERTED"]


class Half(Branches):
    """Cannot run at all: what it needs is nowhere."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        raise NotImplementedError("no data")


@pytest.mark.report("huggingface/transformers#36022", "huggingface/transformers#31414")
def test_transformers_36022_what_cannot_run_is_judged_module_by_module() -> None:
    result = te_convert.convert(perturb(Half()))
    assert [site.outcome for site in result.report.sites] == [Outcome.CONVERTED] * 3
    assert result.report.parity.status == "sites-only"
    assert all("capture.no-graph" in {reason.code for reason in site.reasons} for site in result.report.sites)
