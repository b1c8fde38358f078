"""Options that several commands share, and what they say."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from te_convert.config import APPROXIMATIONS, POLICIES, RECIPES

if TYPE_CHECKING:
    from te_convert.api import OpenedModel

F = TypeVar("F", bound=Callable[..., Any])
Command = Callable[..., int]
"""A command's function; it returns the exit code."""
_PATH = click.Path(path_type=Path)


@dataclass(frozen=True)
class ModelOptions:
    """The options that say what to read and which sites to look at; ``recipe`` is a tuple where several can be named."""

    model: str
    inputs: tuple[str, ...]
    weights: Path | None
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    allow: tuple[str, ...]
    recipe: str | tuple[str, ...] | None

    def open(self) -> tuple[OpenedModel, Any]:
        """Open the model and choose its example inputs: the ones given here, else its own (None when it has none)."""
        from te_convert import api

        example_inputs = self.example_inputs()
        opened = api.open_model(self.model, self.weights)
        return opened, opened.example_inputs if example_inputs is None else example_inputs

    def example_inputs(self) -> Any:
        """What ``--inputs`` describes, or None."""
        from te_convert import api

        return api.parse_inputs(self.inputs) if self.inputs else None

    def refuse_for_streaming(self, min_sqnr: float | None, bisect: bool, benefit: bool = False) -> None:
        """Say which options a streamed conversion cannot honour.

        Raises:
            click.UsageError: one of them was given, or MODEL is no directory.
        """
        given = {"--inputs": bool(self.inputs), "--weights": self.weights is not None, "--min-sqnr": min_sqnr is not None}
        given |= {"--bisect": bisect, "--policy, --gpu or --tokens": benefit}
        wrong = [name for name, is_given in given.items() if is_given]
        if wrong:
            raise click.UsageError(f"{', '.join(wrong)} cannot be used with --stream; --no-stream loads the whole model.")
        if not Path(self.model).is_dir():
            raise click.UsageError("--stream, --resume and --dtype need a Transformers directory.")

    @property
    def choices(self) -> dict[str, Any]:
        """The keyword arguments that ``api.convert`` and ``api.analyze`` share."""
        return {"recipe": self.recipe, "include": self.include, "exclude": self.exclude, "allow": self.allow}


_MODEL_OPTIONS = (
    click.option(
        "--inputs",
        multiple=True,
        metavar="TEXT",
        help="Example input NAME:DTYPE[SHAPE]:LOW..HIGH, e.g. 'input_ids:int64[2,128]:0..30522'. Repeatable. "
        "Default: the file's example_inputs(), else inputs derived from the model.",
    ),
    click.option("--weights", type=_PATH, metavar="PATH", help="Weights to load into the model first (.safetensors)."),
    click.option("--include", multiple=True, metavar="GLOB", help="Convert only sites whose name matches. Repeatable."),
    click.option("--exclude", multiple=True, metavar="GLOB", help="Leave sites whose name matches. Repeatable."),
    click.option(
        "--allow",
        multiple=True,
        metavar="NAME",
        type=click.Choice(APPROXIMATIONS),
        help=f"Accept a named approximation ({', '.join(APPROXIMATIONS)}). Repeatable.",
    ),
)
_RECIPE = click.option(
    "--recipe",
    type=click.Choice(list(RECIPES)),
    metavar="NAME",
    help=f"Precision recipe: {', '.join(RECIPES)}. Default: high precision.",
)
_RECIPES = click.option(
    "--recipe",
    type=click.Choice(["all", *RECIPES]),
    default="all",
    metavar="NAME",
    help=f"all, or one of {', '.join(RECIPES)}. Default: all.",
)

_MEASURED_RECIPES = click.option(
    "--recipe",
    multiple=True,
    type=click.Choice([name for name in RECIPES if name != "bf16"]),
    metavar="NAME",
    help="Measure this recipe where it runs. Repeatable. Default: all.",
)


def model_options(command: Command) -> Command:
    """Add MODEL and the options of :class:`ModelOptions`, which the command takes first, as one argument."""
    return _with_options(click.argument("model"), _RECIPE, command)


def estimate_options(command: Command) -> Command:
    """The same, where ``--recipe`` may be all of them."""
    return _with_options(click.argument("model"), _RECIPES, command)


def target_options(command: Command) -> Command:
    """The same, where a converted directory may stand in MODEL's place."""
    return _with_options(click.argument("model", metavar="DIR|MODEL"), _RECIPE, command)


def measured_options(command: Command) -> Command:
    """Those of :func:`target_options`, with a repeatable ``--recipe``."""
    return _with_options(click.argument("model", metavar="DIR|MODEL"), _MEASURED_RECIPES, command)


def _with_options(argument: Callable[[Command], Command], recipe: Callable[[Command], Command], command: Command) -> Command:
    @functools.wraps(command)
    def packed(**options: Any) -> int:
        chosen = ModelOptions(**{field.name: options.pop(field.name) for field in fields(ModelOptions)})
        return command(chosen, **options)

    with_options: Command = packed
    added: tuple[Callable[[Command], Command], ...] = (recipe, *reversed(_MODEL_OPTIONS), argument)
    for add in added:
        with_options = add(with_options)
    return with_options


def json_option(command: F) -> F:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(command)


def html_option(command: F) -> F:
    """Add ``--html``."""
    return click.option("--html", "html", type=_PATH, metavar="FILE", help="Also write the answer as one HTML page.")(command)


def bisect_option(command: F) -> F:
    """Add ``--bisect``."""
    return click.option(
        "--bisect", is_flag=True, help="When sites that are right alone fail together, find a smallest such set and name it."
    )(command)


def gpu_options(command: F) -> F:
    """Add ``--gpu`` and ``--tokens``."""
    tokens = click.option(
        "--tokens", type=click.IntRange(min=1), metavar="N", help="Tokens in a step. Default: those of the example inputs."
    )
    return click.option("--gpu", metavar="NAME", help="What to predict for, e.g. h100, b200. Default: this machine's.")(
        tokens(command)
    )


def policy_option(command: F) -> F:
    """Add ``--policy``."""
    return click.option(
        "--policy",
        type=click.Choice(POLICIES),
        default="none",
        show_default=True,
        help="benefit: keep sites in high precision where the recipe is predicted to be slower.",
    )(command)


def quiet_option(command: F) -> F:
    """Add ``-q/--quiet``."""
    return click.option("-q", "--quiet", is_flag=True, help="Print the verdict only; no progress.")(command)
