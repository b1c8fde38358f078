"""Every planted mistake is found, its site is put back and named with figures, and the other sites stay converted."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import te_convert
from te_convert.plan.model import Outcome
from te_convert.reasons import ReasonCode
from te_convert.rewrite import apply as rewrite_apply
from te_convert.rewrite import carry_over
from te_convert.rewrite.loans import is_borrower
from te_convert.rewrite.site import is_converted
from te_convert.verify import reference
from tests.rewrite.rewrite_samples import FUSE
from tests.verify.model_zoo import build, call, perturb
from tests.verify.mutants import FUSED_MUTANTS, MUTANTS, plant, plant_in_fusion

_ROUND = itertools.count()
CASES = [
    pytest.param(mutant, models[next(_ROUND) % len(models)], dtype, id=f"{mutant}-{str(dtype).removeprefix('torch.')}")
    for mutant, (_, _, models) in MUTANTS.items()
    for dtype in (torch.float32, torch.bfloat16)
]
FUSED_CASES = [
    pytest.param(mutant, *places[next(_ROUND) % len(places)], dtype, id=f"{mutant}-{str(dtype).removeprefix('torch.')}")
    for mutant, (_, places) in FUSED_MUTANTS.items()
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("mutant", "name", "dtype"), CASES)
def test_a_planted_mistake_costs_one_site(mutant: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, kinds, _ = MUTANTS[mutant]
    model, inputs = build(name, dtype)
    perturb(model)
    expected = call(model, inputs)
    planted = plant(monkeypatch, mutate, kinds)
    result = te_convert.convert(model, inputs, backend="reference", fuse=False)
    parity = result.report.parity
    assert planted.fqn is not None, "no site took the mistake"
    assert [site.fqn for site in parity.reverted] == [planted.fqn]
    assert parity.reverted[0].figures is not None
    assert parity.passed, result.report
    assert len(result.plan.converting) == planted.count - 1 > 0
    assert [r.code for r in result.plan.get(planted.fqn).reasons if r.code == ReasonCode.PARITY_FAILED]
    close = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(call(result.model, inputs), expected, rtol=close, atol=close)


@pytest.mark.parametrize(("mutant", "spec", "name", "dtype"), FUSED_CASES)
def test_a_planted_mistake_costs_one_fusion(
    mutant: str, spec: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = build(name, dtype)
    perturb(model)
    expected = call(model, inputs)
    right = te_convert.convert(model, inputs, backend="reference").plan
    planted = plant_in_fusion(monkeypatch, FUSED_MUTANTS[mutant][0], spec)
    result = te_convert.convert(model, inputs, backend="reference")
    parity = result.report.parity
    assert planted.fqn is not None, "no fusion took the mistake"
    assert [site.fqn for site in parity.reverted] == [planted.fqn]
    assert parity.reverted[0].figures is not None
    assert parity.passed, result.report
    assert [fusion.fqn for fusion in result.plan.fusions] == [f.fqn for f in right.fusions if f.fqn != planted.fqn]
    assert len(right.fusions) == planted.count
    for before, after in zip(right, result.plan, strict=True):
        if before.fused_into != planted.fqn:
            assert after == before
            continue
        assert (after.outcome, after.fused_into) == (Outcome.REFUSED, None)
        assert [r.code for r in after.reasons if r.code == ReasonCode.PARITY_FAILED]
        member = result.model.get_submodule(after.fqn)
        assert type(member) is type(model.get_submodule(after.fqn))
    assert not any(is_borrower(result.model.get_submodule(fqn)) for fqn in planted.members)
    close = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(call(result.model, inputs), expected, rtol=close, atol=close)


def test_eps_is_seen_where_the_float32_bound_alone_would_miss_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a variance of 1, 1e-6 instead of 1e-5 moves the result by 4.5e-6: 107 dB."""
    mutate, kinds, _ = MUTANTS["eps x 10"]
    model = nn.Sequential(nn.LayerNorm(64, eps=1e-6), nn.Linear(64, 64))
    planted = plant(monkeypatch, mutate, kinds)
    parity = te_convert.convert(model, (torch.randn(4, 64),), backend="reference", fuse=False).report.parity
    assert [site.fqn for site in parity.reverted] == [planted.fqn] == ["0"]
    assert "float64" in parity.reverted[0].why


def test_eps_of_a_fusion_is_seen_where_the_float32_bound_alone_would_miss_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.LayerNorm(64, eps=1e-6), nn.Linear(64, 64))
    planted = plant_in_fusion(monkeypatch, FUSED_MUTANTS["eps x 10"][0], "te.LayerNormLinear")
    parity = te_convert.convert(model, (torch.randn(4, 64),), backend="reference").report.parity
    assert [site.fqn for site in parity.reverted] == [planted.fqn] == ["1.layernorm_1"]
    assert "float64" in parity.reverted[0].why


@FUSE
def test_lost_hooks_cost_the_site_that_lost_them(fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("sequential")
    model[0].register_forward_hook(lambda m, a, y: y * 2)  # type: ignore[index]
    expected = call(model, inputs)
    carry = carry_over.carry_hooks

    def forgets(source: nn.Module, dest: nn.Module) -> None:
        if type(source) is not nn.Linear:
            carry(source, dest)

    monkeypatch.setattr(rewrite_apply, "carry_hooks", forgets)
    result = te_convert.convert(model, inputs, backend="reference", fuse=fuse)
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
    parity = te_convert.convert(model, inputs, backend="reference", fuse=False).report.parity
    assert {site.fqn for site in parity.reverted} == {first.fqn, second.fqn}
    assert parity.passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mistake_in_a_fusion_and_one_in_a_site_cost_both(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("llama", dtype)
    perturb(model)
    right = te_convert.convert(model, inputs, backend="reference").plan
    site = plant(monkeypatch, *MUTANTS["one row zeroed"][:2])
    fusion = plant_in_fusion(monkeypatch, FUSED_MUTANTS["gamma lost"][0], "te.LayerNormMLP")
    result = te_convert.convert(model, inputs, backend="reference")
    assert {each.fqn for each in result.report.parity.reverted} == {site.fqn, fusion.fqn}
    assert None not in (site.fqn, fusion.fqn)
    assert result.report.parity.passed
    assert [each.fqn for each in result.plan.fusions] == [each.fqn for each in right.fusions if each.fqn != fusion.fqn]


@FUSE
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_failure_that_no_site_explains_puts_everything_back(name: str, fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewrite itself breaks a module that is no site."""
    model, inputs = build(name)
    expected, right = call(model, inputs), te_convert.convert(model, inputs, backend="reference", fuse=fuse).plan
    apply_plan = rewrite_apply.apply_plan

    def breaks(target: nn.Module, *args: object) -> rewrite_apply.Applied:
        applied = apply_plan(target, *args)  # type: ignore[arg-type]
        with torch.no_grad():
            next(m for m in applied.model.modules() if isinstance(m, nn.Embedding)).weight.mul_(1.5)
        return applied

    monkeypatch.setattr("te_convert.pipeline.apply_plan", breaks)
    result = te_convert.convert(model, inputs, backend="reference", fuse=fuse)
    assert not result.converted
    assert not any(map(is_converted, result.model.modules()))
    assert not any(map(is_borrower, result.model.modules()))
    assert len(result.report.parity.reverted) == len(right.swaps) + len(right.fusions) >= 5
    assert all("no single site explains it" in site.why for site in result.report.parity.reverted)
    assert result.model is model
    assert torch.equal(call(model, inputs), expected)


@FUSE
def test_a_wrong_weight_is_never_called_rounding(fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 must compare with the original's own weights; with the converted ones it would always agree."""
    model, inputs = build("bert")
    if fuse:
        plant_in_fusion(monkeypatch, FUSED_MUTANTS["noise in one row"][0], "te.Linear")
    else:
        plant(monkeypatch, *MUTANTS["noise in one row"][:2])
    parity = te_convert.convert(model, inputs, backend="reference", fuse=fuse).report.parity
    assert parity.reverted
    assert not [note for note in parity.notes if "is rounding" in note]


SLOW_CASES = (
    "gamma lost",
    "norm bias lost",
    "bias doubled",
    "noise in one row",
    "output dtype",
    "dropout in eval",
    "rounded inside",
)


@pytest.mark.parametrize("mutant", SLOW_CASES)
def test_a_slow_low_precision_model_is_judged_as_strictly(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs of each side: the parameters as they are is what is left out."""
    monkeypatch.setattr(reference, "SLOW_S", -1.0)
    mutate, kinds, _ = MUTANTS[mutant]
    model, inputs = build("vit", torch.bfloat16)
    perturb(model)
    planted = plant(monkeypatch, mutate, kinds)
    parity = te_convert.convert(model, inputs, backend="reference", fuse=False).report.parity
    assert [site.fqn for site in parity.reverted] == [planted.fqn]
    assert parity.passed
    assert all(scenario.perturbed for scenario in parity.scenarios)
