"""``te-convert doctor``: would Transformer Engine run here, and if not, why and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from te_convert.cli.options import json_option
from te_convert.cli.output import print_answer, print_json, text_style, working
from te_convert.config import RECIPES

if TYPE_CHECKING:
    from te_convert.runtime.doctor import Check

EXIT_RUNS, EXIT_LACKS = 0, 4
_MARKS = {True: ("ok", "green"), False: ("no", "bold red"), None: ("·", "")}


@click.command(
    short_help="Say whether Transformer Engine would run here.",
    epilog="""\b
Exit codes:
  0   Transformer Engine would run here
  4   it would not; conversion and verification still work on the reference twins
""",
)
@click.option("--strict-for", type=click.Choice(list(RECIPES)), help="Also demand that this recipe would run here.")
@json_option
def doctor(strict_for: str | None, as_json: bool) -> int:
    """Say whether Transformer Engine would run on this machine, and if not, what to do."""
    with working():
        from te_convert.runtime.doctor import run_checks, te_would_run  # not api: it needs a torch that imports

        checks = run_checks(strict_for)
        runs = te_would_run(checks)
    if as_json:
        print_json({"te_would_run": runs, "strict_for": strict_for, "checks": [check.to_dict() for check in checks]})
    else:
        print_answer(render_checks(checks, runs, strict_for=strict_for, **text_style()))
    return EXIT_RUNS if runs else EXIT_LACKS


def render_checks(checks: Sequence[Check], runs: bool, width: int, color: bool, strict_for: str | None = None) -> str:
    """The verdict, then one block per check: fact with the code of what is wrong, consequence, fix."""
    from rich.table import Table
    from rich.text import Text

    from te_convert.report.format import clean
    from te_convert.report.text import render_block

    grid = Table.grid(padding=(0, 2))
    for _ in range(2):
        grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for check in checks:
        word, style = _MARKS[check.ok]
        lines = [
            f"{check.fact} [{check.code}]" if check.code else check.fact,
            check.consequence,
            f"fix: {check.fix}" if check.fix else "",
        ]
        grid.add_row(Text(word, style), Text(clean(check.name)), Text("\n".join(map(clean, filter(None, lines)))))
    what = "Transformer Engine" if strict_for is None else f"Transformer Engine with the recipe {strict_for}"
    verdict = f"{what} would run here"
    if not runs:
        verdict = f"{what} would not run here; conversion and verification work on the reference twins"
    return render_block((Text(verdict, "bold green" if runs else "bold yellow"), "", grid), width, color)
