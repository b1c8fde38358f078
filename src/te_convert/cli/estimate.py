"""``te-convert estimate MODEL``: is it worth it on a given GPU?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from te_convert.cli.options import ModelOptions, estimate_options, gpu_options, json_option, quiet_option
from te_convert.cli.output import print_answer, print_json, text_style, working

if TYPE_CHECKING:
    from rich.text import Text

    from te_convert.estimate.model import Estimate, RecipeEstimate

_SITES = 12
"""Sites that the text shows for each verdict; --json has all."""


@click.command(
    short_help="Predict whether a conversion pays on a GPU.",
    epilog="""\b
Exit codes:
  0   the estimate was printed
  2   usage or bad input, or no GPU named and none here
""",
)
@estimate_options
@gpu_options
@click.option("--training/--inference", default=True, help="Forward and backward, or forward alone. Default: training.")
@json_option
@quiet_option
def estimate(chosen: ModelOptions, gpu: str | None, tokens: int | None, training: bool, as_json: bool, quiet: bool) -> int:
    """Predict time and memory of MODEL on Transformer Engine, per recipe, without a GPU and without converting.

    Nothing is measured: a roofline model with figures of datasheets and published benchmarks. --recipe takes all (the
    default) or one.
    """
    from te_convert import api

    with working(quiet):
        api.check_gpu(gpu)
        opened, example_inputs = chosen.open()
        mode = "training" if training else "inference"
        found = api.estimate(opened.model, example_inputs, gpu, tokens, mode=mode, **chosen.choices)
    if as_json:
        print_json(found.to_dict())
    elif quiet:
        print_answer(f"{found.verdict.code}: {found.verdict.text}")
    else:
        print_answer(render_estimate(found, **text_style()))
    return 0


def render_estimate(found: Estimate, width: int, color: bool) -> str:
    """The verdict, a row per recipe, and the sites of the recipe that the verdict is about."""
    from rich.table import Table
    from rich.text import Text

    from te_convert.report.format import clean
    from te_convert.report.text import render_block

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("", "step ms", "speed-up", "products", "quantise", "attention", "memory", "host", "weights", "saved"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    table.add_row("eager bf16", *_times(found.original.to_dict()), "", "")
    for each in found.recipes:
        name = "bf16 on TE" if each.recipe == "bf16" else each.recipe
        if each.unavailable:
            continue
        table.add_row(name, *_times(each.times.to_dict(), each.speedup), _gb(each.weight_bytes), _gb(each.activation_bytes))
    lacking = [Text(f"{each.recipe}: {clean(each.unavailable)}") for each in found.recipes if each.unavailable]
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in sorted(found.flop_shares.items(), key=lambda x: -x[1]))
    head = f"{found.gpu}, {found.mode}, {found.tokens} tokens in a step; FLOPs: {shares or 'none counted'}"
    verdict = Text(f"{found.verdict.code}: {clean(found.verdict.text)}", "bold green" if found.verdict.recipe else "bold yellow")
    blocks = [verdict, Text(head), "", table, *lacking, *_site_lines(found), "", *(Text(f"· {clean(n)}") for n in found.notes)]
    return render_block(blocks, width, color)


def _times(times: dict[str, float], speedup: float = 1.0) -> list[str]:
    parts = ("gemm_us", "quantise_us", "attention_us", "memory_us", "host_us")
    return [f"{times['step_us'] / 1e3:.2f}", f"{speedup:.2f}x", *(f"{times[part] / 1e3:.2f}" for part in parts)]


def _gb(size: float) -> str:
    return f"{size / 1e9:+.2f} GB" if size else ""


def _site_lines(found: Estimate) -> list[Text | str]:
    """The sites at which the best recipe loses, most time first; else nothing."""
    from rich.text import Text

    from te_convert.report.format import clean

    able: list[RecipeEstimate] = [each for each in found.recipes[1:] if not each.unavailable]
    best = max(able, key=lambda each: each.gated_speedup, default=None)
    if best is None or not best.losing:
        return []
    losing = sorted(best.losing, key=lambda site: -site.recipe.gpu_us)
    lines: list[Text | str] = ["", Text(f"{best.recipe} is predicted to be slower than bf16 at {len(losing)} sites:")]
    lines += [Text(f"  {clean(s.fqn) or '(root)'}  {s.kind}  {s.speedup:.2f}x") for s in losing[:_SITES]]
    return [*lines, Text(f"  and {len(losing) - _SITES} more")] if len(losing) > _SITES else lines
