"""Every Python block of the docs runs, every te-convert line too, in the order of the page; other commands exist.

A page may set things up in a comment, ``<!-- test`` to ``-->``, which readers do not see.  A block with ``notest`` behind its
language needs what no test machine has (a GPU, a checkpoint of a user); nothing else is left out.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from te_convert.cli.main import main
from te_convert.rules import registry

ROOT = Path(__file__).parents[2]
_CODE = re.compile(r"^```(\w*)( notest)?\n(.*?)^```|^<!-- test\n(.*?)^-->", flags=re.MULTILINE | re.DOTALL)
PAGES = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "docs" / "how-to")
    for path in folder.glob("*.md")
    if path.name != "CHANGELOG.md"
)


def parts(page: Path) -> list[tuple[str, str]]:
    """(language, code) in order, moved down to its line on the page; setup comments are Python."""
    text = page.read_text()
    found = [(each[1] or "text", each[2], each[3] if each[4] is None else each[4], each) for each in _CODE.finditer(text)]
    return [
        (
            "python" if each[4] is not None else "notest" if notest else language,
            "\n" * (text.count("\n", 0, each.start()) + 1) + code,
        )
        for language, notest, code, each in found
    ]


RUN = [page for page in PAGES if any(language in ("python", "bash") for language, _ in parts(page))]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "BUILTIN_RULES", registry.BUILTIN_RULES)  # a page may add its own
    namespace: dict[str, object] = {"__name__": "page"}
    for language, code in parts(page):
        if language == "python":
            exec(compile(code, str(page), "exec"), namespace)  # the point of the test
        elif language == "bash":
            for line in code.splitlines():
                run_line(line)


def run_line(line: str) -> None:
    words = shlex.split(line, comments=True)
    if not words:
        return
    if words[0] == "te-convert":
        result = CliRunner().invoke(main, words[1:], catch_exceptions=False)
        allowed = (0, 4) if words[1] == "doctor" else (0,)
        assert result.exit_code in allowed, f"{line}\n{result.output}"
    elif words[0] == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
        assert {word for word in words[1:] if "=" not in word} <= targets, line
    else:
        program = words[1] if words[0] == "python" else words[0]
        assert (ROOT / program).is_file() or words[0] == "pip", line


def test_pages_with_code_are_found() -> None:
    assert {"README.md", "train-in-fp8.md", "large-checkpoints.md"} <= {page.name for page in RUN}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
