"""Write docs/reasons.md from the table of reason codes, or check that it is up to date.

`python scripts/gen_docs.py` writes the page; with `--check` it changes nothing and exits with 1 when the page differs.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from te_convert.reasons import REASONS, ReasonCode, Severity

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reasons.md"

HEAD = """\
# Reason codes

<!-- Written by scripts/gen_docs.py from te_convert/reasons/; change the table there and run `make docs`. -->

A report gives every site its reasons as `(code, detail, hint)`. The code is stable: it keeps its meaning from one release to
the next, so scripts may depend on it. The detail holds what was seen at that site, with figures. The hint says what you can
do; a rule may give a more precise one than the text below.
"""

SECTIONS = {
    Severity.REFUSAL: ("Refusals", "The site was left exactly as it was."),
    Severity.ADVICE: ("Advice", "The site was converted; this is what to know about it."),
}


def render_cell(text: str) -> str:
    """Text that is safe inside a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def render_section(severity: Severity) -> str:
    """One table of the codes with this severity, sorted by code."""
    title, lead = SECTIONS[severity]
    lines = [f"## {title}", "", lead, "", "| Code | What it means | What you can do |", "| --- | --- | --- |"]
    for code in sorted(REASONS, key=lambda code: code.value):
        info = REASONS[code]
        if info.severity is severity:
            lines.append(f"| `{code.value}` | {render_cell(info.meaning)} | {render_cell(info.hint)} |")
    return "\n".join(lines) + "\n"


def render_page() -> str:
    """The whole page.

    Raises:
        ValueError: a code has no entry in the table.
    """
    missing = [code.name for code in ReasonCode if code not in REASONS]
    if missing:
        raise ValueError(f"no entry in REASONS for {', '.join(missing)}")
    return "\n".join([HEAD, *(render_section(severity) for severity in SECTIONS)])


def check_page(expected: str) -> int:
    """Compare the page on disk with what it should be; print the difference."""
    found = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if found == expected:
        return 0
    diff = difflib.unified_diff(
        found.splitlines(keepends=True), expected.splitlines(keepends=True), "docs/reasons.md", "te_convert/reasons/"
    )
    sys.stderr.writelines(diff)
    print("docs/reasons.md is out of date: run `make docs`", file=sys.stderr)
    return 1


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write docs/reasons.md from the table of reason codes.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when the page is out of date")
    arguments = parser.parse_args()
    page = render_page()
    if arguments.check:
        return check_page(page)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page, encoding="utf-8")
    print(f"wrote docs/{PAGE.name}: {len(REASONS)} codes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
