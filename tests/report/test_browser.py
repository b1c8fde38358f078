"""The page as a browser lays it out: no sideways scrolling at any width, in light and dark, and every part really drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from te_convert.report.html import render_html, render_plan_html
from te_convert.report.model import Report
from tests.report.browser import find_chromium, measure, screenshot
from tests.report.sample_reports import SAMPLES, bert_plan
from tests.report.test_html import large, recipe_report

WIDTHS = (320, 390, 768, 1280)
REPORTS: dict[str, Callable[[], Report]] = {**SAMPLES, "recipe": recipe_report, "large": large}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def browser() -> str:
    found = find_chromium()
    if found is None:
        pytest.skip("no Chromium on PATH; `make test-html` installs one")
    return found


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: render_html(make()) for name, make in REPORTS.items()} | {"plan": render_plan_html(bert_plan())}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_page_scrolls_sideways(browser: str, pages: dict[str, str], dark: bool, tmp_path: Path) -> None:
    wanted = {(name, width): page for name, page in pages.items() for width in WIDTHS if name != "large" or width == 390}
    found = measure(browser, tmp_path, wanted, dark)
    assert set(found) == {f"{name} {width}" for name, width in wanted}
    for name, seen in found.items():
        assert seen["width"] == int(name.split()[-1])
        assert seen["height"] > 500
        assert (name, seen["scroll"], seen["wide"]) == (name, seen["width"], [])
        assert seen["page"] == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
        assert seen["filter"]  # the page's own script ran under its policy


def test_the_measurement_sees_what_is_too_wide(browser: str, pages: dict[str, str], tmp_path: Path) -> None:
    wide = pages["success"].replace("<main>", '<main><p style="width:600px">wide</p>')
    (seen,) = measure(browser, tmp_path, {("wide", 390): wide}, dark=False).values()
    assert seen["scroll"] > 390
    assert any("wide" in element for element in seen["wide"])


def test_a_screenshot_shows_light_and_dark(browser: str, pages: dict[str, str], tmp_path: Path) -> None:
    for dark in (False, True):
        (tmp_path / str(dark)).mkdir()
    shots = [screenshot(browser, tmp_path / str(dark), pages["recipe"], (390, 844), dark) for dark in (False, True)]
    assert all(shot.startswith(b"\x89PNG") and len(shot) > 20_000 for shot in shots)
    assert shots[0] != shots[1]
