"""Example inputs as scenarios: how the model is called, under which name, in which mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from te_convert.capture.preserve import copy_inputs
from te_convert.errors import InputError


@dataclass(frozen=True)
class Scenario:
    """One way of calling the model.

    Attributes:
        name: for reports, for instance "inputs" or "inputs[train]".
        args: positional arguments.
        kwargs: keyword arguments.
        training: None leaves the model's mode as it is.
        derived: where the inputs came from when the caller gave none.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: bool | None = None
    derived: str = ""

    def call(self, model: nn.Module) -> Any:
        """Run the model on a fresh copy of the inputs (a model may write into them); see also :func:`exits_are_errors`."""
        args, kwargs = copy_inputs((self.args, self.kwargs))
        with exits_are_errors():
            return model(*args, **kwargs)

    def with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Scenario:
        """The same call with what ``change`` makes of every tensor, without its history."""

        def one(value: Any) -> Any:
            return change(value.detach()) if isinstance(value, torch.Tensor) else value

        args, kwargs = tree_map(one, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)


@contextmanager
def exits_are_errors() -> Iterator[None]:
    """A forward that calls ``sys.exit`` has failed; it must not end the program that converts it.

    Raises:
        RuntimeError: in the place of SystemExit.
    """
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"the model's own code called sys.exit({error.code!r})") from error


def normalize_inputs(example_inputs: Any) -> tuple[Scenario, ...]:
    """Accept a tensor, tuple of args, dict of kwargs, ``(args, kwargs)``, or a list of those; None gives no scenario.

    ``(args, kwargs)`` is recognised by a tuple followed by a dict with string keys.

    Raises:
        InputError: anything else.
    """
    if example_inputs is None:
        return ()
    entries = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    if not entries:
        raise InputError("example_inputs is an empty list", "pass one scenario, or None")
    named = len(entries) > 1
    return tuple(_scenario(entry, f"inputs[{index}]" if named else "inputs") for index, entry in enumerate(entries))


def _scenario(entry: Any, name: str) -> Scenario:
    import torch

    if isinstance(entry, torch.Tensor):
        return Scenario(name, (entry,), {})
    if isinstance(entry, Mapping):
        _check_keywords(entry)
        return Scenario(name, (), dict(entry))
    if isinstance(entry, tuple):
        if len(entry) == 2 and isinstance(entry[0], tuple) and isinstance(entry[1], Mapping):
            _check_keywords(entry[1])
            return Scenario(name, entry[0], dict(entry[1]))
        return Scenario(name, entry, {})
    raise InputError(
        f"example_inputs has a {type(entry).__name__}",
        "pass a tuple of args, a dict of kwargs, (args, kwargs), or a list of those",
    )


def _check_keywords(entry: Mapping[Any, Any]) -> None:
    bad = [key for key in entry if not isinstance(key, str)]
    if bad:
        raise InputError(f"example_inputs has a keyword that is not a string: {bad[0]!r}", "use the forward's argument names")
