from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

import te_convert
from te_convert.explain.text import render_explanation, render_sites
from tests.explain.explain_samples import sample

MODEL, INPUTS = sample()


@pytest.mark.parametrize("fqn", ["1.attention.q", "1.norm2", "2.attention"])
def test_text(fqn: str, snapshot: SnapshotAssertion) -> None:
    found = te_convert.explain(MODEL, fqn, INPUTS)
    assert render_explanation(found) == snapshot
    assert str(found) == render_explanation(found)


def test_list(snapshot: SnapshotAssertion) -> None:
    assert render_sites(te_convert.analyze(MODEL, INPUTS)) == snapshot


def test_a_narrow_terminal() -> None:
    text = render_explanation(te_convert.explain(MODEL, "1", INPUTS), width=60)
    assert text.startswith("1: no site of its own")
    assert max(map(len, text.splitlines())) <= 60
    assert "more nodes of the module" in text
