from __future__ import annotations

from te_convert.estimate.cost import Times
from te_convert.estimate.model import RecipeEstimate, SiteEstimate
from te_convert.estimate.verdict import LEAST_GAIN, judge


def _estimate(recipe: str, speedup: float, *site_speedups: float) -> RecipeEstimate:
    sites = tuple(
        SiteEstimate(f"s{index}", "te.Linear", "linear", 1, Times(), Times(), Times(), False, each)
        for index, each in enumerate(site_speedups)
    )
    return RecipeEstimate(recipe, speedup=speedup, gated_speedup=speedup, sites=sites)


def _code(*estimates: RecipeEstimate, asked: str | None = None) -> tuple[str, str | None]:
    verdict = judge(estimates, "h100", True, asked)
    return verdict.code, verdict.recipe


HIGH = _estimate("bf16", 1.0)


def test_each_verdict() -> None:
    assert _code(HIGH, _estimate("mxfp8", 1.3, 1.3)) == ("convert", "mxfp8")
    assert _code(HIGH, _estimate("mxfp8", 1.3, 1.3), _estimate("nvfp4", 1.4, 1.5)) == ("convert", "nvfp4")
    assert _code(HIGH, _estimate("mxfp8", 1.3, 1.3, 0.9)) == ("only-these-sites", "mxfp8")
    assert _code(_estimate("bf16", 1.2), _estimate("mxfp8", 1.1, 0.9)) == ("stay-in-bf16", "bf16")
    assert _code(HIGH, _estimate("mxfp8", 0.8, 0.8)) == ("not-worth-it", None)
    assert _code(HIGH, RecipeEstimate("mxfp8", "too old"), asked="mxfp8") == ("recipe-unavailable", None)
    assert judge([HIGH], "h100", False, None).code == "nothing-to-convert"


def test_a_gain_below_the_threshold_is_none() -> None:
    assert _code(HIGH, _estimate("mxfp8", LEAST_GAIN - 0.01, 1.1)) == ("not-worth-it", None)
    assert _code(HIGH, _estimate("mxfp8", LEAST_GAIN, 1.1)) == ("convert", "mxfp8")


def test_an_unavailable_recipe_does_not_hide_what_bf16_gives() -> None:
    verdict = judge([_estimate("bf16", 1.3), RecipeEstimate("mxfp8", "too old")], "a100", True, "mxfp8")
    assert "too old" in verdict.text
    assert "1.30x" in verdict.text
