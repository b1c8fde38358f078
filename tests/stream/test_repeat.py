"""Models that cannot run with fake tensors are planned on a shallow model that runs, repeated over all layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import te_convert
from te_convert.capture.graph import Capture
from te_convert.stream import repeat
from tests.stream.stream_samples import tensors, tokens

pytest.importorskip("transformers")


@pytest.fixture
def mixture(tmp_path: Path) -> Any:
    """Five layers, float32: torch's grouped product has no fake kernel in that dtype.  A dense layer stands before mixtures."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(5)
    config = Qwen2MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        mlp_only_layers=[0, 3],
    )
    model = Qwen2MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    return model


def test_layers_of_two_kinds_are_fused_as_in_memory(mixture: Any, tmp_path: Path) -> None:
    result = te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te")
    assert any("model of 2 layers with random weights ran instead" in note for note in result.report.notes)
    assert result.report.parity.status == "slice"
    whole = te_convert.convert(mixture).plan
    assert {(f.fqn, f.spec, f.weights) for f in result.plan.fusions} == {(f.fqn, f.spec, f.weights) for f in whole.fusions}
    assert {(d.fqn, d.outcome, d.fused_into) for d in result.plan} == {(d.fqn, d.outcome, d.fused_into) for d in whole}
    expected = mixture(tokens()).logits.detach()
    found = te_convert.load(tmp_path / "te")(tokens()).logits.detach()
    assert float((found - expected).abs().max() / expected.abs().max()) < 2e-6


def test_experts_of_each_number_in_the_file_come_back(mixture: Any, tmp_path: Path) -> None:
    names = tensors(tmp_path / "hf")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names  # not stacked on the disk
    te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te", verify=False)
    te_convert.export(tmp_path / "te", tmp_path / "back")
    found = tensors(tmp_path / "back")
    assert found.keys() == names.keys()
    assert all(torch.equal(found[name], names[name]) for name in names)


def test_where_the_shallow_model_does_not_run_either(mixture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Capture((), (("inputs", "RuntimeError: planted"),))
    monkeypatch.setattr(repeat, "observe", lambda *_: ((), nothing, ()))
    result = te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te", verify=False)
    assert any("no shallow model was planned in its place" in note and "planted" in note for note in result.report.notes)
    assert result.plan.fusions == ()
    assert result.converted
