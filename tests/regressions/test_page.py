"""docs/regressions.md is what the table and the marks say; every report has a test, and every mark an entry."""

from __future__ import annotations

import re

from scripts import gen_regressions
from tests.regressions.defects import DEFECTS, PEERS
from tests.regressions.reports import REPORTS

REFERENCES = [reference for report in REPORTS for reference in report.references]


def test_the_page_is_up_to_date() -> None:
    assert gen_regressions.PAGE.read_text(encoding="utf-8") == gen_regressions.render_page(), "python scripts/gen_regressions.py"


def test_every_entry_has_a_test() -> None:
    found = gen_regressions.proofs()
    assert not [report.references for report in REPORTS if not any(found[reference] for reference in report.references)]
    assert not [defect.key for defect in DEFECTS if not found[defect.key]]


def test_every_mark_has_an_entry() -> None:
    known = {*REFERENCES, *(defect.key for defect in DEFECTS)}
    assert not [(reference, name) for reference, _, name in gen_regressions.marks() if reference not in known]


def test_entries_are_well_formed() -> None:
    assert len(REPORTS) == 45
    assert len(REFERENCES) == len(set(REFERENCES))
    assert len(DEFECTS) == len({defect.key for defect in DEFECTS})
    for reference in REFERENCES:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+(#\d+|:[\w./-]+)", reference), reference
    for defect in DEFECTS:
        assert set(defect.peers) <= set(PEERS)
        assert all(text.endswith((" ᴿ", " ᶜ")) for text in defect.peers.values()), defect.key


def test_links() -> None:
    assert gen_regressions.link("a/b#3") == "[a/b#3](https://github.com/a/b/issues/3)"
    assert gen_regressions.link("a/b:c/d.py") == "[a/b: d.py](https://github.com/a/b/blob/main/c/d.py)"
