"""Step time, tokens per second and peak memory of a converted decoder, against what it is measured by.

    python benchmarks/gpu.py --out gpu.json             # one GPU with Transformer Engine; benchmarks/gpu.sh prepares it
    python benchmarks/gpu.py --out gpu.json --dry       # any machine: twins, tiny sizes, figures that mean nothing

Rows: the original, the original under torch.compile, the converted model, and a model of the same shape written by hand on
te.TransformerLayer; the last two also under every recipe that the GPU has.  bfloat16.  Parity of the conversion comes first.  A row
that fails says why, and one for which no time is left says that.  One JSON file.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import te_convert
from te_convert import reference
from te_convert.reference.emulation import emulate
from te_convert.runtime.probe import describe_environment
from te_convert.runtime.recipes import CONDITIONS, why_not_here
from te_convert.verify.compare import compare

sys.path.insert(0, str(Path(__file__).parent))
from gpu_models import TINY, Decoder, HandWritten, Shape

SCHEMA = 1
Context = Callable[[], AbstractContextManager[Any]]


class Bench:
    """One shape on one device, until the time is up."""

    def __init__(self, dry: bool, budget_s: float) -> None:
        self.dry, self.start, self.budget_s = dry, time.monotonic(), budget_s
        self.device, self.shape = ("cpu", TINY) if dry else ("cuda", Shape())
        self.backend, self.warmup, self.rounds = ("reference", 1, 2) if dry else ("te", 4, 12)
        random = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, self.shape.vocab, (self.shape.batch, self.shape.length), generator=random).to(self.device)

    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.start)

    def original(self) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(self.device):
            model = Decoder(self.shape).to(torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.rand_like(parameter))
        return model

    def converted(self, recipe: str | None) -> nn.Module:
        """Without verification, which the parity section did."""
        options: dict[str, Any] = {"recipe": recipe, "backend": self.backend, "inplace": True, "verify": False}
        return te_convert.convert(self.original(), (self.ids[:1, :64],), **options).model

    def hand_written(self) -> nn.Module:
        te = reference if self.dry else importlib.import_module("transformer_engine.pytorch")
        return HandWritten(te, self.shape, torch.bfloat16, self.device)

    def recipes(self) -> dict[str, str]:
        """Recipe → why this GPU does not have it, or ""."""
        return {name: why_not_here(name) for name in CONDITIONS}

    def rows(self) -> Iterator[tuple[str, str | None, Callable[[], nn.Module], Context | None]]:
        """Name, recipe, how to make the model, and what to enter for each forward (None: what the model's plan says)."""
        yield "original", None, self.original, nullcontext
        yield "converted", None, lambda: self.converted(None), None
        yield "te.TransformerLayer by hand", None, self.hand_written, nullcontext
        for recipe in (name for name, lacking in self.recipes().items() if not lacking):
            yield "converted", recipe, lambda r=recipe: self.converted(r), None
            yield "te.TransformerLayer by hand", recipe, self.hand_written, lambda r=recipe: self.in_recipe(r)
        yield "original, torch.compile", None, self.compiled, nullcontext

    def compiled(self) -> nn.Module:
        compiled: Any = torch.compile(self.original(), backend="eager" if self.dry else "inductor")
        return compiled

    def in_recipe(self, recipe: str) -> AbstractContextManager[Any]:
        if self.dry:
            return emulate(recipe)
        from te_convert.replacements.recipes import recipe_autocast

        return recipe_autocast(recipe)

    def parity(self) -> dict[str, Any]:
        """The report's figures, and the noise of each recipe in the logits."""
        result = te_convert.convert(self.original(), (self.ids[:2, :128],), backend=self.backend)
        report = result.report
        original, logits = self.original().eval(), {}
        with torch.no_grad():
            expected = original(self.ids[:1, :256])
            for recipe in (None, *(name for name, lacking in self.recipes().items() if not lacking)):
                model = self.converted(recipe).eval()
                with self.in_recipe(recipe) if self.dry and recipe else te_convert.autocast(model):
                    logits[recipe or "bf16"] = round(compare(expected.float(), model(self.ids[:1, :256]).float()).sqnr_db, 2)
        replaced = [site.replacement for site in report.sites if site.replacement]
        return {
            "status": report.parity.status,
            "backend": report.parity.backend,
            "scenarios": [scenario.name for scenario in report.parity.scenarios],
            "reverted": [site.fqn for site in report.parity.reverted],
            "sites": {name: replaced.count(name) for name in sorted(set(replaced))},
            "logits_sqnr_db": logits,
        }

    def measure(self, model: nn.Module, enter: Context) -> dict[str, float]:
        """Medians of a training step (forward, backward) and of a forward alone."""

        def step() -> None:
            model.zero_grad(set_to_none=True)
            with enter():
                loss = model(self.ids).float().logsumexp(-1).mean()
            loss.backward()

        def forward() -> None:
            with torch.no_grad(), enter():
                model(self.ids)

        if not self.dry:
            torch.cuda.reset_peak_memory_stats()
        step_ms = self.timed(step)
        peak = 0 if self.dry else torch.cuda.max_memory_allocated()
        tokens = self.ids.numel()
        return {
            "step_ms": round(step_ms, 3),
            "forward_ms": round(self.timed(forward), 3),
            "tokens_per_s": round(tokens / step_ms * 1e3, 1),
            "peak_bytes": peak,
        }

    def timed(self, call: Callable[[], None]) -> float:
        """ms, the median of rounds."""
        for _ in range(self.warmup):
            call()
        taken = []
        for _ in range(self.rounds):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            taken.append((time.perf_counter() - start) * 1e3)
        return statistics.median(taken)

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def run(self) -> dict[str, Any]:
        results: list[dict[str, Any]] = []
        answer: dict[str, Any] = {
            "schema": SCHEMA,
            "dry": self.dry,
            "environment": describe_environment(),
            "shape": asdict(self.shape),
            "recipes": self.recipes(),
            "parity": self.guarded(self.parity),
            "results": results,
        }
        for name, recipe, make, enter in self.rows():
            row: dict[str, Any] = {"model": name, "recipe": recipe}
            if self.left_s() < 20:
                results.append({**row, "skipped": "no time left"})
                continue
            results.append({**row, **self.guarded(lambda make=make, enter=enter, recipe=recipe: self.one(make, enter, recipe))})
            print(f"gpu: {results[-1]}", file=sys.stderr, flush=True)
            gc.collect()
            if not self.dry:
                torch.cuda.empty_cache()
        answer["seconds"] = round(time.monotonic() - self.start, 1)
        return answer

    def one(self, make: Callable[[], nn.Module], enter: Context | None, recipe: str | None) -> dict[str, float]:
        model = make().train()
        if enter is None:
            in_plan: Context = lambda: self.in_recipe(recipe) if self.dry and recipe else te_convert.autocast(model)  # noqa: E731
            enter = in_plan
        return self.measure(model, enter)

    @staticmethod
    def guarded(call: Callable[[], Any]) -> Any:
        """A row or section that fails says why, and the others go on."""
        try:
            return call()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def failed(answer: dict[str, Any]) -> list[str]:
    """What makes the run a failure."""
    wrong = [f"{row['model']} ({row['recipe'] or 'bf16'}): {row['error']}" for row in answer["results"] if "error" in row]
    parity = answer["parity"]
    if parity.get("status") != "passed":
        wrong.insert(0, f"parity: {parity.get('error') or parity['status']}")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--dry", action="store_true", help="on this machine, with twins")
    parser.add_argument("--budget", type=float, default=300.0, metavar="SECONDS", help="rows that would come later are skipped")
    options = parser.parse_args(arguments)
    answer = Bench(options.dry, options.budget).run()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    for line in failed(answer):
        print(f"gpu: {line}", file=sys.stderr)
    print(f"gpu: {options.out}, {answer['seconds']} s", file=sys.stderr)
    return 1 if failed(answer) else 0


if __name__ == "__main__":
    sys.exit(main())
