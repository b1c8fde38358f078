"""Train a hand-written GPT, convert it, keep training it beside the original, put it back, and load it from its directory."""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import te_convert

MODEL = Path(__file__).parent / "model.py"
CONTEXT, BATCH, STEPS_BEFORE, STEPS_AFTER = 64, 8, 60, 5
MAX_LOSS_GAP = 1e-5

# The opening of "Alice's Adventures in Wonderland" (Lewis Carroll, 1865; in the public domain).
TEXT = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice she had
peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is the use of a book,"
thought Alice "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the
pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit
with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit say to itself,
"Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it occurred to her that she ought to have wondered at
this, but at the time it all seemed quite natural); but when the Rabbit actually took a watch out of its waistcoat-pocket, and
looked at it, and then hurried on, Alice started to her feet, for it flashed across her mind that she had never before seen a
rabbit with either a waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran across the field after
it, and fortunately was just in time to see it pop down a large rabbit-hole under the hedge.
"""


def draw_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of the text, and the same windows one character later."""
    data = torch.tensor(list(TEXT.encode("ascii")))
    starts = torch.randint(0, len(data) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
    windows = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def train(model: nn.Module, steps: int, seed: int) -> list[float]:
    """AdamW on the batches that the seed draws; the loss of each step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    losses = []
    for _ in range(steps):
        loss = loss_of(model, *draw_batch(generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def curve(losses: list[float]) -> str:
    return " ".join(f"{loss:.6f}" for loss in losses)


def gap(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    ids, _ = draw_batch(torch.Generator().manual_seed(3))
    out: torch.Tensor = model.eval()(ids)
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/gpt_te"), help="directory to write (default: %(default)s)")
    out: Path = parser.parse_args(argv).out

    opened = te_convert.open_model(str(MODEL))
    original = opened.model
    first = train(original, STEPS_BEFORE, seed=1)
    print(f"1. Trained {STEPS_BEFORE} steps: loss {first[0]:.3f} → {first[-1]:.3f}\n")

    result = te_convert.convert(original, opened.example_inputs)
    print("2. Converted\n")
    print(result.report)
    written = result.save(out, source=opened.source, force=True)  # before training goes on, so that it holds this state
    ids, targets = draw_batch(torch.Generator().manual_seed(2))
    with torch.no_grad():
        before, after = loss_of(original, ids, targets).item(), loss_of(result.model, ids, targets).item()
    print(f"loss of the original {before:.6f}, of the converted model {after:.6f}\n")

    loaded = te_convert.load(written)
    same_loaded = torch.equal(logits(result.model), logits(loaded))
    print(f"3. Loaded from {written}: logits equal to the converted model's: {same_loaded}\n")

    reverted = te_convert.revert(copy.deepcopy(result.model))
    same_reverted = torch.equal(logits(original), logits(reverted)) and list(reverted.state_dict()) == list(original.state_dict())
    tied = reverted.get_parameter("head.weight") is reverted.get_parameter("tokens.weight")
    print(f"4. Put back: logits and state dict keys equal to the original's: {same_reverted}; still tied: {tied}\n")

    one, other = train(original, STEPS_AFTER, seed=4), train(result.model, STEPS_AFTER, seed=4)
    print(f"5. Trained {STEPS_AFTER} steps more, on the same batches")
    print(f"   original   {curve(one)}")
    print(f"   converted  {curve(other)}")
    print(f"   largest difference {gap(one, other):.1e}\n")

    if abs(before - after) > MAX_LOSS_GAP or gap(one, other) > MAX_LOSS_GAP or not (same_loaded and same_reverted and tied):
        print("FAILED: the converted model is not the original")
        return 1
    print("The converted model is the original, also in training, after loading, and put back.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
