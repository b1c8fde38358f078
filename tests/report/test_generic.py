from __future__ import annotations

from te_convert.report.generic import Block, blocks_of
from te_convert.report.tables import Table


def test_nothing_is_no_part() -> None:
    assert blocks_of(None) == blocks_of({}) == ()


def test_facts_lists_and_records() -> None:
    data = {
        "worth_it": True,
        "speedup": 1.41421356,
        "flops": 1234567,
        "why": None,
        "notes": ["one", "two"],
        "layers": [{"name": "mlp", "gain_us": 3}, {"name": "attn", "gain_us": None, "note": "small"}],
        "step": {"before": {"ms": 2.0}, "n": 1},
        "nothing": [],
    }
    assert blocks_of(data) == (
        Block("", facts=(("worth it", "yes"), ("speedup", "1.414"), ("flops", "1,234,567"), ("why", "none"), ("nothing", "none"))),
        Block("notes", lines=("one", "two")),
        Block(
            "layers", table=Table(("name", "gain us", "note"), (("mlp", "3", "–"), ("attn", "–", "small")), right=frozenset({1}))
        ),
        Block("step", facts=(("n", "1"),)),
        Block("step / before", facts=(("ms", "2"),)),
    )


def test_depth_has_an_end() -> None:
    data: dict[str, object] = {"end": 1}
    for _ in range(50):
        data = {"a": data}
    (block,) = blocks_of(data)
    assert "end 1" in block.facts[0][1]
