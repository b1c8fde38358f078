"""Convert many architectures, built tiny from their configs, and count what happened.

    python benchmarks/zoo.py                                # every source; needs diffusers, x-transformers, litgpt, open_clip_torch
    python benchmarks/zoo.py --source transformers --only bert,llama --json zoo.json
    python benchmarks/zoo.py --shard 0/2 --json zoo-0.json & python benchmarks/zoo.py --shard 1/2 --json zoo-1.json; wait
    python benchmarks/zoo_report.py zoo-*.json              # docs/coverage.md

One JSON line per model: sites, outcomes, parity, gradients, seconds; then the totals of the README.  No weights are downloaded.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn
from zoo_models import DIFFUSERS, HAND, TIMM, build_diffusers, build_hand, build_timm
from zoo_more import MORE, build_more
from zoo_transformers import architectures, build

import te_convert

Row = dict[str, Any]
_NOT_FUSED = {"fusion.calls-differ", "fusion.crosses-block", "fusion.tied"}


SOURCES: dict[str, Callable[[], Sequence[str]]] = {
    "transformers": architectures,
    "timm": lambda: TIMM,
    "diffusers": lambda: DIFFUSERS,
    "hand": lambda: HAND,
    **{source: partial(tuple, names) for source, (names, _) in MORE.items()},
}
"""For each source the names of its models."""


def build_one(source: str, name: str) -> tuple[nn.Module, Any]:
    """A model and the inputs for it, or None for a Transformers model, whose inputs are derived."""
    if source in MORE:
        return build_more(source, name)
    if source == "transformers":
        return build(name), None
    return {"timm": build_timm, "diffusers": build_diffusers, "hand": build_hand}[source](name)


def convert_one(source: str, name: str, limit_params: int) -> Row:
    """Build, convert, compare gradients, count."""
    head = {"source": source, "name": name}
    try:
        model, inputs = build_one(source, name)
        size = sum(p.numel() for p in model.parameters())
        if size > limit_params:
            return {**head, "status": "too-large", "params": size}
    except Exception as error:
        return {**head, "status": "not-built", "error": f"{type(error).__name__}: {error}"[:200]}
    perturb(model)
    start = time.perf_counter()
    try:
        result = te_convert.convert(model, inputs)
    except Exception as error:
        return {**head, "status": "CRASH", "error": f"{error!r}"[:300], "traceback": traceback.format_exc()[-1500:]}
    seconds, report = time.perf_counter() - start, result.report
    return {
        **head,
        "status": "ok" if report.scenarios else "no-run",
        "seconds": round(seconds, 2),
        "parity": report.parity.status,
        "min_sqnr": min((s.figures.sqnr_db for s in report.parity.scenarios), default=None),
        "gradients": compare_gradients(model, result.model, inputs) if report.parity.passed else None,
        **count(report),
        "fusions": Counter(f.spec.name for f in result.plan.fusions),
        "outcomes": Counter(str(d.outcome) for d in result.plan),
        "reasons": Counter(r.code for d in result.plan for r in d.reasons),
        "idle": [fqn for fqn, calls in report.parity.executed.items() if not calls],
        "fallbacks": sum(report.parity.fallbacks.values()),
        "reverted": [site.to_dict() for site in report.parity.reverted],
        "notes": list(report.notes),
    }


def perturb(model: nn.Module) -> None:
    """Move norms and biases from their defaults."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)


def count(report: Any) -> Row:
    """[converted, eligible] of Linears, norms that feed Linears alone, and attention calls; attention that is written out.

    Attention counts as converted only where TE ran at least once in verification, alone or as part of what it is fused into.
    """
    linears = [s for s in report.sites if s.kind in ("Linear", "Conv1D") and s.calls]
    norms = [s for s in report.sites if s.kind in ("LayerNorm", "RMSNorm") and s.calls and str(s.outcome) != "REFUSED"]
    fusable = [s for s in norms if str(s.outcome) == "FUSED" or _NOT_FUSED & {r.code for r in s.reasons}]
    attention = [s for s in report.sites if s.calls and (s.kind == "Attention" or s.class_name == "MultiheadAttention")]
    eager = [s for s in attention if "attention.eager-region" in {r.code for r in s.reasons}]
    attention = [s for s in attention if s not in eager]
    done = ("CONVERTED", "FUSED")
    ran = report.parity.executed
    routed = [s for s in attention if str(s.outcome) in done and s.executed != 0 and ran.get(s.fused_into, 1)]
    return {
        "linears": [sum(str(s.outcome) in done for s in linears), len(linears)],
        "norms": [sum(str(s.outcome) == "FUSED" for s in fusable), len(fusable)],
        "attention": [len(routed), len(attention)],
        "eager": len(eager),
    }


def compare_gradients(model: nn.Module, converted: nn.Module, inputs: Any) -> float | str:
    """Largest gradient difference over the largest gradient of its parameter (floor: 1e-3 of the largest of all)."""
    scenario = inputs
    if scenario is None:
        from te_convert.capture.inputs import derive_scenario

        derived = derive_scenario(model)
        assert derived is not None  # the conversion ran on it
        scenario = (derived.args, derived.kwargs)
    args, kwargs = scenario if len(scenario) == 2 and isinstance(scenario[1], dict) else (scenario, {})
    found = []
    try:
        for each in (model, converted):
            torch.manual_seed(0)
            output = each(*args, **kwargs)
            tensors = [t for t in tensors_of(output) if t.requires_grad and t.is_floating_point()]
            loss_of(tensors).backward()
            original = te_convert.revert(each)
            named = [(n, p) for n, p in original.named_parameters() if p.numel()]
            found.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named})
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:160]
    one, other = found
    floor = 1e-3 * max((float(g.abs().max()) for g in one.values()), default=0.0)
    return max((float((g - other[n]).abs().max()) / max(float(g.abs().max()), floor, 1e-30) for n, g in one.items()), default=0.0)


def loss_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A weighted mean with seeded weights (a mean of squares is constant for models that end in a normalisation)."""
    generator = torch.Generator().manual_seed(2)
    terms = [(t.float() * torch.randn(t.shape, generator=generator)).mean() for t in tensors]
    return torch.stack(terms).sum()


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Every tensor of nested outputs."""
    from te_convert.capture.tensors import iter_tensors

    return [tensor for _, tensor in iter_tensors(output)]


def models(source: str, only: list[str], shard: str) -> Iterator[tuple[str, str]]:
    """(source, name) of the models asked for."""
    index, total = map(int, shard.split("/"))
    for each in SOURCES if source == "all" else (source,):
        yield from ((each, name) for name in only or list(SOURCES[each]())[index::total])


def totals(rows: list[Row]) -> Row:
    """The figures of the README."""
    ran = [row for row in rows if row["status"] == "ok"]
    sums = {key: [sum(row[key][i] for row in ran) for i in (0, 1)] for key in ("linears", "norms", "attention")}
    numbers = [row["gradients"] for row in ran if isinstance(row["gradients"], float)]
    return {
        "models": len(rows),
        "status": dict(Counter(row["status"] for row in rows)),
        "parity": dict(Counter(row["parity"] for row in ran)),
        **{key: f"{a} of {b} ({a / max(b, 1):.1%})" for key, (a, b) in sums.items()},
        "fusions": dict(sum((Counter(row["fusions"]) for row in ran), Counter())),
        "reverted": sum(len(row["reverted"]) for row in ran),
        "sqnr below 90": [row["name"] for row in ran if row["min_sqnr"] is not None and row["min_sqnr"] < 90],
        "gradients": {
            "compared": len(numbers),
            "within 1e-4": sum(g <= 1e-4 for g in numbers),
            "worst": max(numbers, default=None),
        },
        "gradients not compared": {r["name"]: r["gradients"] for r in ran if isinstance(r["gradients"], str)},
        "reasons": dict(sum((Counter(row["reasons"]) for row in ran), Counter()).most_common()),
    }


def main() -> None:
    """Run, print, sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", default="all", choices=["all", *SOURCES])
    parser.add_argument("--only", default="", help="comma-separated names")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th model, starting with the i-th")
    parser.add_argument("--limit-params", type=int, default=130_000_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for source, name in models(args.source, [n for n in args.only.split(",") if n], args.shard):
        rows.append(convert_one(source, name, args.limit_params))
        print(json.dumps(rows[-1], default=str), flush=True)
        gc.collect()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1, default=str))
    print(json.dumps(totals(rows), indent=1, default=str))


if __name__ == "__main__":
    main()
