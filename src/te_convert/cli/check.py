"""``te-convert check DIR|MODEL``: parity for CI, with an exit code, JUnit XML, GitHub annotations and golden figures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from te_convert.cli.options import ModelOptions, bisect_option, json_option, quiet_option, target_options
from te_convert.cli.output import check_writable, print_answer, print_json, say, text_style, working, write_file
from te_convert.config import BACKENDS
from te_convert.errors import TeConvertError

if TYPE_CHECKING:
    from te_convert.check.model import CheckResult

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(
    short_help="Check parity in CI: exit code, JUnit XML, annotations.",
    epilog="""\b
Exit codes:
  0   parity holds (with --golden: and no figure is worse than recorded)
  1   nothing was converted, so there is nothing to compare
  2   usage or bad input, also a golden file that cannot be used
  3   parity failed, a site was put back, or a golden figure got worse
  4   the environment lacks what was demanded
""",
)
@target_options
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True, help="What the converted side runs on.")
@click.option("--golden", type=_FILE, metavar="FILE", help="Fail when a figure is worse than those recorded in FILE.")
@click.option("--update-golden", is_flag=True, help="Record the figures in the --golden FILE instead of comparing.")
@click.option("--junit", type=_FILE, metavar="FILE", help="Write JUnit XML.")
@click.option(
    "--github/--no-github",
    default=None,
    help="Annotations on stderr and a job summary. Default: where GITHUB_ACTIONS is true.",
)
@bisect_option
@json_option
@quiet_option
def check(
    chosen: ModelOptions,
    backend: str,
    golden: Path | None,
    update_golden: bool,
    junit: Path | None,
    github: bool | None,
    bisect: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Check that a converted model computes what its original does.

    DIR was written by te-convert: the original is built again from the stored source and weights, and the loaded model is
    compared with it. MODEL is what convert takes: it is converted in memory and compared; nothing is written. Without --inputs
    the example_inputs() of the model's source are used, else inputs derived from the model.
    """
    if update_golden and golden is None:
        raise click.UsageError("--update-golden needs --golden FILE.")
    on_github = os.environ.get("GITHUB_ACTIONS") == "true" if github is None else github
    for file in filter(None, (junit, golden if update_golden else None)):
        check_writable(file)
    try:
        with working(quiet) as progress:
            result = _run(chosen, backend, golden, update_golden, progress, bisect)
    except TeConvertError as error:
        _publish_error(chosen.model, error, junit, on_github)
        raise
    _publish(result, junit, on_github)
    _print(result, as_json, quiet)
    return result.exit_code


def _run(chosen: ModelOptions, backend: str, golden: Path | None, update_golden: bool, progress: Any, bisect: bool) -> CheckResult:
    from te_convert import api
    from te_convert.check.run import check_target

    return check_target(
        chosen.model,
        inputs=api.parse_inputs(chosen.inputs) if chosen.inputs else None,
        backend=backend,
        weights=chosen.weights,
        choices=chosen.choices,
        golden=golden,
        update_golden=update_golden,
        progress=progress,
        bisect=bisect,
    )


def _print(result: CheckResult, as_json: bool, quiet: bool) -> None:
    from te_convert.check.text import render_check, render_quiet

    if as_json:
        print_json(result.to_dict())
    else:
        print_answer(render_quiet(result) if quiet else render_check(result, **text_style()))


def _publish(result: CheckResult, junit: Path | None, on_github: bool) -> None:
    """Write what machines read: the XML file, annotations and the job summary."""
    if junit is not None:
        from te_convert.check.junit import render_junit

        write_file(junit, render_junit(result))
    if on_github:
        from te_convert.check.github import render_annotations, render_summary

        for line in render_annotations(result):
            say(line)
        _append_summary(render_summary(result))


def _publish_error(target: str, error: TeConvertError, junit: Path | None, on_github: bool) -> None:
    """A check that could not be made must not look like one that was not asked for."""
    message = f"{error}; {error.hint}" if error.hint else str(error)
    if junit is not None:
        from te_convert.check.junit import render_junit_error

        write_file(junit, render_junit_error(target, message))
    if on_github:
        from te_convert.check.github import render_annotation

        say(render_annotation("error", message, f"te-convert check {target}"))


def _append_summary(text: str) -> None:
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:  # a page that is not there is no reason to fail a check that passed
        say(f"the job summary was not written: {error.strerror or error}")
