"""The pytest plugin: two fixtures and one option.  Loading it imports neither torch nor anything else of weight.

``te_convert_parity(original, converted, inputs, golden="net.json")`` and ``te_convert_check("model.py")`` are
:func:`te_convert.testing.assert_parity` and :func:`~te_convert.testing.assert_check`; a relative golden file or target lies beside
the test file, and ``pytest --te-convert-update-golden`` records the figures instead of comparing them.
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from te_convert.verify.model import Parity

_UPDATE = "--te-convert-update-golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("te_convert").addoption(
        _UPDATE, action="store_true", default=False, help="record golden parity figures instead of comparing with them"
    )


@pytest.fixture
def te_convert_parity(request: pytest.FixtureRequest) -> Callable[..., Parity]:
    """``assert_parity(original, converted, inputs, golden=None)`` of this test."""

    def compare(original: Any, converted: Any, inputs: Any, *, golden: str | PathLike[str] | None = None) -> Parity:
        __tracebackhide__ = True
        from te_convert.testing import assert_parity

        parity = assert_parity(original, converted, inputs, golden=_beside(request, golden), update_golden=_updates(request))
        return _noted(request, parity)

    return compare


@pytest.fixture
def te_convert_check(request: pytest.FixtureRequest) -> Callable[..., Parity]:
    """``assert_check(target, inputs=None, backend="auto", golden=None)`` of this test."""

    def check(
        target: str | PathLike[str], *, inputs: Any = None, backend: str = "auto", golden: str | PathLike[str] | None = None
    ) -> Parity:
        __tracebackhide__ = True
        from te_convert.testing import assert_check

        beside = _beside(request, target)
        found = beside if beside is not None and beside.exists() else target
        file, update = _beside(request, golden), _updates(request)
        return _noted(request, assert_check(found, inputs=inputs, backend=backend, golden=file, update_golden=update))

    return check


def _updates(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption(_UPDATE))


def _beside(request: pytest.FixtureRequest, file: str | PathLike[str] | None) -> Path | None:
    return None if file is None else request.path.parent / file


def _noted(request: pytest.FixtureRequest, parity: Parity) -> Parity:
    """Put the backend and the worst figure into pytest's own JUnit XML, as properties of the test."""
    worst = min((run.figures.sqnr_db for run in parity.scenarios), default=None)
    noted = [("te_convert_backend", parity.backend), *([] if worst is None else [("te_convert_worst_sqnr_db", worst)])]
    request.node.user_properties += noted
    return parity
