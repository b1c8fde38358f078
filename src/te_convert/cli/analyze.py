"""``te-convert analyze MODEL``: the plan, without converting anything."""

from __future__ import annotations

from pathlib import Path

import click

from te_convert.cli.options import ModelOptions, html_option, json_option, model_options, quiet_option
from te_convert.cli.output import check_writable, command_line, print_answer, print_json, say, text_style, working, write_file


@click.command(
    short_help="Print what would be converted, and why not the rest.",
    epilog="""\b
Exit codes:
  0   the plan was printed
  2   usage or bad input
""",
)
@model_options
@html_option
@json_option
@quiet_option
def analyze(chosen: ModelOptions, html: Path | None, as_json: bool, quiet: bool) -> int:
    """Print which sites of MODEL would be converted, and why the others would not.

    Needs neither Transformer Engine nor a GPU. MODEL is what convert takes.
    """
    return print_plan(chosen, html, as_json, quiet)


def print_plan(chosen: ModelOptions, html: Path | None, as_json: bool, quiet: bool) -> int:
    """Analyze, print, and write the page if one is wanted; returns the exit code."""
    from te_convert import api
    from te_convert.report.html import render_plan_html
    from te_convert.report.text import render_headline, render_plan

    if html is not None:
        check_writable(html)
    with working(quiet):
        opened, example_inputs = chosen.open()
        plan = api.analyze(opened.model, example_inputs, **chosen.choices)
    if html is not None:
        write_file(html, render_plan_html(plan, command_line()))
        say(f"wrote {html}", quiet)
    if as_json:
        print_json(plan.to_dict())
    else:
        print_answer(render_headline(plan) if quiet else render_plan(plan, **text_style()))
    return 0
