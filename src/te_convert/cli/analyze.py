"""``te-convert analyze MODEL``: the plan, without converting anything."""

from __future__ import annotations

import click

from te_convert.cli.options import ModelOptions, json_option, model_options, quiet_option
from te_convert.cli.output import print_answer, print_json, text_style, working


@click.command(
    short_help="Print what would be converted, and why not the rest.",
    epilog="""\b
Exit codes:
  0   the plan was printed
  2   usage or bad input
""",
)
@model_options
@json_option
@quiet_option
def analyze(as_json: bool, quiet: bool, **options: object) -> int:
    """Print which sites of MODEL would be converted, and why the others would not.

    Needs neither Transformer Engine nor a GPU. MODEL is what convert takes.
    """
    return print_plan(ModelOptions(**options), as_json, quiet)  # type: ignore[arg-type]


def print_plan(chosen: ModelOptions, as_json: bool, quiet: bool) -> int:
    """Analyze and print; returns the exit code."""
    from te_convert import api
    from te_convert.report.text import render_headline, render_plan

    with working(quiet):
        opened, example_inputs = chosen.open()
        plan = api.analyze(opened.model, example_inputs, **chosen.choices)
    if as_json:
        print_json(plan.to_dict())
    else:
        print_answer(render_headline(plan) if quiet else render_plan(plan, **text_style()))
    return 0
