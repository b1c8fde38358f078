"""Write docs/regressions.md from the tables in tests/regressions and the tests' marks, or check that it is up to date.

`python scripts/gen_regressions.py` writes the page; with `--check` it changes nothing and exits with 1 when the page differs.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.regressions.defects import DEFECTS, PEERS  # noqa: E402
from tests.regressions.reports import REPORTS, Report  # noqa: E402

PAGE = ROOT / "docs" / "regressions.md"

HEAD = """\
# Reported elsewhere, tested here

<!-- Written by scripts/gen_regressions.py from tests/regressions and the marks of all tests. -->

People have swapped modules for Transformer Engine's before, by hand or with the tools below, and wrote down what went wrong. Each
of their reports is a test here. Tests under `tests/te_contract` need Transformer Engine, and tests under `tests/gpu` marked so
need a GPU as well; all others run anywhere, on the twins, and prove the mapping and the plan, not TE's kernels.
"""

DEFECTS_HEAD = """\
## What other converters do

As of snapshots of August 2026. ᴿ: seen by running that tool's own conversion code on a CPU, with a stand-in for Transformer
Engine. ᶜ: read in its code. An empty cell was not looked at. The column of accelerate is run by the tests in
`tests/regressions/test_accelerate.py`, on the version in `constraints.txt`; its cells about optimizers and filters are not.
"""


def marks() -> Iterator[tuple[str, Path, str]]:
    """(reference, file, test) for every ``pytest.mark.report`` of a test function, in the order of files and lines."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield from ((reference, file, node.name) for reference in _references(node))


def _references(node: ast.FunctionDef) -> Iterator[str]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.report":
            yield from (ast.literal_eval(argument) for argument in decorator.args)


def proofs() -> dict[str, list[tuple[Path, str]]]:
    """Reference → the tests that name it."""
    found: dict[str, list[tuple[Path, str]]] = defaultdict(list)
    for reference, file, name in marks():
        found[reference].append((file, name))
    return found


def link(reference: str) -> str:
    """A link to an issue or pull request (GitHub forwards one to the other), or to a file."""
    name, number, issue = reference.partition("#")
    if number:
        return f"[{reference}](https://github.com/{name}/issues/{issue})"
    name, _, path = reference.partition(":")
    return f"[{name}: {Path(path).name}](https://github.com/{name}/blob/main/{path})"


def _tests(tests: list[tuple[Path, str]]) -> str:
    unique = dict.fromkeys(tests)
    return "<br>".join(f"[`{name}`](../{file.relative_to(ROOT).as_posix()})" for file, name in unique)


def render_page() -> str:
    """The whole page."""
    found = proofs()
    lines = [HEAD, "## Reports of users", "", "| Report | What happened | Here | Tests |", "| --- | --- | --- | --- |"]
    lines += [_row(report, found) for report in REPORTS]
    lines += ["", DEFECTS_HEAD]
    lines += [f"| Model | {' | '.join(PEERS)} | te_convert | Tests |", "| --- " * (len(PEERS) + 3) + "|"]
    for defect in DEFECTS:
        cells = [defect.case, *(defect.peers.get(peer, "") for peer in PEERS), defect.ours, _tests(found[defect.key])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _row(report: Report, found: dict[str, list[tuple[Path, str]]]) -> str:
    tests = [test for reference in report.references for test in found[reference]]
    return f"| {'<br>'.join(map(link, report.references))} | {report.symptom} | {report.ours} | {_tests(tests)} |"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write docs/regressions.md from the table of reports and the marks of the tests.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when the page is out of date")
    page = render_page()
    if parser.parse_args().check:
        fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page
        print(
            "" if fresh else "docs/regressions.md is out of date: run python scripts/gen_regressions.py", end="" if fresh else "\n"
        )
        return 0 if fresh else 1
    PAGE.write_text(page, encoding="utf-8")
    print(f"wrote docs/{PAGE.name}: {len(REPORTS)} reports, {len(DEFECTS)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
