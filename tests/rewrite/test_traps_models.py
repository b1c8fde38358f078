"""Traps 13 and 18 to 21: whose forward is a Linear's, modules called many times, defaults that hide errors, names that mislead.

Traps 23 and 24 (attention functions, padded positions) concern no norm and no Linear; they are proved with the attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_convert
from te_convert.plan.model import Outcome
from te_convert.reasons import ReasonCode
from tests.rewrite.trap_parts import LN, LayerNorm, Llama
from tests.rewrite.trap_samples import (
    MLP,
    WIDTH,
    Attention,
    One,
    assert_near,
    assert_same_gradients,
    assert_trains_alike,
    gradients,
    loss_of,
    pair,
    perturb,
    x_of,
)

JOINT = "layernorm_a_b"


# ---- 13: subclasses of nn.Linear -------------------------------------------------------------------------------------
class Router(nn.Linear):
    """Llama 4's router: a tuple, not F.linear."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return torch.sigmoid(logits), logits


class Exact(nn.Linear):
    """Falcon's: another forward with the same numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def routed(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    scores, logits = m.router(n)
    out: Tensor = m.a(n) * m.b(n) * scores + logits
    return out


def with_third(m: Any, x: Tensor) -> Tensor:
    n = m.norm(x)
    out: Tensor = m.a(n) * m.b(n) + m.c(n)
    return out


def test_trap_13_a_router_that_returns_a_tuple_stays_and_is_another_reader() -> None:
    made = pair(One(use=routed, router=Router(WIDTH, 6)))
    assert made.report.site("router").outcome is Outcome.REFUSED
    assert [r.code for r in made.report.site("norm").reasons] == [ReasonCode.FUSION_OTHER_READER]
    assert_trains_alike(made)


def test_trap_13_a_subclass_with_the_same_numbers_fuses() -> None:
    made = pair(One(use=with_third, c=Exact(WIDTH, 6)), fused=1)
    assert made.fused == ["layernorm_a_b_c"]
    made.model(x_of())
    assert made.counts("layernorm_a_b_c") == (1, 0)
    assert_trains_alike(made)


def test_trap_13_a_subclass_with_other_numbers_stays_and_is_another_reader() -> None:
    made = pair(One(use=with_third, c=Doubled(WIDTH, 6)))
    assert made.report.site("c").outcome is Outcome.REFUSED
    assert made.report.site("norm").outcome is Outcome.CONVERTED
    assert_trains_alike(made)


def test_trap_13_falcon_fuses_its_own_linear_class() -> None:
    from tests.verify.model_zoo import build

    model, inputs = build("falcon")
    made = pair(model, inputs)
    site = made.report.site("transformer.h.0.self_attention.query_key_value")
    assert (site.class_name, site.outcome) == ("FalconLinear", Outcome.FUSED)
    assert site.executed


def test_trap_13_conv1d_fuses_with_its_weight_transposed() -> None:
    from tests.verify.model_zoo import build

    model, inputs = build("gpt2")
    made = pair(model, inputs)
    site = made.report.site("transformer.h.0.attn.c_attn")
    assert (site.kind, site.outcome, site.replacement) == ("Conv1D", Outcome.FUSED, "te.LayerNormLinear")
    assert made.report.site("transformer.h.0.mlp.c_fc").replacement == "te.LayerNormMLP"
    for each in made.both():
        loss_of(each(**inputs).logits).backward()
    assert_same_gradients(gradients(made.model), gradients(made.original), 5e-5)


# ---- 18: one module called many times --------------------------------------------------------------------------------
class Shared(nn.Module):
    """ALBERT: the same layer several times."""

    def __init__(self, times: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm1, self.attn, self.norm2, self.mlp, self.times = (
            nn.LayerNorm(WIDTH),
            Attention(),
            nn.LayerNorm(WIDTH),
            MLP(),
            times,
        )

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + self.attn(self.norm1(x))
            x = x + self.mlp(self.norm2(x))
        return x


def test_trap_18_a_layer_called_many_times_fuses_in_every_call() -> None:
    made = pair(Shared(), fused=2)
    made.model(x_of())
    assert made.counts("attn.layernorm_qkv") == (3, 0)
    assert made.counts("mlp") == (3, 0)
    assert_trains_alike(made, bound=1e-4)


def test_trap_18_a_norm_with_other_readers_in_another_call_is_not_fused() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.a(m.norm(x)) * m.b(m.norm(x * 2))
        return out

    made = te_convert.convert(perturb(One(use=use)), (x_of(),), backend="reference")
    (reason,) = made.report.site("norm").reasons
    assert (reason.code, reason.detail) == (ReasonCode.FUSION_CALLS_DIFFER, "its calls have different readers")
    assert made.report.count(Outcome.FUSED) == 0


def test_trap_18_a_reader_that_also_reads_something_else_is_not_fused() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        n = m.norm(x)
        out: Tensor = m.a(n) * m.b(n) + m.a(x)
        return out

    made = te_convert.convert(perturb(One(use=use)), (x_of(),), backend="reference")
    assert [r.code for r in made.report.site("norm").reasons] == [ReasonCode.FUSION_CALLS_DIFFER]
    assert made.report.parity.passed


def test_trap_18_albert() -> None:
    from tests.verify.model_zoo import build

    model, inputs = build("albert")
    made = te_convert.convert(perturb(model), inputs, backend="reference")
    assert made.report.parity.passed
    assert not made.report.parity.reverted


# ---- 19: default values hide a lost parameter ------------------------------------------------------------------------
@pytest.mark.parametrize("lost", ["layer_norm_weight", "layer_norm_bias", "bias"])
def test_trap_19_verification_sees_a_lost_parameter_that_still_has_its_default(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from te_convert.rewrite import apply as rewrite_apply

    fuse: Any = vars(rewrite_apply)["fuse"]

    def forgets(*args: Any) -> Any:
        module, own = fuse(*args)
        cls: Any = type(module)
        monkeypatch.setattr(cls, "te_forward", _with_constant(cls.te_forward, lost))
        return module, own

    model = One()
    for module in (model.a, model.b):
        nn.init.zeros_(module.bias)
    monkeypatch.setattr(rewrite_apply, "fuse", forgets)
    result = te_convert.convert(model, (x_of(),), backend="reference")
    assert [site.fqn for site in result.report.parity.reverted] == [JOINT]
    assert result.model is model


def _with_constant(forward: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    """A forward that uses the default in the place of a parameter."""

    def wrong(self: Any, x: Tensor) -> Tensor:
        parameter = self._parameters[name]
        default = torch.ones_like(parameter) if name == "layer_norm_weight" else torch.zeros_like(parameter)
        self._parameters[name] = nn.Parameter(default)
        try:
            return forward(self, x)
        finally:
            self._parameters[name] = parameter

    return wrong


# ---- 20 and 21: norms by what they compute ---------------------------------------------------------------------------
class L2(nn.Module):
    """Looks like an RMS norm and is none: no mean over the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.weight


NORMS: dict[str, tuple[Callable[[], nn.Module], str, bool, float]] = {
    "odd names": (lambda: LN(WIDTH, 1e-3), "LayerNorm", False, 1e-3),
    "RMS called LayerNorm": (lambda: LayerNorm(WIDTH), "RMSNorm", False, 1e-6),
    "1 + w": (lambda: LayerNorm(WIDTH, offset=1.0), "RMSNorm", True, 1e-6),
    "tiny eps": (lambda: LayerNorm(WIDTH, eps=1.5625e-7), "RMSNorm", False, 1.5625e-7),
    "large eps": (lambda: nn.LayerNorm(WIDTH, eps=0.1), "LayerNorm", False, 0.1),
    "no bias": (lambda: nn.LayerNorm(WIDTH, bias=False), "LayerNorm", False, 1e-5),
    "default eps": (lambda: nn.RMSNorm(WIDTH), "RMSNorm", False, torch.finfo(torch.float32).eps),
    "llama": (lambda: Llama(WIDTH), "RMSNorm", False, 1e-6),
}


@pytest.mark.parametrize("name", NORMS)
def test_trap_20_a_norm_is_what_it_computes(name: str) -> None:
    make, kind, plus_one, eps = NORMS[name]
    made = pair(One(norm=make()), x_of() * 0.05, fused=1)
    spec: Any = made.record(JOINT).decision.spec
    assert (spec.normalization, spec.zero_centered_gamma) == (kind, plus_one)
    assert spec.eps == pytest.approx(eps, rel=1e-3)
    made.model(x_of())
    assert made.counts(JOINT) == (1, 0)
    assert_near(made.model(x_of() * 1e-3), made.original(x_of() * 1e-3))  # small values: eps decides
    assert_trains_alike(made, x_of() * 0.05, 5e-5)


def test_trap_20_what_only_looks_like_a_norm_is_not_fused() -> None:
    result = te_convert.convert(perturb(One(norm=L2(WIDTH))), (x_of(),), backend="reference")
    assert result.report.site("norm").outcome is not Outcome.FUSED
    assert result.report.parity.passed


def test_trap_21_a_norm_without_a_weight_stays_and_its_readers_share_one_linear() -> None:
    made = pair(One(norm=nn.RMSNorm(WIDTH, elementwise_affine=False)), fused=1)
    assert made.fused == ["a_b"]
    assert_trains_alike(made)


@pytest.mark.parametrize("name", ["RMS called LayerNorm", "1 + w", "llama", "no bias", "odd names"])
def test_trap_21_bfloat16_is_as_near_to_the_exact_result_as_the_original(name: str) -> None:
    make, _, _, _ = NORMS[name]
    model = perturb(One(norm=make())).to(torch.bfloat16)
    made = te_convert.convert(model, (x_of().bfloat16(),), backend="reference")
    assert made.report.parity.passed, made.report
    assert made.report.count(Outcome.FUSED) == 3
    x = x_of(64, 5, WIDTH).bfloat16()
    with torch.no_grad():
        exact = _wide(model)(x.double())
        errors = [float((m(x).double() - exact).square().mean()) for m in (model, made.model)]
    assert errors[1] <= 1.5 * errors[0]


def _wide(model: nn.Module) -> nn.Module:
    wide = copy.deepcopy(model).double()
    norm: Any = wide.get_submodule("norm")
    if isinstance(norm, LayerNorm):
        offset = norm.offset
        norm.__dict__["forward"] = lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * (offset + norm.weight)
    return wide
