"""The norm-mlp rule: a norm and the MLP module behind it become one te.LayerNormMLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_convert
from te_convert.plan.model import Outcome
from te_convert.reference.activations import ACTIVATION_NAMES, is_gated
from te_convert.replacements.specs import LayerNormMLPSpec
from te_convert.weights.ops import Concat, Move, SwapHalves, Transpose
from tests.rewrite.trap_parts import Feed, LayerNorm, Llama, WithResidual, with_residual
from tests.rewrite.trap_samples import FFN, MLP, WIDTH, x_of
from tests.rules.fusion_cases import (
    Mistake,
    assert_caught,
    attribute,
    codes_of,
    fusion_of,
    planned,
    proved,
    rolled,
    zeroed,
)

Act = Callable[[Tensor], Tensor]


class Plain(nn.Module):
    """fc2(act(fc1(x)))."""

    def __init__(self, act: Act, fc1: nn.Module | None = None, fc2: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = fc1 or nn.Linear(WIDTH, FFN), fc2 or nn.Linear(FFN, WIDTH)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Gated(nn.Module):
    """down(act(gate(x)) * up(x)), the two in either order of definition, call and product."""

    def __init__(self, act: Callable[..., Tensor], bias: bool = False, first: str = "gate", pairwise: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in ("gate", "up") if first == "gate" else ("up", "gate"):
            self.add_module(name, nn.Linear(WIDTH, FFN, bias=bias))
        self.down = nn.Linear(FFN, WIDTH, bias=bias)
        self.act, self.first, self.pairwise = act, first, pairwise

    def forward(self, x: Tensor) -> Tensor:
        own: Any = self
        if self.first == "gate":
            gate, up = own.gate(x), own.up(x)
        else:
            up, gate = own.up(x), own.gate(x)
        if self.pairwise:
            y = self.act(gate, up)
        elif self.first == "gate":
            y = self.act(gate) * up
        else:
            y = up * self.act(gate)
        out: Tensor = self.down(y)
        return out


class Packed(nn.Module):
    """One matrix for gate and up; ``activated`` says which half is the gate."""

    def __init__(self, act: Act, activated: int, fc1: nn.Module | None = None, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = fc1 or nn.Linear(WIDTH, 2 * FFN, bias=bias), nn.Linear(FFN, WIDTH, bias=bias)
        self.act, self.activated = act, activated

    def forward(self, x: Tensor) -> Tensor:
        halves = self.fc1(x).chunk(2, -1)
        out: Tensor = self.fc2(self.act(halves[self.activated]) * halves[1 - self.activated])
        return out


def conv1d(out: int, width: int) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(out, width)  # type: ignore[no-any-return]


def gelu_written_out(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh((2.0 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss: both clamped, one added to the linear half."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


PLAIN: dict[str, Act] = {
    "gelu": gelu_written_out,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": lambda x: torch.clamp(x, min=0),
    "srelu": lambda x: torch.relu(x) ** 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
}
GATED: dict[str, Callable[..., Tensor]] = {
    "geglu": lambda x: F.gelu(x, approximate="tanh"),
    "qgeglu": lambda x: x * torch.sigmoid(1.702 * x),
    "reglu": torch.relu,
    "sreglu": lambda x: torch.relu(x).square(),
    "swiglu": F.silu,
    "glu": torch.sigmoid,
    "clamped_swiglu": clamped,
}


def test_the_cases_are_all_activations_of_te() -> None:
    assert {*PLAIN, *GATED} == set(ACTIVATION_NAMES)
    assert {name for name in ACTIVATION_NAMES if is_gated(name)} == set(GATED)


def spec_of(plan: Any) -> LayerNormMLPSpec:
    spec = fusion_of(plan, "norm-mlp").spec
    assert isinstance(spec, LayerNormMLPSpec)
    return spec


@pytest.mark.parametrize("name", PLAIN)
def test_plain_activations_by_what_they_compute(name: str) -> None:
    plan = proved(Feed(Plain(PLAIN[name])))
    spec = spec_of(plan)
    assert (spec.activation, spec.hidden_size, spec.ffn_hidden_size, spec.bias) == (name, WIDTH, FFN, True)
    assert fusion_of(plan, "norm-mlp").fqn == "mlp"
    assert [plan.get(fqn).outcome for fqn in ("norm", "mlp.fc1", "mlp.fc2")] == [Outcome.FUSED] * 3


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("first", ["gate", "up"])
@pytest.mark.parametrize("bias", [True, False])
def test_gated_activations_in_either_order(name: str, first: str, bias: bool) -> None:
    plan = proved(Feed(Gated(GATED[name], bias, first, pairwise=name == "clamped_swiglu")))
    assert spec_of(plan).activation == name
    fc1 = fusion_of(plan, "norm-mlp").weights.ops[2]
    assert fc1 == Concat(("mlp.gate.weight", "mlp.up.weight"), "fc1_weight", (FFN, FFN))


@pytest.mark.parametrize("name", [name for name in GATED if name != "clamped_swiglu"])
@pytest.mark.parametrize("activated", [0, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_gate_and_up_in_either_order(name: str, activated: int, bias: bool) -> None:
    plan = proved(Feed(Packed(GATED[name], activated, bias=bias)))
    assert spec_of(plan).activation == name
    fc1 = fusion_of(plan, "norm-mlp").weights.ops[2]
    assert fc1 == (Move if activated == 0 else SwapHalves)("mlp.fc1.weight", "fc1_weight")


@pytest.mark.parametrize("activated", [0, 1])
def test_packed_conv1d(activated: int) -> None:
    plan = proved(Feed(Packed(F.silu, activated, fc1=conv1d(2 * FFN, WIDTH))))
    fc1 = fusion_of(plan, "norm-mlp").weights.ops[2]
    source, dest = "mlp.fc1.weight", "fc1_weight"
    assert fc1 == (Transpose(source, dest) if activated == 0 else SwapHalves(source, dest, transposed=True))


def test_conv1d_weights_are_transposed() -> None:
    plan = proved(Feed(Plain(torch.relu, conv1d(FFN, WIDTH), conv1d(WIDTH, FFN))))
    ops = fusion_of(plan, "norm-mlp").weights.ops
    assert Transpose("mlp.fc1.weight", "fc1_weight") in ops
    assert Transpose("mlp.fc2.weight", "fc2_weight") in ops


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.LayerNorm(WIDTH, bias=False),
        lambda: nn.RMSNorm(WIDTH, eps=1e-6),
        lambda: Llama(WIDTH),
        lambda: LayerNorm(WIDTH, offset=1.0),
    ],
    ids=["no bias", "RMSNorm", "Llama", "1 + w"],
)
def test_norms(norm: Callable[[], nn.Module]) -> None:
    model = Feed(Gated(F.silu))
    model.norm = norm()  # type: ignore[assignment]
    spec_of(proved(model))


@pytest.mark.parametrize("frozen", ["norm", "mlp", "mlp.fc2"])
def test_frozen_parameters_stay_frozen(frozen: str) -> None:
    model = Feed(Plain(torch.relu))
    model.get_submodule(frozen).requires_grad_(False)
    assert spec_of(proved(model)).activation == "relu"


def test_nested_owners_and_dropouts_are_part_of_it() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.drop = MLP(inside=0.1, after=0.1), nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.drop(self.body(x))
            return out

    fusion = fusion_of(proved(Feed(Outer()).eval()), "norm-mlp")
    assert fusion.fqn == "mlp"
    roles = [(member.role, member.fqn) for member in fusion.members]
    assert ("dropout-inside", "mlp.body.inner") in roles
    assert [fqn for role, fqn in roles if role == "dropout-after"] == ["mlp.body.outer", "mlp.drop"]


def test_a_sequential_is_an_owner() -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(WIDTH, FFN), nn.SiLU(), nn.Linear(FFN, WIDTH))
    assert spec_of(proved(Feed(mlp))).activation == "silu"


# ---- erf GELU --------------------------------------------------------------------------------------------------------
def test_erf_gelu_is_refused_and_its_first_linear_fuses() -> None:
    plan = proved(Feed(Plain(F.gelu)))
    assert codes_of(plan, "mlp.fc1") == ["activation.gelu-erf"]
    (fusion,) = plan.fusions
    assert (fusion.rule, fusion.fqn) == ("norm-linear", "mlp.layernorm_fc1")
    plan = planned(Feed(Gated(F.gelu)))
    assert "activation.gelu-erf" in codes_of(plan, "mlp.gate")


def test_erf_gelu_that_is_allowed_is_in_the_plan_as_an_approximation() -> None:
    result = te_convert.convert(Feed(Plain(F.gelu)), (x_of(),), backend="reference", allow="gelu-tanh", verify=False)
    fusion = fusion_of(result.plan, "norm-mlp")
    assert fusion.approximation == "gelu-tanh"
    assert codes_of(result.plan, "mlp.fc1") == ["activation.approximated"]


def test_an_idle_dropout_that_is_called_as_a_function_is_no_part_of_it() -> None:
    class Idle(Plain):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc2(F.dropout(self.act(self.fc1(x)), 0.0, self.training))
            return out

    model = Feed(Idle(torch.relu))
    assert not [m for m in fusion_of(proved(model), "norm-mlp").members if m.role == "dropout-inside"]
    result = te_convert.convert(model, (x_of(),), backend="reference")
    assert result.report.parity.passed
    assert result.plan.fusions


# ---- near misses -----------------------------------------------------------------------------------------------------
class Functional(Plain):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.dropout(self.act(self.fc1(x)), 0.1, self.training))
        return out


class Scaled(Plain):
    """Holds one more parameter, behind the last Linear."""

    def __init__(self) -> None:
        super().__init__(torch.relu)
        self.gain = nn.Parameter(torch.ones(WIDTH))


class Returned(Plain):
    """Also returns what is inside."""

    def forward(self, x: Tensor) -> Any:
        y = self.act(self.fc1(x))
        return self.fc2(y), y


def replaced() -> nn.Module:
    mlp = Plain(torch.relu)
    mlp.forward = mlp.forward  # type: ignore[method-assign]
    return mlp


def hooked(name: str) -> nn.Module:
    mlp = MLP()
    mlp.get_submodule(name).register_forward_hook(lambda m, a, y: None)
    return mlp


def mixed_flags() -> nn.Module:
    mlp = Gated(F.silu)
    mlp.get_submodule("gate").requires_grad_(False)
    return mlp


def learned() -> nn.Module:
    mlp = Plain(torch.relu)
    mlp.act = nn.PReLU()
    return mlp


NEAR_MISSES: dict[str, tuple[Callable[[], nn.Module], str, list[str]]] = {
    "bias in one only": (lambda: Plain(torch.relu, fc1=nn.Linear(WIDTH, FFN, bias=False)), "mlp.fc1", ["mlp.bias"]),
    "another width out": (lambda: Plain(torch.relu, fc2=nn.Linear(FFN, 2 * WIDTH)), "mlp.fc1", ["mlp.shape"]),
    "gate frozen, up not": (mixed_flags, "mlp.gate", ["mlp.flags"]),
    "dropout as a function": (lambda: Functional(torch.relu).train(), "mlp.fc1", ["mlp.dropout"]),
    "another parameter": (Scaled, "mlp.fc1", ["mlp.no-owner"]),
    "two results": (lambda: Returned(torch.relu), "mlp.fc1", ["mlp.no-owner"]),
    "forward replaced": (replaced, "mlp.fc1", ["mlp.no-owner"]),
    "hook on fc1": (lambda: hooked("fc1"), "mlp.fc1", ["module.hooks"]),
    "hook on the activation": (lambda: hooked("act"), "mlp.fc1", ["module.hooks"]),
    "an activation TE lacks": (lambda: Plain(torch.tanh), "mlp.fc1", []),
    "leaky": (lambda: Plain(lambda x: F.leaky_relu(x, 1e-3)), "mlp.fc1", []),
    "a learned activation": (learned, "mlp.fc1", []),
    "several": (
        lambda: Plain(F.gelu, nn.Linear(WIDTH, FFN, bias=False), nn.Linear(FFN, 3)),
        "mlp.fc1",
        ["mlp.bias", "mlp.shape", "activation.gelu-erf"],
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name: str) -> None:
    make, fqn, codes = NEAR_MISSES[name]
    model = Feed(make(), lambda m, x: _first(m.mlp(m.norm(x))))
    plan = planned(model)
    assert codes_of(plan, fqn) == codes
    assert {fusion.rule for fusion in plan.fusions} <= {"norm-linear"}
    assert plan.get("norm").outcome is Outcome.FUSED
    assert all(reason.detail for reason in plan.get(fqn).reasons)


def _first(y: Any) -> Tensor:
    first: Tensor = y[0] if isinstance(y, tuple) else y
    return first


def test_more_arguments_than_the_norms_output_make_no_owner() -> None:
    plan = planned(Feed(WithResidual(), with_residual))
    assert codes_of(plan, "mlp.fc1") == ["mlp.no-owner"]


def test_an_mlp_without_a_module_of_its_own() -> None:
    class Inline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.fc2(torch.relu(self.fc1(self.norm(x))))
            return out

    plan = proved(Inline())
    assert codes_of(plan, "fc1") == ["mlp.no-owner"]
    assert fusion_of(plan, "norm-linear").fqn == "layernorm_fc1"


def test_gate_and_up_from_different_norms_are_no_mlp() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.other, self.mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Gated(F.silu)

        def forward(self, x: Tensor) -> Tensor:
            mlp: Any = self.mlp
            out: Tensor = mlp.down(F.silu(mlp.gate(self.norm(x))) * mlp.up(self.other(x)))
            return out

    plan = proved(Two(), fused=2)
    assert {fusion.rule for fusion in plan.fusions} == {"norm-linear"}


# ---- mistakes --------------------------------------------------------------------------------------------------------
MISTAKES: dict[str, Mistake] = {
    "halves swapped": rolled("fc1_weight", FFN),
    "biases of the halves swapped": rolled("fc1_bias", FFN),
    "fc1 bias lost": zeroed("fc1_bias"),
    "fc2 bias lost": zeroed("fc2_bias"),
    "norm bias lost": zeroed("layer_norm_bias"),
    "one row of fc2 moved": rolled("fc2_weight", 1),
    "eps x 10": attribute("eps", lambda eps: eps * 10),
    "1 + w": attribute("zero_centered_gamma", lambda on: not on),
    "another activation": attribute("activation", lambda _: "geglu"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("model", [lambda: Gated(F.silu, bias=True), lambda: Packed(F.silu, 1)], ids=["separate", "packed"])
def test_the_verifier_catches_a_mistake(name: str, model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(monkeypatch, Feed(model()), MISTAKES[name], "mlp")


def test_the_verifier_catches_a_lost_one_plus_w(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Feed(Gated(F.silu))
    model.norm = LayerNorm(WIDTH, offset=1.0)  # type: ignore[assignment]
    assert_caught(monkeypatch, model, attribute("zero_centered_gamma", lambda on: not on), "mlp")


def test_an_mlp_that_was_recorded_on_nothing_fails_no_rule() -> None:
    """A part for tokens of a kind that the example has none of (Higgs Audio)."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp, self.out = nn.RMSNorm(WIDTH), Gated(F.silu), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
            y: Tensor = self.out(x)
            rest: Tensor = self.mlp(self.norm(x[chosen]))
            return y + rest.sum()

    report = te_convert.analyze(Part().eval(), (torch.randn(3, WIDTH), torch.zeros(3, dtype=torch.bool)))
    assert [why.detail for site in report.sites for why in site.reasons if why.code == "fusion.failed"] == []
