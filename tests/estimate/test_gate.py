from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.errors import InputError
from te_convert.plan.model import Plan
from tests.estimate.models import Block, tokens


def _codes(plan: Plan) -> dict[str, list[str]]:
    return {site.fqn: [reason.code for reason in site.reasons if reason.code.startswith("benefit")] for site in plan.sites}


def convert(model: nn.Module | None = None, **options: object) -> te_convert.Result:
    torch.manual_seed(0)
    model = Block() if model is None else model
    return te_convert.convert(model, tokens(), backend="reference", **{"recipe": "fp8-current", **options})  # type: ignore[arg-type]


def test_without_a_gpu_nothing_is_said() -> None:
    result = convert()
    assert not any(_codes(result.plan).values())
    assert not any("benefit" in note for note in result.report.notes)


def test_a_named_gpu_gives_advice_and_changes_nothing_else() -> None:
    plain, advised = convert(), convert(gpu="h100")
    assert _codes(advised.plan)["attn.q"] == ["benefit.fp8-slower"]
    assert _codes(advised.plan)["norm"] == []
    assert {s.fqn: (s.outcome, s.precision) for s in plain.plan} == {s.fqn: (s.outcome, s.precision) for s in advised.plan}
    detail = next(r.detail for r in advised.plan.get("attn.o").reasons if r.code == "benefit.fp8-slower")
    assert "fp8-current on h100" in detail
    assert "predicted" in detail
    assert any(line.startswith("benefit.not-worth-it: ") for line in advised.report.warnings)


def test_the_policy_keeps_losing_sites_in_high_precision() -> None:
    result = convert(policy="benefit", gpu="h100")
    assert result.converted
    assert result.report.parity.passed
    assert {fusion.precision for fusion in result.plan.fusions if "attention" not in fusion.fqn} == {"high"}
    assert result.plan.get("attn.o").precision == "high"
    assert any("benefit: predicted for training on h100 with 16 tokens" in note for note in result.report.notes)


def test_with_many_tokens_large_sites_keep_the_recipe() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.thin = nn.Linear(1024, 1024), nn.Linear(1024, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.thin(torch.relu(self.large(x)))  # type: ignore[no-any-return]

    result = te_convert.convert(
        Two(), torch.randn(8, 1024), recipe="fp8-delayed", backend="reference", policy="benefit", gpu="h100", tokens=1 << 17
    )
    assert result.plan.get("large").precision == "recipe"
    assert result.plan.get("thin").precision == "high"
    assert not any("not-worth-it" in line for line in result.report.warnings)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"policy": "benefit"}, "no GPU"),
        ({"policy": "benefit", "gpu": "h100", "recipe": None}, "none was given"),
        ({"gpu": "v100"}, "'v100'"),
        ({"policy": "speed"}, "unknown policy"),
        ({"gpu": "h100", "tokens": -1}, "tokens"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=line):
        convert(**options)


def test_a_recipe_that_the_gpu_lacks_is_not_weighed() -> None:
    assert not any(_codes(convert(gpu="a100").plan).values())
