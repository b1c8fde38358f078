"""The Linear rule: what it takes, and every near miss with its reasons."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from te_convert.plan.model import Decision, Outcome
from te_convert.replacements.specs import LinearSpec
from te_convert.weights.ops import Move, WeightMap
from tests.rules.rule_cases import Wrapped, build, codes, decide, plan_of, x_like


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2.0


class Same(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.T + self.bias


class Lora(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 4)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        low_rank: Tensor = self.up(self.down(x))
        return super().forward(x) + low_rank


class Merging(nn.Linear):
    ready = True

    def merge(self) -> None: ...

    @property
    def rank(self) -> int:
        return 1


class Gated(nn.Linear):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if gate is None else y * gate


def old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return weight_norm(module)


def integer() -> nn.Module:
    module = nn.Linear(6, 4)
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(parameter.to(torch.int8), requires_grad=False))
    return module


def subclassed() -> nn.Module:
    module = nn.Linear(6, 4)
    module.weight = nn.Parameter(torch.randn(4, 6).as_subclass(Wrapped))
    return module


def quantised() -> nn.Module:
    """What torch makes of a Linear to compute in int8: the weight is packed by C++, and no parameter is left."""
    made: nn.Module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 4)), {nn.Linear})[0]
    return made


def mixed() -> nn.Module:
    module = nn.Linear(6, 4)
    module.bias = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
    return module


FALCON = "transformers.models.falcon.modeling_falcon:FalconLinear"

CONVERTED: dict[str, tuple[Callable[[], nn.Module], LinearSpec]] = {
    "plain": (lambda: nn.Linear(6, 4), LinearSpec(6, 4, True, "float32")),
    "no bias": (lambda: nn.Linear(6, 4, bias=False), LinearSpec(6, 4, False, "float32")),
    "bfloat16": (lambda: nn.Linear(6, 4, dtype=torch.bfloat16), LinearSpec(6, 4, True, "bfloat16")),
    "float16": (lambda: nn.Linear(6, 4, dtype=torch.float16), LinearSpec(6, 4, True, "float16")),
    "proved equal": (lambda: Same(6, 4), LinearSpec(6, 4, True, "float32")),
    "falcon": (lambda: build(FALCON, 6, 4, bias=False), LinearSpec(6, 4, False, "float32")),
    "square": (lambda: nn.Linear(6, 6), LinearSpec(6, 6, True, "float32")),
    "one output": (lambda: nn.Linear(6, 1), LinearSpec(6, 1, True, "float32")),
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("case", sorted(CONVERTED))
def test_converted(case: str, recorded: bool) -> None:
    make, spec = CONVERTED[case]
    module = make()
    decision = decide(module, x_like(dtype=module.weight.dtype) if recorded else None)  # type: ignore[arg-type]
    assert (decision.outcome, decision.rule, decision.kind, decision.spec) == (Outcome.CONVERTED, "linear", "Linear", spec)
    assert decision.replacement == "te.Linear"
    assert codes(decision) == ([] if recorded else ["capture.no-graph"])
    moves = (Move("weight", "weight"), Move("bias", "bias")) if spec.bias else (Move("weight", "weight"),)
    assert decision.weights == WeightMap(moves)
    assert decision.calls == int(recorded)
    assert decision.params == sum(p.numel() for p in module.parameters())
    assert decision.precision == "recipe"


def test_a_root_is_a_site() -> None:
    decision = plan_of(nn.Linear(6, 4), x_like()).get("")
    assert (decision.outcome, decision.fqn, decision.calls) == (Outcome.CONVERTED, "", 1)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "another forward": (lambda: Scaled(6, 4), x_like(), ["module.subclass"]),
    "lora": (Lora, x_like(), ["module.extra-state"]),
    "new weight norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 4)), x_like(), ["module.parametrized"]),
    "old weight norm": (lambda: old_weight_norm(nn.Linear(6, 4)), x_like(), ["module.parametrized"]),
    "new spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(6, 4)), x_like(), ["module.parametrized"]),
    "old spectral norm": (lambda: spectral_norm(nn.Linear(6, 4)), x_like(), ["module.parametrized"]),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(6, 4), "weight", amount=3), x_like(), ["module.parametrized"]),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(6, 6)), x_like(), ["module.parametrized"]),
    "float64": (lambda: nn.Linear(6, 4).double(), x_like(dtype=torch.float64), ["dtype.float64"]),
    "complex": (lambda: nn.Linear(6, 4, dtype=torch.complex64), x_like(dtype=torch.complex64), ["dtype.unsupported"]),
    "int8": (integer, None, ["dtype.unsupported", "capture.no-graph"]),
    "float8": (lambda: nn.Linear(6, 4).to(torch.float8_e4m3fn), None, ["dtype.unsupported", "capture.no-graph"]),
    "empty": (lambda: nn.Linear(6, 0), None, ["parameter.empty", "capture.no-graph"]),
    "tensor subclass": (subclassed, x_like(), ["parameter.tensor-subclass"]),
    "quantised by torch": (quantised, x_like(), ["parameter.tensor-subclass"]),
    "mixed parameters": (mixed, None, ["dtype.mixed", "capture.no-graph"]),
    "public method": (lambda: Merging(6, 4), x_like(), ["module.public-methods"]),
    "lazy": (lambda: nn.LazyLinear(4), x_like(), ["parameter.uninitialized"]),
    "extra argument": (lambda: Gated(6, 4), (x_like(), x_like(4)), ["module.call-arguments"]),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("case", sorted(REFUSED))
@pytest.mark.report("peer:subclass-with-its-own-forward")
def test_near_misses(case: str) -> None:
    make, inputs, expected = REFUSED[case]
    decision = decide(make(), inputs)
    assert decision.outcome is Outcome.REFUSED
    assert decision.replacement is None
    assert codes(decision) == expected
    assert all(reason.detail and reason.hint for reason in decision.reasons)


def detail(decision: Decision) -> str:
    (reason,) = decision.reasons
    return reason.detail


def test_details_say_what_was_seen() -> None:
    assert "differs from F.linear(x, weight, bias)" in detail(decide(Scaled(6, 4), x_like()))
    assert "it has child modules: down, up" in detail(decide(Lora(), x_like()))
    assert detail(decide(Merging(6, 4), x_like())) == "Merging has merge, rank"
    assert detail(decide(subclassed(), x_like())) == "weight is a Wrapped"
    assert detail(decide(Gated(6, 4), (x_like(), x_like(4)))) == "called with 2 positional"


def test_never_called() -> None:
    decision = decide(nn.Linear(6, 4), x_like(), lambda m, x: x * 2)
    assert codes(decision) == ["module.never-called"]
    assert decision.outcome is Outcome.REFUSED


def test_weight_read_past_the_module() -> None:
    decision = decide(nn.Linear(6, 4), x_like(), lambda m, x: F.linear(x, m.site.weight, m.site.bias))
    assert codes(decision) == ["module.weight-read-elsewhere"]
    assert detail(decision) == "site.weight is read by linear in the model"
    timm = plan_of(build_beit(), torch.randn(2, 3, 32, 32))
    assert codes(timm.get("blocks.0.attn.qkv")) == ["module.weight-read-elsewhere"]
    assert timm.get("blocks.0.attn.proj").outcome is Outcome.CONVERTED


def build_beit() -> nn.Module:
    return build("timm:create_model", "beit_base_patch16_224", img_size=32, embed_dim=32, depth=1, num_heads=4)


def test_weight_also_read_elsewhere_is_an_advice() -> None:
    decision = decide(nn.Linear(6, 4), x_like(), lambda m, x: m.site(x).sum() + m.site.weight.square().sum())
    assert (decision.outcome, codes(decision)) == (Outcome.CONVERTED, ["module.weight-also-read"])


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.report("pytorch/pytorch#58969", "peer:attention-out-proj")
def test_out_proj_of_multihead_attention(recorded: bool) -> None:
    attention = nn.MultiheadAttention(8, 2)
    x = torch.randn(3, 1, 8)
    plan = plan_of(attention, (x, x, x) if recorded else None, fuse=False)
    assert plan.get("out_proj").outcome is Outcome.REFUSED
    assert codes(plan.get("out_proj"))[0] == "module.weight-read-elsewhere"


def test_mixed_dtypes_of_input_and_parameters() -> None:
    def cast(m: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.site(x.bfloat16())

    decision = decide(nn.Linear(6, 4), x_like(), cast)
    assert codes(decision) == ["dtype.mixed"]
    assert detail(decision) == "parameters are float32, recorded inputs bfloat16"


def test_ties_are_kept() -> None:
    embedding, head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    plan = plan_of(model, torch.tensor([[1, 2]]))
    assert (plan.get("1").outcome, codes(plan.get("1"))) == (Outcome.CONVERTED, [])
    assert plan.params_total == 60


def test_a_shared_module_is_one_site_with_aliases() -> None:
    shared = nn.Linear(6, 6)
    plan = plan_of(nn.Sequential(shared, nn.ReLU(), shared), x_like())
    (decision,) = plan.decisions
    assert (decision.fqn, decision.aliases, decision.calls, decision.outcome) == ("0", ("2",), 2, Outcome.CONVERTED)
    assert plan.get("2") is decision


@pytest.mark.parametrize(
    ("sizes", "rows", "recipe", "expected", "precision"),
    [
        ((32, 64), 32, None, [], "recipe"),
        ((32, 64), 32, "fp8", [], "recipe"),
        ((6, 4), 32, "bf16", [], "recipe"),
        ((32, 50), 32, "fp8-current", ["alignment.features"], "high"),
        ((33, 64), 32, "fp8-current", ["alignment.features"], "high"),
        ((32, 64), 7, "fp8-current", ["alignment.rows"], "recipe"),
        ((16, 16), 16, "fp8-delayed", [], "recipe"),
        ((16, 16), 16, "mxfp8", ["alignment.features", "alignment.rows"], "high"),
    ],
)
def test_alignment_is_an_advice_and_needs_a_recipe(
    sizes: tuple[int, int], rows: int, recipe: str | None, expected: list[str], precision: str
) -> None:
    decision = decide(nn.Linear(*sizes), x_like(sizes[0], rows=rows), recipe=recipe)
    assert (decision.outcome, codes(decision), decision.precision) == (Outcome.CONVERTED, expected, precision)


def test_details_of_alignment() -> None:
    decision = decide(nn.Linear(33, 50), x_like(33, rows=7), recipe="fp8-current")
    assert [reason.detail for reason in decision.reasons] == [
        "in 33, out 50: not a multiple of 16",
        "7 rows recorded, the recipe needs a multiple of 16",
    ]


@pytest.mark.parametrize("bias", [True, False])
def test_all_reasons_at_once(bias: bool) -> None:
    module = parametrizations.weight_norm(nn.Linear(6, 4, bias=bias).double())
    decision = decide(module, x_like(), lambda m, x: x * 2)
    assert set(codes(decision)) == {"dtype.float64", "module.parametrized", "module.never-called"}
    merging = decide(Merging(6, 4).double(), x_like(), lambda m, x: x * 2)
    assert set(codes(merging)) == {"dtype.float64", "module.public-methods", "module.never-called"}


@pytest.mark.parametrize("case", sorted(set(REFUSED) - {"lazy", "empty", "int8", "float8", "mixed parameters"}))
@pytest.mark.filterwarnings("ignore")
def test_planning_leaves_the_module_alone(case: str) -> None:
    make, inputs, _ = REFUSED[case]
    module = make()
    attributes = dict(vars(module))
    values = {name: (id(p), p.detach().clone()) for name, p in module.named_parameters()}
    decide(module, inputs)
    assert vars(module) == attributes
    assert all(id(p) == values[name][0] and torch.equal(p, values[name][1]) for name, p in module.named_parameters())
