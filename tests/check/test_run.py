"""A check of two models says what did not run as planned while they were compared."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

import te_convert
from te_convert.check.github import render_summary
from te_convert.check.junit import render_junit
from te_convert.check.run import check_pair
from te_convert.check.text import render_check
from tests.rewrite.rewrite_samples import perturb

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


class ReadsAgainWithGradients(nn.Module):
    """A path that no recorded run took, since those need no gradients: the fused Linear reads another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.norm(x))
        return y + self.fc(x) if torch.is_grad_enabled() else y


def check(model: Any) -> Any:
    original = perturb(model)
    return check_pair(original, te_convert.convert(original, (X,), verify=False).model, (X,))


def test_calls_that_a_fusion_does_not_cover_are_counted_and_told() -> None:
    result = check(ReadsAgainWithGradients())
    assert result.parity.passed
    (found,) = result.fallbacks
    assert (found.fqn, found.replacement, found.on_twin) == ("layernorm_fc", "te.LayerNormLinear", False)
    assert found.calls >= 1
    (line,) = (line for line in result.remarks if "did not run on the replacement" in line)
    assert line.startswith(f"{found.calls} call")
    assert "(te.LayerNormLinear)" in line
    assert json.loads(json.dumps(result.to_dict()))["fallbacks"] == [dict(found.__dict__)]
    for shown in (render_check(result, width=400), render_junit(result), render_summary(result)):
        assert "did not run on the replacement" in shown


def test_nothing_is_told_where_all_ran_as_planned() -> None:
    result = check(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)))
    assert result.parity.passed
    assert result.fallbacks == ()
    assert not [line for line in result.remarks if "did not run" in line]
    assert result.to_dict()["fallbacks"] == []
