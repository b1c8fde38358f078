"""``te-convert MODEL --out DIR``: convert, verify, write a directory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from te_convert.cli.analyze import print_plan
from te_convert.cli.options import (
    ModelOptions,
    bisect_option,
    gpu_options,
    html_option,
    json_option,
    model_options,
    policy_option,
    quiet_option,
)
from te_convert.cli.output import check_writable, command_line, print_answer, print_json, say, text_style, working, write_file
from te_convert.config import BACKENDS, DTYPES
from te_convert.errors import ConversionError

if TYPE_CHECKING:
    from te_convert.api import Result, Streamed
    from te_convert.report.model import Report

EXIT_CONVERTED, EXIT_UNCHANGED, EXIT_PARITY = 0, 1, 3


@click.command(
    short_help="Convert MODEL, verify it and write DIR (the default).",
    epilog="""\b
Exit codes:
  0   converted and verified (with --no-verify: converted)
  1   written unchanged: nothing was converted, or everything was put back
  2   usage or bad input
  3   parity failed, or could not be judged; with --strict nothing is written
  4   the environment lacks what was demanded
""",
)
@model_options
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Directory to write; needed unless --dry-run.")
@click.option("--force", is_flag=True, help="Replace DIR when it exists.")
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True, help="What the result runs on.")
@click.option("--dry-run", is_flag=True, help="Print the plan and change nothing, like analyze.")
@click.option("--no-verify", is_flag=True, help="Do not compare the result with the original.")
@click.option("--strict", is_flag=True, help="Fail when a site is put back or the result is not verified.")
@click.option(
    "--min-sqnr", type=float, metavar="DB", help="Least SQNR of the model in the emulated recipe. Default: 20; nvfp4: 11."
)
@bisect_option
@policy_option
@gpu_options
@click.option(
    "--stream/--no-stream",
    default=None,
    help="Convert a Transformers directory shard by shard. Default: when its weights are large for this machine's memory.",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="With --stream: dtype of the tensors that are written.")
@click.option("--resume", is_flag=True, help="With --stream: go on from an unfinished run.")
@html_option
@json_option
@quiet_option
def convert(
    chosen: ModelOptions,
    out: Path | None,
    force: bool,
    backend: str,
    dry_run: bool,
    no_verify: bool,
    strict: bool,
    min_sqnr: float | None,
    bisect: bool,
    policy: str,
    gpu: str | None,
    tokens: int | None,
    stream: bool | None,
    dtype: str | None,
    resume: bool,
    html: Path | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Convert MODEL to Transformer Engine, verify it and write DIR.

    MODEL is file.py, file.py:name, pkg.mod:name, or a Transformers directory (config.json and safetensors). A file offers
    model or build_model() and, if it likes, example_inputs().
    """
    if dry_run:
        return print_plan(chosen, html, as_json, quiet)
    if out is None:
        raise click.UsageError("Missing option '--out'.")
    if html is not None:
        check_writable(html)
    if stream or (stream is None and (resume or dtype is not None or is_large(chosen.model))):
        chosen.refuse_for_streaming(min_sqnr, bisect, policy != "none" or gpu is not None or tokens is not None)
        return stream_model(
            chosen,
            out,
            {"dtype": dtype, "resume": resume, "force": force, "backend": backend, "verify": not no_verify, "strict": strict},
            html,
            as_json,
            quiet,
        )
    if resume or dtype is not None:
        raise click.UsageError("--resume and --dtype need --stream.")
    from te_convert import api

    with working(quiet) as progress:
        api.check_out(out, force)
        opened, example_inputs = chosen.open()
        try:
            result = api.convert(
                opened.model,
                example_inputs,
                backend=backend,
                inplace=True,
                verify=not no_verify,
                strict=strict,
                min_sqnr=min_sqnr,
                bisect=bisect,
                policy=policy,
                gpu=gpu,
                tokens=tokens,
                progress=progress,
                fuse=True,
                **chosen.choices,
            )
        except ConversionError as error:
            if error.report is not None:
                _print_report(_with_command(error.report), html, as_json, quiet)
            raise
        result = replace(result, report=_with_command(result.report))
        written = api.save(result, out, source=opened.source, force=force)
    _print_report(result.report, html, as_json, quiet)
    _say_where(written, result.converted, quiet)
    return exit_code(result, verified=not no_verify)


def is_large(model: str) -> bool:
    """Whether a Transformers directory holds weights of more than 40 % of this machine's memory: converting takes twice theirs."""
    folder = Path(model)
    if not (folder / "config.json").is_file():
        return False
    files = [file for pattern in ("*.safetensors", "pytorch_model*.bin") for file in folder.glob(pattern)]
    weights = sum(file.stat().st_size for file in files if file.is_file())  # a download that was cut short leaves dead links
    return weights > 0.4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def stream_model(chosen: ModelOptions, out: Path, options: dict[str, Any], html: Path | None, as_json: bool, quiet: bool) -> int:
    """Convert a directory shard by shard and print the report."""
    from te_convert import api

    with working(quiet) as progress:
        result = api.convert_checkpoint(chosen.model, out, progress=progress, **options, **chosen.choices)
    _print_report(_with_command(result.report), html, as_json, quiet)
    _say_where(result.path, result.converted, quiet)
    return exit_code(result, verified=bool(options["verify"]))


def exit_code(result: Result | Streamed, verified: bool) -> int:
    """The exit code of a conversion that raised nothing; ``verified`` says whether verification was asked for."""
    if not result.converted:
        return EXIT_UNCHANGED
    unproven = ("failed", "not-verified") if verified else ("failed",)
    return EXIT_PARITY if result.report.parity.status in unproven else EXIT_CONVERTED


def _with_command(report: Report) -> Report:
    return replace(report, command=command_line())


def _print_report(report: Report, html: Path | None, as_json: bool, quiet: bool) -> None:
    from te_convert.report.text import render_headline, render_text

    if html is not None:
        write_file(html, report.to_html())
        say(f"wrote {html}", quiet)
    if as_json:
        print_json(report.to_dict())
    elif quiet:
        print_answer(render_headline(report))
    else:
        print_answer(render_text(report, **text_style()))


def _say_where(written: Path, converted: bool, quiet: bool) -> None:
    say(f"wrote {written}" + ("" if converted else " (the model is unchanged)"), quiet)
    say(f"load it with te_convert.load({str(written)!r})", quiet)
