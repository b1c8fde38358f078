"""Where output goes: the answer alone on stdout; progress and one-line errors on stderr."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import click

from te_convert.config import Progress
from te_convert.errors import InputError, TeConvertError

DEBUG_VARIABLE = "TE_CONVERT_DEBUG"
EXIT_USAGE, EXIT_INTERNAL, EXIT_INTERRUPTED = 2, 70, 130
DEFAULT_WIDTH = 100
COMMAND_LINE = "te_convert.command_line"
"""Where the context of the command keeps what it was called with."""


def print_answer(text: str) -> None:
    """Write the command's answer to stdout; a reader that went away (``| head``) changes nothing but the output."""
    try:
        click.echo(text.rstrip("\n"))
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # what is still buffered must not fail again when Python exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(data: Any) -> None:
    """Write the answer as strict JSON: NaN and infinities, which JSON lacks, become strings."""
    print_answer(json_text(data))


def json_text(data: Any) -> str:
    """Strict JSON, indented."""
    return json.dumps(_finite(data), indent=1, allow_nan=False)


def say(line: str, quiet: bool = False) -> None:
    """One line for the reader on stderr."""
    if not quiet:
        click.echo(line, err=True)


def check_writable(path: Path) -> None:
    """Ask before the work whether a file can be written.

    Raises:
        InputError: it is a directory, or there is no permission.
    """
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not parent.is_dir() or not os.access(path if path.exists() else parent, os.W_OK):
        raise InputError(f"{path} cannot be written", "name a file in a directory that can be written")


def write_file(path: Path, text: str) -> None:
    """Write a file for machines; missing parents are made.

    Raises:
        InputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}", "name another file") from error


def command_line() -> str:
    """The command line that is being run, as one can paste it into a shell."""
    return str(click.get_current_context().meta.get(COMMAND_LINE, ""))


def text_style() -> dict[str, Any]:
    """Width and colour for the text renderers: the terminal's, or plain and fixed when stdout is not one."""
    if not sys.stdout.isatty():
        return {"width": DEFAULT_WIDTH, "color": False}
    columns = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
    color = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return {"width": min(max(columns, 60), 140), "color": color}


@contextmanager
def working(quiet: bool = False) -> Iterator[Progress | None]:
    """Run the long work inside: prints of the model's own code go to stderr, where a terminal also shows a progress bar.

    Raises:
        InputError: the model's own code called ``sys.exit``.
    """
    try:
        with redirect_stdout(sys.stderr):
            if quiet or not sys.stderr.isatty():
                yield None
            else:
                with _progress_bar() as progress:
                    yield progress
    except SystemExit as error:
        raise InputError(
            f"the model's own code called sys.exit({error.code!r})", 'put the script part under if __name__ == "__main__":'
        ) from error


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield show


def fail(error: BaseException) -> int:
    """Report an error as ``error:`` and ``hint:`` lines on stderr; returns the exit code."""
    if os.environ.get(DEBUG_VARIABLE):
        click.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
    if isinstance(error, TeConvertError):
        return _lines(f"error: {error}", error.hint, error.exit_code)
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx is not None else "te-convert"
        return _lines(f"error: {error.format_message()}", f"{command} --help lists what it takes", EXIT_USAGE)
    if isinstance(error, click.ClickException):
        return _lines(f"error: {error.format_message()}", "", EXIT_USAGE)
    return _lines(
        f"internal error: {type(error).__name__}: {error}",
        f"run again with {DEBUG_VARIABLE}=1 for the traceback, and please report it",
        EXIT_INTERNAL,
    )


def _lines(message: str, hint: str, code: int) -> int:
    say(" ".join(message.split()))
    if hint:
        say("hint: " + " ".join(hint.split()))
    return code


def _finite(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data
