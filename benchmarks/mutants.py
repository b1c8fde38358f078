"""Plant mistakes into real conversions, one at a time, and count how many the parity gate catches.

    python benchmarks/mutants.py                            # every kind of mistake in every architecture and dtype, once
    python benchmarks/mutants.py --everywhere               # once in every TE module of each architecture
    python benchmarks/mutants.py --dtype float32            # in float32 models alone
    python benchmarks/mutants.py --only "scale lost,tie split" --arch llama,gpt2 --json mutants.json

A mistake that changes nothing (in float64, on fresh inputs: outputs, decoding, gradients, weights, a step on the gradients) is
equivalent and not counted.  What changes rounding alone is a mistake in bf16 and fp16 if the median error against float64 exceeds
1.25 times the original's own.  The right conversions of the same architectures, of hand-written models and of timm's must pass as
they are.  The exit code is 1 when a mistake is missed or a right conversion is not believed.

float32 takes 12 minutes on two CPU cores (docs/verification.md); the time of bf16 and fp16 has not been measured.

The catalogue is tests/verify/mutant_kinds.py, the architectures are those of tests/verify/mutant_suite.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from zoo import perturb
from zoo_models import HAND, TIMM, build_hand, build_timm

import te_convert
from tests.verify.model_zoo import cast
from tests.verify.mutant_kinds import KINDS
from tests.verify.mutant_suite import ARCHITECTURES, Outcome, false_alarms, outcomes, prepare


def main() -> None:
    """Run, print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="comma-separated kinds of mistakes (default: all)")
    parser.add_argument("--arch", default="", help="comma-separated architectures (default: all)")
    parser.add_argument(
        "--dtype",
        default="float32,bfloat16,float16",
        metavar="DTYPES",
        help="comma-separated dtypes of the models (default: all three)",
    )
    parser.add_argument("--everywhere", action="store_true", help="plant each in every TE module, not in one of each architecture")
    parser.add_argument("--no-zoo", action="store_true", help="leave out the right conversions of hand-written and timm models")
    parser.add_argument("--json", type=Path, help="write every mutant to this file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    kinds = chosen(args.only, list(KINDS))
    architectures = chosen(args.arch, list(ARCHITECTURES))
    start = time.perf_counter()
    alarms: dict[str, list[str]] = {}
    found: list[Outcome] = []
    for dtype in args.dtype.split(","):
        for name in architectures:
            subject, began = prepare(name, getattr(torch, dtype)), time.perf_counter()
            alarms[f"{name} {dtype}"] = false_alarms(subject)
            own = list(outcomes(subject, kinds, args.everywhere))
            found += own
            print(f"{name}, {dtype}: {len(own)} mutants in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        if not args.no_zoo:
            alarms |= {f"{name} {dtype}": problems for name, problems in zoo_alarms(getattr(torch, dtype))}
    print_table(kinds, found)
    print_totals(found, alarms, time.perf_counter() - start)
    if args.json:
        args.json.write_text(json.dumps({"mutants": [asdict(o) for o in found], "alarms": alarms}, indent=1))
    sys.exit(int(any(map(missed, found)) or any(alarms.values())))


def chosen(given: str, known: list[str]) -> list[str]:
    """The names asked for; a name that nobody knows ends the program."""
    names = [name.strip() for name in given.replace(", ", ",").split(",") if name.strip()]
    joined = ",".join(names)
    found = [name for name in known if name in names or name.replace(", ", ",") in joined]
    if names and not found:
        sys.exit(f"none of {', '.join(names)} is known; there are: {'; '.join(known)}")
    return found or known


def missed(outcome: Outcome) -> bool:
    return bool(outcome.change) and not outcome.caught


def zoo_alarms(dtype: torch.dtype) -> Iterator[tuple[str, list[str]]]:
    """What the gate says against right conversions of other models."""
    for names, build in ((HAND, build_hand), (TIMM, build_timm)):
        for name in names:
            model, inputs = build(name)
            perturb(model)
            model, inputs = model.to(dtype), cast(inputs, dtype)
            parity = te_convert.convert(model, inputs, backend="reference").report.parity
            problems = [f"{site.fqn}: {site.why}" for site in parity.reverted]
            yield name, problems if parity.status in ("passed", "sites-only", "not-verified") else [*problems, parity.status]


def print_table(kinds: list[str], found: list[Outcome]) -> None:
    """One line for each kind."""
    print(f"{'kind':44} {'planted':>8} {'equivalent':>11} {'caught':>7}  missed")
    for kind in kinds:
        own = [o for o in found if o.kind == kind]
        lost = [f"{o.architecture} {o.dtype} {o.fqn} ({o.module}; {o.change})" for o in own if missed(o)]
        equivalent = sum(not o.change for o in own)
        caught = sum(bool(o.change) and o.caught for o in own)
        print(f"{kind:44} {len(own):8} {equivalent:11} {caught:7}  {'; '.join(lost)}")


def print_totals(found: list[Outcome], alarms: dict[str, list[str]], seconds: float) -> None:
    real = [o for o in found if o.change]
    caught = sum(o.caught for o in real)
    for dtype in dict.fromkeys(o.dtype for o in found):
        own = [o for o in found if o.dtype == dtype]
        changed = [o for o in own if o.change]
        wrong = [name for name, problems in alarms.items() if problems and name.endswith(f" {dtype}")]
        print(
            f"\n{dtype}: {len(own)} planted, {len(own) - len(changed)} equivalent "
            f"({sum(o.caught and not o.change for o in own)} of them not believed either), "
            f"{sum(o.caught for o in changed)} of {len(changed)} caught; {len(wrong)} false alarms",
            end="",
        )
    idle = [kind for kind in KINDS if kind in {o.kind for o in found} and not any(o.kind == kind for o in real)]
    print(
        f"\n{len({o.kind for o in found})} kinds in {len({o.architecture for o in found})} architectures: {len(found)} planted, ",
        end="",
    )
    print(f"{len(found) - len(real)} equivalent, {caught} of {len(real)} caught ({caught / max(len(real), 1):.1%})")
    if idle:
        print(f"never more than equivalent: {', '.join(idle)}")
    for name, problems in alarms.items():
        if problems:
            print(f"FALSE ALARM {name}: {'; '.join(problems)}")
    print(f"false alarms: {sum(map(bool, alarms.values()))} of {len(alarms)} right conversions; {seconds:.0f} s")


if __name__ == "__main__":
    main()
