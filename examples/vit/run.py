"""Convert a timm ViT and compare the five best classes of an image before and after."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import te_convert

MODEL = Path(__file__).parent / "model.py"
TOP = 5


@torch.no_grad()
def best(model: nn.Module, image: torch.Tensor) -> tuple[list[int], list[float]]:
    """The five best classes with their probabilities."""
    chosen = model(image).softmax(-1)[0].topk(TOP)
    return chosen.indices.tolist(), chosen.values.tolist()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/vit_te"), help="directory to write (default: %(default)s)")
    out: Path = parser.parse_args(argv).out

    opened = te_convert.open_model(str(MODEL))
    inputs: Any = opened.example_inputs
    result = te_convert.convert(opened.model, inputs)
    print(result.report)

    written = result.save(out, source=opened.source, force=True)
    answers = {"original": opened.model, "converted": result.model, "loaded": te_convert.load(written)}
    classes, before = best(opened.model, *inputs)
    print("Five best classes (weights are random, so the numbers have no meaning; what counts is that they agree)")
    agree = True
    for name, model in answers.items():
        found, values = best(model, *inputs)
        agree = agree and found == classes and max(abs(a - b) for a, b in zip(values, before, strict=True)) < 1e-6
        print(f"  {name:<10}", "  ".join(f"{index:>4} {value:.5f}" for index, value in zip(found, values, strict=True)))

    qkv = result.report.site("blocks.0.attn.qkv")
    print(f"\nblocks.0.attn.qkv: {qkv.outcome}, {qkv.replacement}, parameters {qkv.params}")
    print(f"written: {written}")
    print("\nThe five best classes are the same." if agree else "\nFAILED: the classes or their probabilities differ")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
