"""Parity in your own tests: ``assert_parity(original, converted, inputs)``, with recorded figures if you like.

Importing this imports no torch; the pytest plugin beside it is loaded by every pytest run of the environment.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from te_convert.check.model import CheckResult
    from te_convert.verify.model import Parity

__all__ = ["assert_check", "assert_parity"]


def assert_parity(
    original: nn.Module,
    converted: nn.Module,
    inputs: Any,
    *,
    golden: str | PathLike[str] | None = None,
    update_golden: bool = False,
) -> Parity:
    """Pass when ``converted`` computes what ``original`` does, by the bounds of :func:`te_convert.verify`.

    Args:
        original: the model before conversion.
        converted: the converted model; one in which nothing was converted fails.
        inputs: as ``example_inputs`` of :func:`te_convert.convert`.
        golden: a file with recorded figures; a figure that got worse fails too.
        update_golden: record the figures there instead, if everything else passes.

    Returns:
        The figures.

    Raises:
        AssertionError: with one line for each failure.
        InputError: the inputs or the golden file cannot be used.
    """
    __tracebackhide__ = True
    from te_convert.check.run import check_pair, with_golden

    path = None if golden is None else Path(golden)
    return _demand(with_golden(check_pair(original, converted, inputs), path, update_golden)).parity


def assert_check(
    target: str | PathLike[str],
    *,
    inputs: Any = None,
    backend: str = "auto",
    golden: str | PathLike[str] | None = None,
    update_golden: bool = False,
) -> Parity:
    """Pass when ``te-convert check`` would: for a converted directory, or a model that is converted in memory.

    Args:
        target: a directory that te_convert wrote, ``file.py``, ``file.py:name``, ``pkg.mod:name`` or a Transformers directory.
        inputs: example inputs; by default those of the model's source, else derived ones.
        backend: "auto", "te" or "reference".
        golden: as in :func:`assert_parity`.
        update_golden: as in :func:`assert_parity`.

    Returns:
        The figures.

    Raises:
        AssertionError: with one line for each failure.
        TeConvertError: the target, the inputs or the golden file cannot be used, or the environment lacks the backend.
    """
    __tracebackhide__ = True
    from te_convert.check.run import check_target

    path = None if golden is None else Path(golden)
    result = check_target(str(target), inputs=inputs, backend=backend, golden=path, update_golden=update_golden)
    return _demand(result).parity


def _demand(result: CheckResult) -> CheckResult:
    __tracebackhide__ = True
    if result.exit_code:
        from te_convert.check.text import render_quiet

        raise AssertionError("\n".join([render_quiet(result), *(f"note: {line}" for line in result.remarks)]))
    return result
