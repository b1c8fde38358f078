"""Exceptions of te_convert: each says what is wrong and carries a hint that says what to do.

The command line maps them to exit codes: 2 for usage and bad input, 3 for a failed parity gate, 4 for an environment that
lacks what was demanded.  A site that cannot be converted is not an error; it is a reason in the report.
"""

from __future__ import annotations

from typing import Any


class TeConvertError(Exception):
    """Base class: ``str(error)`` is one line, ``error.hint`` says what to do, ``error.exit_code`` is the CLI's exit code."""

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class InputError(TeConvertError):
    """An argument, a file or an example input that cannot be used."""


class LoadError(TeConvertError):
    """A converted directory that is damaged, tampered with, of an unknown schema, or whose source changed."""


class ConversionError(TeConvertError):
    """``strict=True`` was asked for and something was not converted as planned or not verified; ``error.report`` tells all."""

    exit_code = 3

    def __init__(self, message: str, hint: str = "", report: Any = None) -> None:
        super().__init__(message, hint)
        self.report = report


class EnvironmentLacksError(TeConvertError):
    """What was demanded (``backend="te"``, a recipe) is not available on this machine."""

    exit_code = 4


class FallbackWarning(UserWarning):
    """A model that could have run on Transformer Engine runs on twins, as a whole or at a site; the message names the cause."""
