"""The ``te-convert`` command: finds the subcommand and turns every failure into an exit code and two lines on stderr."""

from __future__ import annotations

import difflib
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from te_convert.cli.analyze import analyze
from te_convert.cli.bench import bench
from te_convert.cli.check import check
from te_convert.cli.convert import convert
from te_convert.cli.doctor import doctor
from te_convert.cli.estimate import estimate
from te_convert.cli.explain import explain
from te_convert.cli.export import export
from te_convert.cli.output import COMMAND_LINE, EXIT_INTERRUPTED, EXIT_USAGE, fail

PROGRAM = "te-convert"
DEFAULT_COMMAND = "convert"


class ConvertByDefault(click.Group):
    """A group in which ``te-convert MODEL …`` means ``te-convert convert MODEL …``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default command first unless the arguments start with a command or one of the group's own options."""
        if not args:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(EXIT_USAGE)
        ctx.meta[COMMAND_LINE] = shlex.join([PROGRAM, *args])
        own = {name for option in self.get_params(ctx) for name in option.opts}
        if args[0] not in self.commands and args[0] not in own:
            self._reject_misspelling(ctx, args[0])
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command line and exit with its code; no traceback reaches the user unless asked for."""
        with suppress(AttributeError, ValueError):  # a stdout that cannot show "→" shows "?" instead of failing
            sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        try:
            code = super().main(*args, **{**kwargs, "prog_name": PROGRAM, "standalone_mode": False})
        except (click.Abort, KeyboardInterrupt):
            code = EXIT_INTERRUPTED
        except Exception as error:
            code = fail(error)
        sys.exit(code if isinstance(code, int) else 0)

    def _reject_misspelling(self, ctx: click.Context, word: str) -> None:
        close = difflib.get_close_matches(word, self.commands, n=1, cutoff=0.75)
        if close and not Path(word).exists():
            raise click.UsageError(f"No such model or command {word!r}. Did you mean {close[0]!r}?", ctx)


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from te_convert import __version__

        click.echo(f"{PROGRAM} {__version__}")
        ctx.exit()


@click.group(
    name=PROGRAM,
    cls=ConvertByDefault,
    options_metavar="",
    subcommand_metavar="MODEL --out DIR [OPTIONS] | COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  te-convert model.py --out model_te
  te-convert model.py --dry-run
  te-convert bert-base/ --recipe fp8 --out bert_te
  te-convert check bert_te --junit parity.xml
\b
Exit codes:
  0   converted and verified (with --no-verify: converted);
      analyze, estimate, explain, bench: done; check: parity holds; doctor: Transformer Engine would run
  1   written unchanged: nothing was converted, or everything was put back
  2   usage or bad input
  3   parity failed, or could not be judged; with --strict nothing is written;
      check: parity failed, or a golden figure got worse; bench: slower than recorded
  4   the environment lacks what was demanded;
      doctor: Transformer Engine would not run
  70  internal error (TE_CONVERT_DEBUG=1 shows the traceback)
  130 interrupted
""",
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version.")
def main() -> None:
    """Convert PyTorch models to NVIDIA Transformer Engine and prove that they compute the same.

    te-convert MODEL --out DIR is short for te-convert convert MODEL --out DIR; te-convert convert --help lists its options.
    """


for _command in (convert, analyze, explain, estimate, check, bench, export, doctor):
    main.add_command(_command)
