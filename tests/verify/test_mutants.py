"""Every planted mistake is found, its site is put back and named with figures, and the other sites stay converted."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import te_convert
from te_convert.reasons import ReasonCode
from te_convert.rewrite import apply as rewrite_apply
from te_convert.rewrite import carry_over
from te_convert.rewrite.site import is_converted
from tests.verify.model_zoo import build, call, perturb
from tests.verify.mutants import MUTANTS, plant

_ROUND = itertools.count()
CASES = [
    pytest.param(mutant, models[next(_ROUND) % len(models)], dtype, id=f"{mutant}-{str(dtype).removeprefix('torch.')}")
    for mutant, (_, _, models) in MUTANTS.items()
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("mutant", "name", "dtype"), CASES)
def test_a_planted_mistake_costs_one_site(mutant: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, kinds, _ = MUTANTS[mutant]
    model, inputs = build(name, dtype)
    perturb(model)
    expected = call(model, inputs)
    planted = plant(monkeypatch, mutate, kinds)
    result = te_convert.convert(model, inputs, backend="reference")
    parity = result.report.parity
    assert planted.fqn is not None, "no site took the mistake"
    assert [site.fqn for site in parity.reverted] == [planted.fqn]
    assert parity.reverted[0].figures is not None
    assert parity.passed, result.report
    assert len(result.plan.converting) == planted.count - 1 > 0
    assert [r.code for r in result.plan.get(planted.fqn).reasons if r.code == ReasonCode.PARITY_FAILED]
    close = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(call(result.model, inputs), expected, rtol=close, atol=close)


def test_eps_is_seen_where_the_float32_bound_alone_would_miss_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a variance of 1, 1e-6 instead of 1e-5 moves the result by 4.5e-6: 107 dB."""
    mutate, kinds, _ = MUTANTS["eps x 10"]
    model = nn.Sequential(nn.LayerNorm(64, eps=1e-6), nn.Linear(64, 64))
    planted = plant(monkeypatch, mutate, kinds)
    parity = te_convert.convert(model, (torch.randn(4, 64),), backend="reference").report.parity
    assert [site.fqn for site in parity.reverted] == [planted.fqn] == ["0"]
    assert "float64" in parity.reverted[0].why


def test_lost_hooks_cost_the_site_that_lost_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("sequential")
    model[0].register_forward_hook(lambda m, a, y: y * 2)  # type: ignore[index]
    expected = call(model, inputs)
    carry = carry_over.carry_hooks

    def forgets(source: nn.Module, dest: nn.Module) -> None:
        if type(source) is not nn.Linear:
            carry(source, dest)

    monkeypatch.setattr(rewrite_apply, "carry_hooks", forgets)
    result = te_convert.convert(model, inputs, backend="reference")
    assert [site.fqn for site in result.report.parity.reverted] == ["0"]
    assert "first diverging site" in result.report.parity.reverted[0].why
    assert result.report.parity.passed
    torch.testing.assert_close(call(result.model, inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_mistakes_cost_several_sites(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("bert", dtype)
    perturb(model)
    first = plant(monkeypatch, *MUTANTS["bias doubled"][:2])
    second = plant(monkeypatch, *MUTANTS["gamma lost"][:2])
    parity = te_convert.convert(model, inputs, backend="reference").report.parity
    assert {site.fqn for site in parity.reverted} == {first.fqn, second.fqn}
    assert parity.passed


def test_a_failure_that_no_site_explains_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewrite itself breaks a module that is no site."""
    model, inputs = build("bert")
    expected = call(model, inputs)
    apply_plan = rewrite_apply.apply_plan

    def breaks(target: nn.Module, *args: object) -> rewrite_apply.Applied:
        applied = apply_plan(target, *args)  # type: ignore[arg-type]
        with torch.no_grad():
            applied.model.embeddings.word_embeddings.weight.mul_(1.5)  # type: ignore[union-attr,operator]
        return applied

    monkeypatch.setattr("te_convert.pipeline.apply_plan", breaks)
    result = te_convert.convert(model, inputs, backend="reference")
    assert not result.converted
    assert not any(map(is_converted, result.model.modules()))
    assert len(result.report.parity.reverted) >= 8
    assert all("no single site explains it" in site.why for site in result.report.parity.reverted)
    assert result.model is model
    assert torch.equal(call(model, inputs), expected)


def test_a_wrong_weight_is_never_called_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 must compare with the original's own weights; with the converted ones it would always agree."""
    model, inputs = build("bert")
    plant(monkeypatch, *MUTANTS["noise in one row"][:2])
    parity = te_convert.convert(model, inputs, backend="reference").report.parity
    assert parity.reverted
    assert not [note for note in parity.notes if "is rounding" in note]
