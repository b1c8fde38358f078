"""Low precision: which eps a norm uses there, where it rounds, and what it returns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_convert.facts.norm_formula import NormFacts
from te_convert.facts.norms import probe_norm
from tests.facts.norm_samples import FLOAT32_EPS, Formula, norm, rms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_eps_of_the_dtype_itself(dtype: torch.dtype) -> None:
    module = Formula(lambda x, a: rms(x.double(), torch.finfo(x.dtype).eps).to(x.dtype) * a)
    low, full = probe_norm(module.to(dtype)), probe_norm(module.float())
    assert isinstance(low, NormFacts)
    assert isinstance(full, NormFacts)
    assert (low.eps, full.eps) == (torch.finfo(dtype).eps, FLOAT32_EPS)


def test_output_dtype_is_seen() -> None:
    assert probe_norm(Formula(lambda x, a: rms(x.float()) * a.float())) == norm("RMSNorm", 24, 1e-6, weight="a", keeps_dtype=False)


def test_low_precision_that_raises_is_unknown() -> None:
    def formula(x: Tensor, a: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            raise NotImplementedError("no bfloat16 here")
        return rms(x) * a

    assert probe_norm(Formula(formula)) == norm("RMSNorm", 24, 1e-6, weight="a", rounding="unknown", keeps_dtype=False)
