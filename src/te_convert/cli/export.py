"""``te-convert export DIR --out DIR``: back to the original's names and layout."""

from __future__ import annotations

from pathlib import Path

import click

from te_convert.cli.options import quiet_option
from te_convert.cli.output import print_answer, working

_PATH = click.Path(path_type=Path)


@click.command(
    short_help="Write a converted directory's weights in the original's layout.",
    epilog="""\b
Exit codes:
  0   written
  2   usage or bad input; nothing is written
""",
)
@click.argument("directory", metavar="DIR", type=_PATH)
@click.option("--to", type=click.Choice(["original"]), default="original", show_default=True, help="The layout to write.")
@click.option("--out", type=_PATH, metavar="DIR", required=True, help="Directory to write.")
@click.option("--force", is_flag=True, help="Replace the directory when it exists.")
@click.option("--resume", is_flag=True, help="Go on from an unfinished run.")
@quiet_option
def export(directory: Path, to: str, out: Path, force: bool, resume: bool, quiet: bool) -> int:
    """Write the weights of DIR, which te-convert wrote, in the original model's names, shapes and order.

    For a Transformers model the result is a directory that from_pretrained reads. Tensors are streamed, so memory does not
    grow with the model.
    """
    from te_convert import api

    with working(quiet) as progress:
        written = api.export(directory, out, resume=resume, force=force, progress=progress)
    print_answer(f"wrote {written} in the {to} layout")
    return 0
