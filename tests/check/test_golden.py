from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from te_convert.check.golden import compare_golden, golden_of, read_golden, write_golden
from te_convert.check.golden_rules import GRADIENTS, MODEL, SITE, Recorded, find_better, find_worse
from te_convert.check.model import CheckResult, GoldenVerdict
from te_convert.errors import InputError
from tests.check.check_samples import figures, one_draw, passing, result, scenario, site


def recorded(tmp_path: Path, then: CheckResult) -> Path:
    path = tmp_path / "deep" / "golden.json"
    assert write_golden(path, then) == GoldenVerdict(str(path), updated=True)
    return path


def compared(tmp_path: Path, then: CheckResult, now: CheckResult) -> GoldenVerdict:
    path = recorded(tmp_path, then)
    return compare_golden(path, read_golden(path), now)


def test_the_file_says_what_was_recorded(tmp_path: Path) -> None:
    path = recorded(tmp_path, passing())
    text = path.read_text()
    data = json.loads(text)
    assert list(data) == ["schema", "model_class", "backend", "dtype", "versions", "converted", "scenarios", "sites"]
    assert data["schema"] == 1
    assert data["versions"] == {
        "te_convert": "0.1.0",
        "torch": "2.14.1",
        "transformers": None,
        "transformer_engine": None,
        "device": "cpu",
    }
    assert data["scenarios"]["inputs (perturbed)"] == {
        "sqnr_db": 118.04,
        "max_rel": 4e-7,
        "error_ratio": None,
        "dtype": "float32",
        "judged": True,
    }
    assert data["sites"]["norm"]["sqnr_db"] == "inf"
    assert '  "fc": {"sqnr_db": 131.0, "max_rel": 1e-07, "error_ratio": null, "dtype": "float32", "judged": true},\n' in text
    assert [file.name for file in path.parent.iterdir()] == ["golden.json"]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    now = golden_of(passing())
    assert read_golden(recorded(tmp_path, passing())) == replace(now, modules=frozenset())


def test_the_same_figures_are_as_good(tmp_path: Path) -> None:
    assert compared(tmp_path, passing(), passing()) == GoldenVerdict(str(tmp_path / "deep" / "golden.json"), compared=4)


def f32(sqnr_db: float, max_rel: float = 1e-7, ratio: float | None = None, dtype: str = "float32") -> Recorded:
    return Recorded(sqnr_db, max_rel, ratio, dtype)


@pytest.mark.parametrize(
    ("then", "now", "figure"),
    [
        (f32(118), f32(115.1), None),
        (f32(118), f32(114.9), "SQNR 114.9 dB"),
        (f32(160), f32(120.1), None),
        (f32(160), f32(119.9), "SQNR 119.9 dB"),
        (f32(122), f32(119.1), None),
        (f32(math.inf, 0.0), f32(150), None),
        (f32(math.inf, 0.0), f32(119), "SQNR 119.0 dB"),
        (f32(118), f32(math.inf, 0.0), None),
        (f32(118), f32(math.nan), "SQNR nan dB"),
        (f32(110, 2e-6), f32(110, 7.9e-6), None),
        (f32(110, 2e-6), f32(110, 8.1e-6), "max rel 8.1e-06"),
        (f32(130, 1e-8), f32(130, 1e-6), None),
        (f32(130, 1e-8), f32(130, math.nan), "max rel nan"),
        (f32(55, 1e-7, 0.9), f32(55, 1e-7, 1.24), None),
        (f32(55, 1e-7, 0.9), f32(55, 1e-7, 1.26), "error ratio 1.260"),
        (f32(55, 1e-7, 1.2), f32(55, 1e-7, 1.49), None),
        (f32(105), f32(298, 1e-15, dtype="float64"), "SQNR 298.0 dB, in float64 only"),
        (f32(105), f32(298, 1e-15), "SQNR 298.0 dB, in float64 only"),
        (f32(298, 1e-15, dtype="float64"), f32(92, 9e-6), None),
        (f32(298, 1e-15, dtype="float64"), f32(291, 5e-15, dtype="float64"), None),
        (replace(f32(50), judged=False), replace(f32(20, 1.0), judged=False), None),
    ],
)
def test_what_counts_as_worse(then: Recorded, now: Recorded, figure: str | None) -> None:
    found = find_worse(then, now, SITE)
    assert (None if found is None else found[0]) == figure


@pytest.mark.parametrize(
    ("then", "now", "figure"),
    [
        (f32(124, 4e-7), f32(107.6, 4e-6), None),  # MiniLM with another number of threads
        (f32(118), f32(97.9), "SQNR 97.9 dB"),
        (f32(135), f32(114.9), "SQNR 114.9 dB"),
        (f32(math.inf, 0.0), f32(119), "SQNR 119.0 dB"),
        (f32(110, 4e-7), f32(110, 9e-6), "max rel 9.0e-06"),
        (f32(108, 7e-6), f32(290, 1e-15, dtype="float64"), None),
        (f32(125, 5e-7), f32(290, 1e-15, dtype="float64"), "SQNR 290.0 dB, in float64 only"),
    ],
)
def test_the_whole_model_scatters_more(then: Recorded, now: Recorded, figure: str | None) -> None:
    found = find_worse(then, now, MODEL)
    assert (None if found is None else found[0]) == figure


@pytest.mark.parametrize(
    ("then", "now", "figure"),
    [
        (f32(114, 2e-6), f32(88, 3.9e-5), None),
        (f32(114, 2e-6), f32(87, 4.1e-5), "max rel 4.1e-05"),
        (f32(88, 4e-5), f32(284, 6e-15), None),
        (f32(114, 2e-6), f32(284, 6e-15), "SQNR 284.0 dB, in float64 only"),
    ],
)
def test_the_worst_of_many_gradients_is_judged_by_its_error_alone(then: Recorded, now: Recorded, figure: str | None) -> None:
    found = find_worse(then, now, GRADIENTS)
    assert (None if found is None else found[0]) == figure


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (f32(100), f32(104), "SQNR 104.0 dB, recorded 100.0 dB"),
        (f32(100), f32(102), ""),
        (f32(121), f32(150), ""),
        (f32(100), f32(math.inf, 0.0), "SQNR ∞ dB, recorded 100.0 dB"),
        (f32(55, 1e-7, 1.2), f32(55, 1e-7, 0.9), "error ratio 0.900, recorded 1.200"),
        (f32(298, dtype="float64"), f32(97), "holds its float32 bound again (SQNR 97.0 dB)"),
        (f32(97), f32(298, dtype="float64"), ""),
    ],
)
def test_what_counts_as_better(then: Recorded, now: Recorded, words: str) -> None:
    assert find_better(then, now, SITE) == words


def test_a_worse_scenario_and_a_worse_site_fail(tmp_path: Path) -> None:
    then = result((scenario(found=figures(118)),), (site(found=figures(117)),))
    now = result((scenario(found=figures(97)),), (site(found=figures(101)),))
    assert [str(failure) for failure in compared(tmp_path, then, now).failures] == [
        "golden inputs (perturbed): SQNR 97.0 dB; bound: recorded 118.0 dB, slack 20 dB below 120 dB",
        "golden fc: SQNR 101.0 dB; bound: recorded 117.0 dB, slack 3 dB below 120 dB",
    ]


def test_better_figures_and_new_sites_are_mentioned_not_failed(tmp_path: Path) -> None:
    then = result((scenario(found=figures(100)),), (site(),))
    now = result((scenario(found=figures(121)), scenario("inputs[train]")), (site(), site("head")))
    verdict = compared(tmp_path, then, now)
    assert verdict.failures == ()
    assert verdict.better == (
        "inputs (perturbed): SQNR 121.0 dB, recorded 100.0 dB",
        "head: converted now, not recorded",
        "inputs[train] (perturbed): compared now, not recorded",
    )


def test_what_is_missing_fails(tmp_path: Path) -> None:
    then = result((scenario(), scenario("inputs[train]")), (site("a"), site("b"), site("c")), converted=("a", "b", "c"))
    now = result((scenario(),), (site("a"),), converted=("a", "b"))
    now = replace(now, parity=replace(now.parity, executed={"a": 1, "b": 0}))
    assert [str(failure) for failure in compared(tmp_path, then, now).failures] == [
        "golden c: not converted any more; bound: recorded as converted",
        "golden inputs[train] (perturbed): not compared any more; bound: recorded as a scenario",
        "golden b: not compared alone any more; bound: recorded with figures of its own",
    ]


def test_other_fusions_of_the_same_modules_are_a_note(tmp_path: Path) -> None:
    then = result((scenario(),), (site("layernorm_fc"),), converted=("norm", "fc"))
    now = result((scenario(),), (site("norm"), site("fc")), converted=("norm", "fc"))
    verdict = compared(tmp_path, then, now)
    assert verdict.failures == ()
    assert verdict.notes == ("layernorm_fc: recorded as one TE module, and is none now",)


def test_one_low_precision_run_is_one_draw_and_not_compared(tmp_path: Path) -> None:
    verdict = compared(
        tmp_path, result((one_draw(figures(50), 0.7),), (site(),)), result((one_draw(figures(35, 0.1), 5.0),), (site(),))
    )
    assert verdict.failures == ()
    missing = compared(tmp_path, result((one_draw(figures(50), 0.7),), (site(),)), result((), (site(),)))
    assert [failure.name for failure in missing.failures] == ["inputs (perturbed, bfloat16)"]


def test_changed_versions_are_named(tmp_path: Path) -> None:
    now = replace(passing(), versions={"te_convert": "0.1.0", "torch": "3.0", "transformers": "5.0"})
    verdict = compared(tmp_path, passing(), now)
    assert verdict.failures == ()
    assert verdict.changes == {"torch": ("2.14.1", "3.0"), "transformers": (None, "5.0")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_class": "Other"}, "records model class Net, and this is Other"),
        ({"dtype": "bfloat16"}, "records dtype float32, and this is bfloat16"),
    ],
)
def test_figures_of_something_else_are_an_error(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        compared(tmp_path, passing(), replace(passing(), **changes))


def test_figures_of_another_backend_are_an_error(tmp_path: Path) -> None:
    now = replace(passing(), parity=replace(passing().parity, backend="te"))
    with pytest.raises(InputError, match="records backend reference, and this is te"):
        compared(tmp_path, passing(), now)


def damage(path: Path, change: dict[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"schema": None},
        {"versions": 3},
        {"converted": "fc"},
        {"scenarios": []},
        {"sites": {"fc": 1}},
        {"sites": {"fc": {"sqnr_db": 1.0}}},
        {"sites": {"fc": {"sqnr_db": "high", "max_rel": 0, "error_ratio": None, "dtype": "float32", "judged": True}}},
        {"sites": {"fc": {"sqnr_db": True, "max_rel": 0, "error_ratio": None, "dtype": "float32", "judged": True}}},
        {"sites": {"fc": {"sqnr_db": "nan", "max_rel": 0, "error_ratio": None, "dtype": "float32", "judged": True}}},
    ],
)
def test_a_damaged_file_is_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    path = recorded(tmp_path, passing())
    damage(path, change)
    with pytest.raises(InputError) as caught:
        read_golden(path)
    assert len(str(caught.value).splitlines()) == 1
    assert str(path) in str(caught.value)
    assert "--update-golden" in caught.value.hint


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"{}", b"[" * 100_000])
def test_a_file_that_is_no_golden_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"golden"):
        read_golden(path)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist") as caught:
        read_golden(tmp_path / "golden.json")
    assert caught.value.hint == "record the figures with --update-golden"


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "golden.json").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        write_golden(tmp_path / "golden.json", passing())
    assert [path.name for path in tmp_path.iterdir()] == ["golden.json"]
