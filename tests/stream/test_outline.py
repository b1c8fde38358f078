"""Names and layouts on the disk that differ from the model's: streamed as Transformers loads them, or refused in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import te_convert
from te_convert.errors import InputError
from tests.stream.stream_samples import tensors, tokens, write

pytest.importorskip("transformers")


def rewrite(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Other tensors in place of a directory's, in one file."""
    for file in folder.glob("model*"):
        file.unlink()
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_checkpoint_without_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    """The files of GPT-2 on the hub are those of its base model."""
    original = write("gpt2", tmp_path / "hf")
    rewrite(tmp_path / "hf", {name.removeprefix("transformer."): value for name, value in tensors(tmp_path / "hf").items()})
    te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te", verify=False)
    expected = original(tokens()).logits.detach()
    assert float((te_convert.load(tmp_path / "te")(tokens()).logits.detach() - expected).abs().max() / expected.abs().max()) < 2e-6
    te_convert.export(tmp_path / "te", tmp_path / "back")
    before, after = tensors(tmp_path / "hf"), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_tied_weights_with_values_of_their_own_are_not_tied(tmp_path: Path) -> None:
    """As Transformers does; a head that was dropped would be another model."""
    original: Any = write("llama tied", tmp_path / "hf")
    state = tensors(tmp_path / "hf")
    rewrite(tmp_path / "hf", {**state, "lm_head.weight": state["model.embed_tokens.weight"] * -0.5})
    expected = type(original).from_pretrained(tmp_path / "hf").eval()(tokens()).logits.detach()
    assert not torch.equal(expected, original(tokens()).logits)
    result = te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te")
    assert result.report.parity.status == "slice"
    assert any("config.json ties lm_head.weight" in note for note in result.report.notes)
    found = te_convert.load(tmp_path / "te")(tokens()).logits.detach()
    assert float((found - expected).abs().max() / expected.abs().max()) < 2e-6
    te_convert.export(tmp_path / "te", tmp_path / "back")
    assert torch.equal(type(original).from_pretrained(tmp_path / "back").eval()(tokens()).logits, expected)


def test_tied_weights_that_are_stored_twice_stay_tied(tmp_path: Path) -> None:
    write("llama tied", tmp_path / "hf")
    state = tensors(tmp_path / "hf")
    rewrite(tmp_path / "hf", {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()})
    result = te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te", verify=False)
    assert not any("ties" in note for note in result.report.notes)
    assert "lm_head.weight" not in tensors(tmp_path / "te")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("decoder.layers.0.self_attention.linear_qkv.weight", "layout of Megatron Core"),
        ("language_model.encoder.layers.0.self_attention.query_key_value.weight", "layout of Megatron-LM"),
        ("bert.encoder.layers.0.self_attention.layernorm_qkv.weight", "BioNeMo"),
    ],
)
def test_checkpoints_of_other_programs_are_named(key: str, message: str, tmp_path: Path) -> None:
    write("llama", tmp_path / "hf")
    rewrite(tmp_path / "hf", {key: torch.zeros(4, 4)})
    with pytest.raises(InputError, match=message) as caught:
        te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te")
    assert "exporter" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    write("llama", tmp_path / "hf")
    state = tensors(tmp_path / "hf")
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(tmp_path / "hf", {**state, name: state[name].to(torch.float8_e4m3fn)})
    with pytest.raises(InputError, match=rf"quantised weights \({name} is float8_e4m3fn\)"):
        te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te", dtype="bfloat16")
    rewrite(tmp_path / "hf", state)
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(InputError, match="quantization_config in config"):
        te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te")


def test_a_value_that_the_dtype_cannot_hold(tmp_path: Path) -> None:
    write("llama", tmp_path / "hf")
    state = tensors(tmp_path / "hf")
    state["model.layers.1.mlp.down_proj.weight"][3, 5] = 1e6
    rewrite(tmp_path / "hf", state)
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.down_proj\.weight has values too large for float16"):
        te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te", dtype="float16", verify=False)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_expert_of_another_shape_and_the_same_size(tmp_path: Path) -> None:
    write("mixtral", tmp_path / "hf")
    state = tensors(tmp_path / "hf")
    changed = {name: value.t() if ".experts.1.w2" in name else value for name, value in state.items()}
    rewrite(tmp_path / "hf", changed)
    with pytest.raises(InputError, match=r"is computed from .*experts\.0\.w2.* different shapes"):
        te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te")


def test_a_weight_that_transformers_divides(tmp_path: Path) -> None:
    """NomicBert's files have one tensor for query, key and value; the model has three."""
    from transformers import NomicBertConfig, NomicBertModel

    torch.manual_seed(4)
    config = NomicBertConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    original: Any = NomicBertModel(config).eval()
    original.save_pretrained(tmp_path / "hf")
    names = tensors(tmp_path / "hf")
    assert any("Wqkv" in name for name in names)
    assert not any("q_proj" in name for name in names)
    result = te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te")
    assert result.report.parity.status == "slice"
    expected = original(tokens()).last_hidden_state.detach()
    found = te_convert.load(tmp_path / "te")(tokens()).last_hidden_state.detach()
    assert float((found - expected).abs().max() / expected.abs().max()) < 2e-6
    te_convert.export(tmp_path / "te", tmp_path / "back")
    back = tensors(tmp_path / "back")
    assert back.keys() == names.keys()
    assert all(torch.equal(back[name], names[name]) for name in names)


def test_files_that_change_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from te_convert.stream.writer import ShardWriter

    write("llama", tmp_path / "hf", shard="1GB")
    inner = ShardWriter.write

    def changing(self: ShardWriter, *args: Any) -> Any:
        os.utime(tmp_path / "hf" / "model.safetensors", (1, 1))
        return inner(self, *args)

    monkeypatch.setattr(ShardWriter, "write", changing)
    with pytest.raises(InputError, match="changed while they were read"):
        te_convert.convert_checkpoint(tmp_path / "hf", tmp_path / "te", verify=False)
    assert not (tmp_path / "te").exists()
