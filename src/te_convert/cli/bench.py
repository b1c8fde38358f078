"""``te-convert bench DIR|MODEL``: time, memory and error of a converted model against its original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from te_convert.cli.options import ModelOptions, json_option, measured_options, quiet_option
from te_convert.cli.output import check_writable, json_text, print_answer, print_json, say, text_style, working, write_file
from te_convert.config import BACKENDS, DTYPES

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(
    short_help="Measure a converted model against its original.",
    epilog="""\b
Exit codes:
  0   measured (with --compare: no variant is slower than accepted)
  1   measured, but nothing was converted
  2   usage or bad input, also a recorded measurement of another machine
  3   with --compare: a variant is slower than accepted, or does not run any more
  4   the environment lacks what was demanded
""",
)
@measured_options
@click.option(
    "--training/--inference", default=True, show_default=True, help="A forward and a backward in training mode, or a forward."
)
@click.option("--generate", type=click.IntRange(1), metavar="N", help="Measure generate() of N tokens instead.")
@click.option("--compile/--no-compile", "compiled", default=True, help="Measure the original under torch.compile too.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Cast the original first. Default: as it is.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: the GPU where there is one.")
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True, help="What the converted side runs on.")
@click.option("--rounds", type=click.IntRange(2), default=20, show_default=True, help="Measured rounds; the variants take turns.")
@click.option("--warmup", type=click.IntRange(1), default=3, show_default=True, help="Calls of each variant before that.")
@click.option("--out", type=_FILE, metavar="FILE", help="Also write the JSON to FILE.")
@click.option("--compare", type=_FILE, metavar="FILE", help="Compare with the JSON of an earlier run on this machine.")
@click.option(
    "--max-slowdown", type=float, default=1.1, show_default=True, metavar="RATIO", help="With --compare: time now over time then."
)
@json_option
@quiet_option
def bench(
    chosen: ModelOptions, compiled: bool, out: Path | None, generate: int | None, as_json: bool, quiet: bool, **options: Any
) -> int:
    """Measure the original, the original under torch.compile, and the conversion in high precision and in each recipe.

    DIR was written by te-convert; MODEL is what convert takes. On a CPU the reference twins are measured, which says nothing
    about a GPU.
    """
    from te_convert.bench.run import bench as measure
    from te_convert.bench.text import headline, render_bench

    if out is not None:
        check_writable(out)
    with working(quiet) as progress:
        result = measure(
            chosen.model,
            chosen.example_inputs(),
            weights=chosen.weights,
            include=chosen.include,
            exclude=chosen.exclude,
            allow=chosen.allow,
            recipes=chosen.recipe or None,
            generate=generate or 0,
            compiler="inductor" if compiled else None,
            progress=progress,
            **options,
        )
    if out is not None:
        write_file(out, json_text(result.to_dict()) + "\n")
        say(f"wrote {out}", quiet)
    if as_json:
        print_json(result.to_dict())
    elif quiet:
        print_answer("\n".join(filter(None, (result.caveat, headline(result)))))
    else:
        print_answer(render_bench(result, **text_style()))
    return result.exit_code
