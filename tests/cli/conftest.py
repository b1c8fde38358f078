from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from te_convert.cli.main import main
from tests.cli.fake_api import FakeApi

Run = Callable[..., Result]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    return FakeApi().install(monkeypatch)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("TE_CONVERT_DEBUG", raising=False)

    def invoke(*args: str) -> Result:
        return CliRunner().invoke(main, list(args), terminal_width=80)

    return invoke
