from __future__ import annotations

import json
import re
from pathlib import Path

from syrupy.assertion import SnapshotAssertion

import te_convert
from te_convert.bench.compare import compare_with
from te_convert.bench.text import render_bench
from tests.bench.bench_samples import inputs, net, result


def test_text(snapshot: SnapshotAssertion) -> None:
    now = result()
    compared = now.with_comparison(compare_with(Path("old.json"), json.loads(json.dumps(result().to_dict())), now, 1.1))
    assert render_bench(compared) == snapshot


def test_a_real_one_with_its_figures_masked(snapshot: SnapshotAssertion) -> None:
    found = te_convert.bench(net(), inputs(), rounds=2, warmup=1, compiler=None, device="cpu")
    masked = re.sub(r"^(original|converted) .*$", r"\1 #", render_bench(found), flags=re.MULTILINE)
    masked = re.sub(r"CPU, \d+ threads", "CPU, # threads", masked)
    assert re.sub(r"[ ─]{2,}", "  ", masked) == snapshot


def test_twins_on_a_gpu_are_named_before_any_figure() -> None:
    text = render_bench(result(device="cuda", backend_reason="Transformer Engine does not import: OSError"))
    first = " ".join(text.split())
    assert first.startswith(
        "The reference twins were measured, not Transformer Engine's kernels: Transformer Engine does not import"
    )
    assert not result(device="cuda", backend="te").caveat


def test_a_narrow_terminal_loses_no_figure() -> None:
    assert render_bench(result(), width=60) == render_bench(result())
