"""Transformer Engine's kernels against the twins on a GPU: every kind of site, dtype and recipe, within TE's own tolerances."""

from __future__ import annotations

import pytest

from te_convert.reference.emulation import emulate
from te_convert.replacements.recipes import recipe_autocast
from te_convert.runtime.recipes import CONDITIONS, why_not_here
from tests.gpu.kernel_cases import CASES, DTYPES, assert_alike, assert_near, run
from tests.gpu.needs import needs_gpu_and_te

pytestmark = [pytest.mark.gpu, needs_gpu_and_te]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_high_precision(name: str, dtype: str) -> None:
    case = CASES[name]
    assert_near(run(case, dtype, "te", "cuda"), run(case, dtype, "reference", "cuda"), case.bounds[dtype])


@pytest.mark.parametrize("recipe", CONDITIONS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.recipes])
def test_recipes(name: str, recipe: str) -> None:
    """Outputs against the emulation; a recipe that this GPU does not have is skipped and says why."""
    lacking = why_not_here(recipe)
    if lacking:
        pytest.skip(lacking)
    found = run(CASES[name], "bfloat16", "te", "cuda", recipe_autocast(recipe))
    expected = run(CASES[name], "bfloat16", "reference", "cuda", emulate(recipe))
    if recipe == "nvfp4":  # gradients are rounded stochastically
        found, expected = ({"output": values["output"]} for values in (found, expected))
    assert_alike(found, expected)
