"""What a conversion costs, as ratios measured in one run.

    python benchmarks/convert.py                 # a 1.2-billion-parameter Llama-shaped model in bfloat16 (about 6 GB of memory)
    python benchmarks/convert.py --layers 2 --hidden 256 --vocab 1000

Printed: conversion time without verification as a multiple of one forward plus one clone of the state dict, where time goes, and
the peak extra memory of an in-place conversion as a share of the model.  Seconds are this machine's; the ratios are the result.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import te_convert


def build(args: argparse.Namespace) -> torch.nn.Module:
    """A Llama with random weights, built in its final dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(args.hidden // 256, 1),
        vocab_size=args.vocab,
        tie_word_embeddings=True,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, args.dtype))
    try:
        model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)
    return model


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    result = work()
    elapsed = time.perf_counter() - start
    del result
    gc.collect()
    return elapsed


def peak_share(args: argparse.Namespace, what: str) -> float:
    """Peak resident memory above the built model, as a share of its weights, in a fresh process (no freed memory to re-use)."""
    options = [f"--{name}={getattr(args, name)}" for name in ("hidden", "layers", "vocab", "tokens", "dtype")]
    command = [sys.executable, __file__, *options, f"--peak={what}"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure_peak(args: argparse.Namespace) -> float:
    """Inside the fresh process; Linux only: the kernel's high-water mark is reset after the model is built."""
    model = build(args)
    inputs = example_inputs(args)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    if args.peak == "forward":
        with torch.no_grad():
            model(**inputs)
    else:
        te_convert.convert(model, inputs, verify=False, inplace=True)
    return (_status("VmHWM") - before) / size


def example_inputs(args: argparse.Namespace) -> dict[str, Any]:
    """One row of random tokens, without a cache."""
    ids = torch.randint(0, args.vocab, (1, args.tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "use_cache": False}


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything in one process, on one model."""
    model = build(args)
    inputs = example_inputs(args)

    def forward() -> Any:
        with torch.no_grad():
            return model(**inputs)

    def clone() -> Any:
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    forward()
    forwards = [seconds(forward) for _ in range(args.repeats)]
    clones = [seconds(clone) for _ in range(args.repeats)]
    deepcopies = [seconds(lambda: copy.deepcopy(model)) for _ in range(args.repeats)]
    converts = [seconds(lambda: te_convert.convert(model, inputs, verify=False)) for _ in range(args.repeats)]
    _, report = te_convert.convert(model, inputs, verify=False)
    gc.collect()
    base = statistics.median(forwards) + statistics.median(clones)
    figures = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": args.dtype,
        "tokens": args.tokens,
        "sites_converted": report.coverage.sites,
        "forward_s": statistics.median(forwards),
        "state_dict_clone_s": statistics.median(clones),
        "deepcopy_s": statistics.median(deepcopies),
        "convert_s": statistics.median(converts),
        "convert_spread_s": [min(converts), max(converts)],
        "convert_over_forward_plus_clone": statistics.median(converts) / base,
        "stages_s": report.timings_s,
        "inplace_peak_extra_share_of_model": peak_share(args, "convert"),
        "one_forward_peak_extra_share_of_model": peak_share(args, "forward"),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }
    if args.verified:
        verified = seconds(lambda: te_convert.convert(model, inputs, inplace=True))
        figures["verified_convert_over_forward_plus_clone"] = verified / base
    return figures


def main() -> None:
    """Parse the size, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--verified", action="store_true", help="also time one conversion with verification (dozens of forwards)")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--peak", choices=("forward", "convert"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print(measure_peak(args))
        return
    figures = measure(args)
    if args.json:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        print(f"{name:42} {value:.4g}" if isinstance(value, float) else f"{name:42} {value}")
    print()
    print(f"convert / (forward + state-dict clone): {figures['convert_over_forward_plus_clone']:.2f} (goal <= 3)")
    peak, forward = figures["inplace_peak_extra_share_of_model"], figures["one_forward_peak_extra_share_of_model"]
    print(f"peak extra memory, inplace=True:        {peak:.1%} of the model (goal <= 5 %; one plain forward takes {forward:.1%})")


if __name__ == "__main__":
    main()
