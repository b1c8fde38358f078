"""Whole models on a GPU: converted to Transformer Engine, verified there, trained, decoded, loaded from a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_convert
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.runtime.recipes import CONDITIONS, why_not_here
from tests.gpu.needs import needs_gpu_and_te

pytestmark = [pytest.mark.gpu, needs_gpu_and_te]


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    model: Any = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter) * 0.2 - 0.1)
    return model


def ids(*shape: int) -> Tensor:
    return torch.randint(1, 512, shape, generator=torch.Generator().manual_seed(1)).to("cuda")


def backends(model: nn.Module) -> set[str]:
    return {module.__dict__[SITE_ATTRIBUTE].backend for module in model.modules() if SITE_ATTRIBUTE in module.__dict__}


def test_a_model_converts_to_te_and_passes() -> None:
    result = te_convert.convert(llama(), {"input_ids": ids(2, 64)})
    assert result.report.backend == "te"
    assert result.report.parity.passed, result.report
    assert not result.report.parity.reverted
    assert backends(result.model) == {"te"}


def test_twins_materialize_on_te_and_back() -> None:
    inputs = {"input_ids": ids(2, 64)}
    model = te_convert.convert(llama(), inputs, backend="reference").model
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        expected = model(**inputs).logits
        te_convert.materialize(model, "te")
        found = model(**inputs).logits
    assert backends(model) == {"te"}
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.01)


def test_a_directory_written_on_a_cpu_loads_on_te(tmp_path: Path) -> None:
    inputs = {"input_ids": ids(2, 64)}
    model = llama()
    on_cpu = te_convert.convert(model.cpu(), {"input_ids": inputs["input_ids"].cpu()}, backend="reference")
    on_cpu.save(tmp_path / "out")
    loaded = te_convert.load(tmp_path / "out", device="cuda")
    assert backends(loaded) == {"te"}
    assert {parameter.device.type for parameter in loaded.parameters()} == {"cuda"}
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, model.cuda()(**inputs).logits, atol=0.1, rtol=0.01)


@pytest.mark.parametrize("recipe", CONDITIONS)
@pytest.mark.report("NVIDIA/TransformerEngine#764")
def test_training_and_decoding_in_a_recipe(recipe: str) -> None:
    """The loss falls, with gradient checkpointing as well, and one token at a time runs."""
    lacking = why_not_here(recipe)
    if lacking:
        pytest.skip(lacking)
    inputs = {"input_ids": ids(2, 64), "labels": ids(2, 64)}
    model: Any = te_convert.convert(llama(), {"input_ids": inputs["input_ids"]}, recipe=recipe).model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(10):
        if step == 5:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        optimizer.zero_grad()
        with te_convert.autocast(model):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0], losses
    model.eval()
    with torch.no_grad(), te_convert.autocast(model):
        tokens = model.generate(ids(1, 5), max_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, 9)
