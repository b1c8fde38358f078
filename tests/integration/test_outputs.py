"""What a converted language model returns besides logits, and how it behaves under torch.compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import te_convert
from te_convert.rewrite.fused import fused_record
from tests.integration.language_models import DECODERS, build, converted, ids


def fallbacks(model: Any) -> int:
    return sum(record.fallbacks for module in model.modules() if (record := fused_record(module)) is not None)


@pytest.mark.parametrize("name", DECODERS)
def test_hidden_states_are_plain_tensors_with_the_originals_values(name: str) -> None:
    model = build(name)
    twin = converted(model)
    with torch.no_grad():
        one, other = (each(ids(), output_hidden_states=True).hidden_states for each in (model, twin))
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert type(b) is torch.Tensor
        assert (a - b).abs().max() <= 2e-5 * a.abs().max()


def test_attention_weights_come_from_the_original_and_are_counted() -> None:
    model = build("llama", attn_implementation="eager")
    twin = converted(model)
    before = fallbacks(twin)
    with torch.no_grad():
        one, other = (each(ids(), output_attentions=True).attentions for each in (model, twin))
    for a, b in zip(one, other, strict=True):
        assert (a - b).abs().max() <= 1e-5
    assert fallbacks(twin) > before


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.report("NVIDIA/TransformerEngine#705", "NVIDIA/TransformerEngine#1241", "NVIDIA/TransformerEngine#2590")
def test_compiled_is_correct(backend: str) -> None:
    model = build("llama")
    twin = converted(model)
    with torch.no_grad():
        expected = model(ids()).logits
        compiled: Any = torch.compile(twin, backend=backend)
        found = compiled(ids()).logits
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_save_pretrained_writes_the_original(tmp_path: Path) -> None:
    model = build("llama")
    twin = converted(model)
    twin.save_pretrained(tmp_path / "model")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = model.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_hooks_on_fused_members_still_run() -> None:
    model = build("llama")
    twin = converted(model)
    seen: list[torch.Tensor] = []
    layer = twin.model.layers[0]
    layer.self_attn.k_proj.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    layer.mlp.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    expected: list[torch.Tensor] = []
    original = model.model.layers[0]
    original.self_attn.k_proj.register_forward_hook(lambda module, args, output: expected.append(output.detach().clone()))
    original.mlp.register_forward_hook(lambda module, args, output: expected.append(output.detach().clone()))
    with torch.no_grad():
        twin(ids())
        model(ids())
    assert len(seen) == len(expected) == 2
    for a, b in zip(expected, seen, strict=True):
        assert (a - b).abs().max() <= 2e-5 * a.abs().max()


def test_an_embedding_tied_to_the_head_stays_tied() -> None:
    model = build("llama", tie_word_embeddings=True)
    twin = converted(model)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    reverted: Any = te_convert.revert(twin)
    assert reverted.lm_head.weight is reverted.model.embed_tokens.weight
