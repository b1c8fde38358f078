"""One site against its original: the original's own weights, exceptions, and temporary restoration."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.rewrite.fused import get_fused
from te_convert.rewrite.site import is_converted
from te_convert.verify.isolate import SiteRecorder, as_original, observed, random_site_parity, run_original
from tests.rewrite.rewrite_samples import FUSE, Attends, TiedLM, gpt2, ids, perturb, rewritten, snapshot

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def net() -> Any:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4))
    perturb(model)
    return model


def test_the_original_modules_come_back_for_the_time_being() -> None:
    model = net()
    expected = model(X)
    model[1].register_forward_hook(lambda m, a, y: y * 2)
    applied = rewritten(model, (X,), fuse=False)
    after = snapshot(model)
    with torch.no_grad():
        model[1]._parameters["weight"] = nn.Parameter(torch.zeros(8, 8))
    root: Any
    again: Any
    with as_original(applied, list(applied.sites)) as root:
        assert root is model
        assert [type(m) for m in root.children()] == [nn.LayerNorm, nn.Linear, nn.Linear]
        doubled = root[2](root[1](root[0](X)))
        assert not torch.equal(doubled, expected)  # the hook is there
        with as_original(applied, ["1"]) as again:
            assert type(again[1]) is nn.Linear
        assert type(root[1]) is nn.Linear
        torch.testing.assert_close(root(X), doubled)
    model[1]._parameters["weight"] = applied.taken["1"]["weight"]
    assert snapshot(model) == after
    assert all(is_converted(m) for m in model)


def test_the_members_of_a_fusion_run_by_themselves_for_the_time_being() -> None:
    model: Any = perturb(Attends())
    expected = model(ids())
    applied = rewritten(model, (ids(),))
    fused = model.attn.layernorm_qkv
    record = get_fused(fused)
    torch.testing.assert_close(model(ids()), expected)
    assert record.executed == 1
    after, weight = snapshot(model), fused.weight
    fused._parameters["weight"] = nn.Parameter(torch.zeros(24, 8))
    assert not torch.allclose(model(ids()), expected)
    root: Any
    with as_original(applied, list(applied.sites)) as root:
        assert root is model
        assert torch.equal(root(ids()), expected)  # their own weights, not the fused ones
        with as_original(applied, ["attn.layernorm_qkv"]):
            assert torch.equal(root(ids()), expected)
        assert torch.equal(root(ids()), expected)
    assert (record.executed, record.enabled) == (2, True)
    assert not torch.allclose(model(ids()), expected)
    fused._parameters["weight"] = weight
    assert snapshot(model) == after


def test_a_root_site_comes_back_as_the_root() -> None:
    linear = nn.Linear(8, 4)
    applied = rewritten(linear, (X,))
    with as_original(applied, [""]) as root:
        assert root is linear
        assert torch.equal(root(X), torch.nn.functional.linear(X, *(p for p in linear.parameters())))
    assert applied.model is not linear


def test_an_exception_leaves_the_replacements_in_place() -> None:
    applied = rewritten(net(), (X,), fuse=False)
    with pytest.raises(ValueError, match="planted"), as_original(applied, list(applied.sites)):
        raise ValueError("planted")
    assert all(is_converted(m) for m in applied.model.children())
    applied.undo_all()
    assert not any(is_converted(m) for m in applied.model.children())


def test_an_exception_leaves_the_fusions_in_place() -> None:
    applied = rewritten(TiedLM(), (ids(),))
    with pytest.raises(ValueError, match="planted"), as_original(applied, list(applied.sites)):
        raise ValueError("planted")
    records = [get_fused(applied.sites[name]) for name in ("layernorm_up", "layernorm_head")]
    assert [(record.enabled, record.own) for record in records] == [(True, None)] * 2
    applied.model(ids())
    assert [record.executed for record in records] == [1, 1]


@pytest.mark.parametrize(("fuse", "name"), [(False, "1"), (True, "1.layernorm_1")], ids=["leaf", "fused"])
def test_the_original_runs_on_its_own_weights_when_they_are_known(fuse: bool, name: str) -> None:
    applied = rewritten(net(), (X,), fuse=fuse)
    site = applied.sites[name]
    right = site(X)
    site._parameters["weight"] = nn.Parameter(torch.zeros(8, 8))
    torch.testing.assert_close(run_original(site, X, applied.taken[name]), right)
    assert torch.equal(run_original(site, X), site(X))


def test_random_input_is_compared_with_perturbed_parameters() -> None:
    """A fresh norm has weight 1: a lost weight shows only after a perturbation."""
    applied = rewritten(nn.Sequential(nn.LayerNorm(8)), (X,))
    site = applied.sites["0"]
    right = type(site)

    class Lost(right):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.layer_norm(x, (8,), None, None, self.eps)

    site.__class__ = Lost
    parity = random_site_parity("0", site, applied.taken["0"])
    assert parity.random_input
    assert not parity.passed
    assert torch.equal(site.weight, torch.ones(8))  # type: ignore[arg-type]
    site.__class__ = right
    assert random_site_parity("0", site, applied.taken["0"]).passed


def test_a_fused_norm_without_its_weight_shows_on_random_input() -> None:
    applied = rewritten(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)), (X,))
    ((fqn, site),) = applied.sites.items()
    assert random_site_parity(fqn, site, applied.taken[fqn]).passed
    right = type(site)

    class Lost(right):  # type: ignore[misc, valid-type]
        def te_forward(self, x: torch.Tensor) -> torch.Tensor:
            normed = torch.nn.functional.layer_norm(x, (8,), None, None, self.eps)
            return torch.nn.functional.linear(normed, self.weight, self.bias)

    site.__class__ = Lost
    parity = random_site_parity(fqn, site, applied.taken[fqn])
    assert parity.random_input
    assert not parity.passed
    assert torch.equal(site.layer_norm_weight, torch.ones(8))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(nn.Linear(8, 4)), lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))], ids=["leaf", "fused"]
)
def test_a_site_that_raises_is_a_failed_site(make: Callable[[], nn.Module]) -> None:
    applied = rewritten(make(), (X,))
    ((fqn, site),) = applied.sites.items()

    class Raises(type(site)):  # type: ignore[misc]
        def te_forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("planted")

    site.__class__ = Raises
    parity = random_site_parity(fqn, site)
    assert not parity.passed
    assert parity.figures.sqnr_db == -math.inf


@FUSE
@pytest.mark.parametrize("make", [gpt2, Attends], ids=["gpt2", "attends"])
def test_observing_counts_calls_and_leaves_no_trace(make: Callable[[], nn.Module], fuse: bool) -> None:
    applied = rewritten(make(), (ids(),), fuse=fuse)
    if fuse:
        with torch.no_grad():
            applied.model(ids())  # a deferred norm remembers the dtype that it returns
    before = snapshot(applied.model)
    recorder = SiteRecorder(applied.taken)
    with torch.no_grad(), observed(applied.sites, recorder):
        applied.model(ids())
    assert snapshot(applied.model) == before
    assert set(recorder.calls) == set(applied.sites)
    assert set(recorder.calls.values()) == {1}
    assert all(recorder.verdict(fqn, site).passed for fqn, site in applied.sites.items())


@FUSE
def test_public_verify_does_not_take_a_changed_weight_for_rounding(fuse: bool) -> None:
    model = net()
    converted: Any = te_convert.convert(model, (X,), fuse=fuse).model
    assert te_convert.verify(model, converted, (X,)).passed
    with torch.no_grad():
        converted[1].weight[2] *= 1.001
    parity = te_convert.verify(model, converted, (X,))
    assert parity.status == "failed"
    assert not any("is rounding" in note for note in parity.notes)
