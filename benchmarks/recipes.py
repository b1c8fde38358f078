"""What each low-precision recipe costs in accuracy, emulated on the CPU: a language model with real weights, and a training run.

    python benchmarks/recipes.py                    # all of it: about 10 minutes on one core
    python benchmarks/recipes.py --skip smollm2     # the training runs alone: about 2 minutes
    python benchmarks/recipes.py --skip gpt --recipes mxfp8 --min-sqnr 25

SmolLM2-135M (examples/smollm2): perplexity in windows of 256 tokens of two texts (a novel's opening; Python's language reference,
from the standard library), SQNR of the logits, which sites convert(recipe=..., min_sqnr=...) would keep in high precision for the
first window, and the perplexity then.  GPT (examples/gpt): the loss over 200 AdamW steps from one start and on the same batches;
"bf16" is torch.autocast, and the recipes run inside it, as on a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_convert
from te_convert.capture.scenario import normalize_inputs
from te_convert.reference.emulation import Emulation, emulate
from te_convert.rewrite.apply import Applied
from te_convert.rewrite.precision import in_high_precision
from te_convert.rewrite.state import converted_modules
from te_convert.verify.model import Figures
from te_convert.verify.recipes import measure_recipe
from te_convert.verify.reference import Expected, Reference
from te_convert.verify.run import Setting, in_eval, run

ROOT = Path(__file__).parent.parent
RECIPES = ("fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4")
WINDOW, TOGETHER = 256, 8
STEPS, BATCH, LEARNING_RATE = 200, 8, 1e-3


def load(path: str) -> Any:
    """A program of examples/ as a module."""
    file = ROOT / "examples" / path
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- SmolLM2 -------------------------------------------------------------------------------------------------------------------


def windows(tokenizer: Any, limit: int) -> list[Tensor]:
    """Batches of token ids: the novel's opening is short, so Python's reference fills the rest."""
    found, left = [], limit
    for text in (load("gpt/run.py").TEXT, "\n".join(topics[name] for name in sorted(topics))[: 10 * limit * WINDOW]):
        ids = torch.tensor(tokenizer(text)["input_ids"])
        found.append(ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)[:left])
        left -= len(found[-1])
    return list(torch.cat(found).split(TOGETHER))


@torch.no_grad()
def perplexity(model: nn.Module, data: list[Tensor], context: Callable[[], AbstractContextManager[Any]]) -> tuple[float, Tensor]:
    """exp of the mean loss of each next token, and the logits of the first batch."""
    losses, first = [], None
    for ids in data:
        with context():
            logits = model(input_ids=ids).logits.float()
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"))
        first = logits if first is None else first
    assert first is not None
    return math.exp(float(torch.cat(losses).mean())), first


def sqnr(exact: Tensor, other: Tensor) -> float:
    return float(10 * torch.log10(exact.square().sum() / (exact - other).square().sum()))


def calibrated(recipe: str, model: nn.Module, ids: Tensor) -> Emulation:
    """Delayed scaling with the scales that one batch gives, as after training; the others need none."""
    emulation = Emulation(recipe)
    emulation.calibrating = True
    with torch.no_grad(), emulate(emulation):
        model(input_ids=ids)
    emulation.calibrating = False
    return emulation


def smollm2(recipes: tuple[str, ...], limit: int, min_sqnr: float | None) -> None:
    data = windows(load("smollm2/run.py").load_tokenizer(), limit)
    original = load("smollm2/model.py").build_model()
    exact, logits = perplexity(original, data, nullcontext)
    print(f"\nSmolLM2-135M, {sum(map(len, data))} windows of {WINDOW} tokens, float32: perplexity {exact:.3f}\n")
    scenario = normalize_inputs({"input_ids": data[0][:1]})[0]
    expected = Expected(in_eval(scenario), Setting(), run(original, in_eval(scenario), Setting()))
    reference = Reference([expected], Figures(math.inf, 0.0, bit_equal=True, numel=0))
    result = te_convert.convert(original, scenario.kwargs, verify=False, inplace=True)
    applied = Applied(result.model, "reference", dict(converted_modules(result.model)))
    row(
        "recipe",
        "perplexity",
        "change",
        "logits dB",
        "sites dB",
        "model dB",
        "kept high",
        "of FLOPs",
        "perplexity then",
        "proposal s",
    )
    for recipe in recipes:
        everything, moved = perplexity_of(result.model, data, recipe)
        start = time.perf_counter()
        figures = measure_recipe(applied, reference, replace(result.plan, recipe=recipe), min_sqnr)
        seconds = time.perf_counter() - start
        assert figures is not None
        with in_high_precision(applied, [site.fqn for site in figures.high]):
            kept = perplexity_of(result.model, data, recipe)[0] if figures.high else everything
        flops = sum(site.flops for site in figures.high) / sum(site.flops for site in figures.sites)
        row(
            recipe,
            f"{everything:.3f}",
            f"{100 * (everything / exact - 1):+.2f} %",
            f"{sqnr(logits, moved):.1f}",
            f"{figures.sites[0].sqnr_db:.1f}..{figures.sites[-1].sqnr_db:.1f}",
            f"{figures.scenarios[0].sqnr_db:.1f} → {figures.scenarios[0].proposed_sqnr_db:.1f}",
            f"{len(figures.high)} of {len(figures.sites)}",
            f"{100 * flops:.0f} %",
            f"{kept:.3f}",
            f"{seconds:.0f}",
        )


def perplexity_of(model: nn.Module, data: list[Tensor], recipe: str) -> tuple[float, Tensor]:
    emulation = calibrated(recipe, model, data[0])
    return perplexity(model, data, lambda: emulate(emulation))


# --- a training run ------------------------------------------------------------------------------------------------------------


def batches(text: str, context: int) -> Iterator[Tensor]:
    """Random windows of characters, the same in every run."""
    codes = torch.tensor([min(ord(character), 127) for character in text])
    random = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(0, len(codes) - context - 1, (BATCH,), generator=random)
        yield torch.stack([codes[start : start + context + 1] for start in starts])


def train(model: nn.Module, text: str, context: int, precision: Callable[[], AbstractContextManager[Any]]) -> list[float]:
    """The loss before each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for ids, _ in zip(batches(text, context), range(STEPS), strict=False):
        with precision():
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@contextmanager
def in_bf16(emulation: Emulation | None = None) -> Iterator[None]:
    """torch.autocast, and a recipe inside it."""
    with torch.autocast("cpu", dtype=torch.bfloat16), nullcontext() if emulation is None else emulate(emulation):
        yield


def gpt(recipes: tuple[str, ...]) -> None:
    example, text = load("gpt/model.py"), load("gpt/run.py").TEXT
    example.build_model()

    def run_gpt(precision: Callable[[], AbstractContextManager[Any]]) -> list[float]:
        converted = te_convert.convert(example.build_model(), example.example_inputs(), verify=False, inplace=True).model
        return train(converted, text, example.CONTEXT, precision)

    bf16 = run_gpt(in_bf16)
    curves = {"float32": run_gpt(nullcontext), "bf16": bf16}
    for recipe in recipes:
        emulation = Emulation(recipe)
        curves[recipe] = run_gpt(lambda held=emulation: in_bf16(held))  # type: ignore[misc]
    print(f"\nGPT of examples/gpt, {STEPS} AdamW steps, loss before step, and the gap to bf16 (mean of the last 10; largest)\n")
    shown = (0, 25, 50, 100, 150, STEPS - 1)
    row("precision", *(str(step) for step in shown), "last 10", "gap then", "largest gap")
    for name, curve in curves.items():
        last, other = (sum(losses[-10:]) / 10 for losses in (curve, bf16))
        gap = max(abs(a - b) for a, b in zip(curve, bf16, strict=True))
        row(name, *(f"{curve[step]:.3f}" for step in shown), f"{last:.4f}", f"{100 * (last / other - 1):+.2f} %", f"{gap:.4f}")


def row(first: str, *cells: str) -> None:
    print(f"{first:<12}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--skip", choices=("smollm2", "gpt"))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--windows", type=int, default=8, help="windows of the perplexity (default 8)")
    parser.add_argument("--min-sqnr", type=float, help="least SQNR of the model in dB (default: the recipe's own bound)")
    args = parser.parse_args()
    if args.skip != "gpt":
        gpt(tuple(args.recipes))
    if args.skip != "smollm2":
        smollm2(tuple(args.recipes), args.windows, args.min_sqnr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
