"""``te-convert explain MODEL SITE``: what each rule said about one site, and the recorded graph around it."""

from __future__ import annotations

import click

from te_convert.cli.options import ModelOptions, json_option, model_options
from te_convert.cli.output import print_answer, print_json, text_style, working


@click.command(
    short_help="Say why a site is converted, or not.",
    epilog="""\b
Exit codes:
  0   the explanation was printed
  2   usage or bad input, also a SITE that MODEL does not have
""",
)
@model_options
@click.argument("site", required=False)
@click.option("--list", "as_list", is_flag=True, help="Print every site with its outcome, as without SITE.")
@click.option(
    "--context", type=click.IntRange(0, 20), default=2, show_default=True, help="Steps of the graph before and after the site."
)
@json_option
def explain(chosen: ModelOptions, site: str | None, as_list: bool, context: int, as_json: bool) -> int:
    """Say what was seen of SITE, what each rule said about it, and what is around it.

    MODEL is what convert takes. SITE is the name of a module, or (root).
    """
    from te_convert import api
    from te_convert.explain.text import render_explanation, render_sites

    with working() as progress:
        opened, example_inputs = chosen.open()
        if as_list or site is None:
            plan = api.analyze(opened.model, example_inputs, progress=progress, **chosen.choices)
            data, text = plan.to_dict(), render_sites(plan, **text_style())
        else:
            found = api.explain(opened.model, site, example_inputs, context=context, progress=progress, **chosen.choices)
            data, text = found.to_dict(), render_explanation(found, **text_style())
    if as_json:
        print_json(data)
    else:
        print_answer(text)
    return 0
