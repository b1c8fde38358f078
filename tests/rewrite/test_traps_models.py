"""Traps 13, 18 to 21 and 25 to 28: whose forward is a Linear's, names that mislead, models that make themselves hard to compare.

Traps 23 and 24 (attention functions, padded positions) concern no norm and no Linear; they are proved with the attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_convert
from te_convert.plan.model import Outcome
from te_convert.reasons import ReasonCode
from tests.rewrite.trap_samples import (
    MLP,
    WIDTH,
    Attention,
    Net,
    One,
    assert_near,
    assert_same_gradients,
    assert_trains_alike,
    gradients,
    loss_of,
    pair,
    perturb,
    relative_error,
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
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


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
        self.norm1, self.attn, self.norm2, self.mlp, self.times = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), MLP(), times

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

    fuse = rewrite_apply.fuse

    def forgets(*args: Any) -> Any:
        module, own = fuse(*args)
        module._parameters[lost] = nn.Parameter(module._parameters[lost].detach().clone())
        monkeypatch.setattr(type(module), "te_forward", _with_constant(type(module).te_forward, lost))
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
class LN(nn.Module):
    """nanoGPT's, under a name that says nothing."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.scale, self.shift, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.scale.shape, self.scale, self.shift, self.eps)


class LayerNorm(nn.Module):
    """ImageGPT's: called LayerNorm, an RMS norm."""

    def __init__(self, width: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.ones(width) - offset), eps, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * (self.offset + self.weight)).to(x.dtype)


class Llama(LayerNorm):
    """Rounds before it multiplies by the weight."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


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
        norm.forward = lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * (offset + norm.weight)
    return wide


# ---- 25: originals that do not reproduce themselves ------------------------------------------------------------------
def test_trap_25_numpys_generator_in_the_forward_does_not_revert_anything() -> None:
    def masked(m: Any, x: Tensor) -> Tensor:
        mask = torch.from_numpy(np.random.rand(*x.shape[:2], 1) > 0.5)
        n = m.norm(x * mask)
        out: Tensor = m.a(n) * m.b(n)
        return out

    state = np.random.get_state()  # type: ignore[no-untyped-call]
    made = pair(One(use=masked), fused=1)
    np.random.set_state(state)
    first = made.original(x_of())
    np.random.set_state(state)
    assert_near(made.model(x_of()), first)


def test_trap_25_batch_norm_statistics_are_what_they_were_and_training_moves_them_alike() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        n = m.norm(m.batch(x.transpose(1, 2)).transpose(1, 2))
        out: Tensor = m.a(n) * m.b(n)
        return out

    model = One(use=use, batch=nn.BatchNorm1d(WIDTH)).train()
    mean = model.get_buffer("batch.running_mean").clone()
    made = pair(model, fused=1)
    assert torch.equal(made.model.batch.running_mean, mean)
    assert made.model.batch.num_batches_tracked == 0
    assert_trains_alike(made)
    assert relative_error(made.model.batch.running_mean, made.original.batch.running_mean) <= 1e-6
    assert not torch.equal(made.model.batch.running_mean, mean)


# ---- 26: gradients that are zero in theory ---------------------------------------------------------------------------
def test_trap_26_a_keys_bias_has_no_gradient_but_rounding_in_both_models() -> None:
    made = pair(Net(1), fused=3)
    for model in made.both():
        loss_of(model(x_of())).backward()
    found, expected = gradients(made.model), gradients(made.original)
    name, scale = "blocks.0.attn.k_proj.bias", "blocks.0.attn.v_proj.bias"
    assert expected[name] is not None
    assert found[name] is not None
    assert found[scale] is not None
    assert found[name].abs().max() <= 1e-5 * found[scale].abs().max()
    assert_same_gradients(found, expected)


# ---- 27: parameters without elements ---------------------------------------------------------------------------------
def test_trap_27_parameters_without_elements_beside_a_fusion() -> None:
    model = One()
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    model.register_parameter("tokens", nn.Parameter(torch.zeros(1, 0, WIDTH)))
    made = pair(model, fused=1)
    assert made.model.empty.shape == (0,)
    assert_trains_alike(made)


# ---- 28: is it rounding? ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mlp", [MLP, lambda: MLP(inside=0.1)])
def test_trap_28_in_float64_nothing_is_left_of_the_difference(mlp: Callable[[], nn.Module]) -> None:
    made = pair(Net(2, mlp=mlp).eval(), fused=5)
    for model in made.both():
        model.double()
    assert_trains_alike(made, x_of().double(), 1e-12)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma", "gpt_neox", "vit", "bert", "siglip_vision"])
def test_trap_28_real_models_agree_in_float64_forward_and_backward(name: str) -> None:
    from te_convert.verify.precision import Widen
    from tests.verify.model_zoo import build, cast

    model, inputs = build(name)
    made = pair(model, inputs)
    outputs = []
    for each in made.both():
        each.double()
        with Widen(torch.float64):
            outputs.append(each(**cast(inputs, torch.float64))[0])
            loss_of(outputs[-1]).backward()
    assert sum(made.counts(fqn)[0] for fqn in made.fused) == len(made.fused)
    assert_near(outputs[1], outputs[0], 1e-10)
    assert_same_gradients(gradients(made.model), gradients(made.original), 1e-8)
