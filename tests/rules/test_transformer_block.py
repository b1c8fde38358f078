"""Hand-written blocks: what is proved equal becomes te.TransformerLayer; a near miss stays in parts, silently or with reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_convert.plan.model import Outcome, Plan
from te_convert.replacements.specs import TransformerLayerSpec
from te_convert.weights.ops import Concat, Fill, Move, SwapHalves
from tests.rewrite.block_samples import FFN, HEADS, MLP, WIDTH, Attention, Block, GatedMLP, X, floats
from tests.rewrite.rewrite_samples import perturb
from tests.rules.rule_cases import codes, plan_of

SPEC = TransformerLayerSpec(
    WIDTH, FFN, HEADS, 1e-5, True, "gelu", "LayerNorm", False, False, False, "encoder", "bshd", "causal", "float32"
)


def plan(block: nn.Module, x: Tensor = X, **options: Any) -> Plan:
    return plan_of(nn.Sequential(perturb(block)).eval(), (x,), **options)


def fused(block: nn.Module, **options: Any) -> Any:
    (fusion,) = plan(block, **options).fusions
    assert (fusion.fqn, fusion.rule) == ("0", "transformer-block")
    return fusion


FORMS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "pre": (Block, {}),
    "post": (lambda: Block("post"), {"post_layernorm": True}),
    "parallel": (lambda: Block("parallel"), {"parallel_attention_mlp": True}),
    "not causal": (lambda: Block(causal=False), {"self_attn_mask_type": "no_mask"}),
    "RMSNorm": (lambda: Block(norm=nn.RMSNorm), {"normalization": "RMSNorm"}),
    "eps": (lambda: Block(eps=(1e-3, 1e-3)), {"eps": 1e-3}),
    "no bias": (lambda: Block(bias=False, mlp=MLP(bias=False)), {"bias": False}),
    "relu": (lambda: Block(mlp=MLP("relu")), {"activation": "relu"}),
    "quick gelu": (lambda: Block(mlp=MLP("qgelu")), {"activation": "qgelu"}),
    "silu": (lambda: Block(mlp=MLP("silu")), {"activation": "silu"}),
    "swiglu": (lambda: Block(mlp=GatedMLP()), {"activation": "swiglu"}),
    "packed swiglu": (lambda: Block(mlp=MLP("silu", "first")), {"activation": "swiglu"}),
    "packed swiglu, swapped": (lambda: Block(mlp=MLP("silu", "second")), {"activation": "swiglu"}),
    "packed reglu": (lambda: Block(mlp=MLP("relu", "first")), {"activation": "reglu"}),
}


@pytest.mark.parametrize("name", sorted(FORMS))
def test_every_form(name: str) -> None:
    make, changes = FORMS[name]
    assert fused(make()).spec == replace(SPEC, **changes)


def test_low_precision_says_its_dtype() -> None:
    (fusion,) = plan(Block().bfloat16(), X.bfloat16()).fusions
    assert fusion.spec == replace(SPEC, dtype="bfloat16")


def test_weights_of_each_form() -> None:
    attention = "self_attention.layernorm_qkv."
    ops = fused(Block()).weights.ops
    assert Move("attn.c_attn.weight", f"{attention}weight") in ops
    assert Move("ln_1.weight", f"{attention}layer_norm_weight") in ops
    assert Move("ln_2.bias", "layernorm_mlp.layer_norm_bias") in ops
    rows = (WIDTH,) * 3
    assert (
        Concat(("attn.q.weight", "attn.k.weight", "attn.v.weight"), f"{attention}weight", rows)
        in fused(Block(split=True)).weights.ops
    )
    ops = fused(Block("post")).weights.ops
    assert Move("ln_1.weight", "layernorm_mlp.layer_norm_weight") in ops
    assert Move("ln_2.weight", "layernorm.weight") in ops
    ops = fused(Block(mlp=GatedMLP())).weights.ops
    assert Concat(("mlp.gate.weight", "mlp.up.weight"), "layernorm_mlp.fc1_weight", (FFN, FFN)) in ops
    ops = fused(Block(mlp=MLP("silu", "second"))).weights.ops
    assert SwapHalves("mlp.c_fc.weight", "layernorm_mlp.fc1_weight") in ops
    ops = fused(Block(norm=lambda width, eps: nn.LayerNorm(width, eps, bias=False))).weights.ops
    assert Fill("layernorm_mlp.layer_norm_bias", 0.0, WIDTH) in ops


class NanoBlock(Block):
    """With nanoGPT's dropouts at zero."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Any:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class InPlace(Block):
    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.ln_1(x))
        x += self.mlp(self.ln_2(x))
        return x


class OtherOrder(Block):
    """The same sums written the other way round."""

    def forward(self, x: Tensor) -> Any:
        y = torch.add(self.attn(self.ln_1(x)), x)
        return self.mlp(self.ln_2(y)).add(y)


def test_transformers_and_timms_blocks() -> None:
    timm = pytest.importorskip("timm")
    block = timm.models.vision_transformer.Block(WIDTH, 2, 2.0, qkv_bias=True, act_layer=nn.ReLU)
    assert fused(block).spec == replace(SPEC, activation="relu", self_attn_mask_type="no_mask", eps=1e-6)


# ---- near misses -----------------------------------------------------------------------------------------------------
class Scaled(Block):
    """The residual branch counts half."""

    def forward(self, x: Tensor) -> Any:
        x = x + 0.5 * self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Alpha(Block):
    def forward(self, x: Tensor) -> Any:
        x = torch.add(x, self.attn(self.ln_1(x)), alpha=2)
        return x + self.mlp(self.ln_2(x))


class LayerScale(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Any:
        x = x + self.gamma * self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ExtraParameter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(2))


class OwnBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))


class Masked(Block):
    """A causal mask as an argument of the attention."""

    def __init__(self) -> None:
        super().__init__(causal=False)

    def forward(self, x: Tensor) -> Any:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


class TakesAMask(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return super().forward(x) if mask is None else super().forward(x * mask)


class GroupedHeads(nn.Module):
    """One head of keys and values for two of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 8),
            nn.Linear(WIDTH, 8),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Any:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, 2, 8).transpose(1, 2)
        k, v = (part(x).view(batch, length, 1, 8).transpose(1, 2) for part in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return out


class NormedQueries(Attention):
    """A norm on queries and keys, without parameters."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, 2, 8).transpose(1, 2) for t in self.c_attn(x).split(WIDTH, 2))
        y = F.scaled_dot_product_attention(F.normalize(q, dim=-1), k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return out


class OtherOrderOfHeads(Attention):
    """Rows of the packed matrix by head: (q, k, v) of the first, then of the second."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        batch, length, _ = x.shape
        packed = self.c_attn(x).view(batch, length, 2, 3, 8).permute(3, 0, 2, 1, 4)
        q, k, v = packed.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return out


class Swapped(Attention):
    """Values first."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        batch, length, _ = x.shape
        v, k, q = (t.view(batch, length, 2, 8).transpose(1, 2) for t in self.c_attn(x).split(WIDTH, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return out


class OneNorm(Block):
    def __init__(self) -> None:
        super().__init__("parallel")
        del self.ln_2

    def forward(self, x: Tensor) -> Any:
        h = self.ln_1(x)
        return x + self.attn(h) + self.mlp(h)


class NormOfInput(Block):
    """The second norm reads the block's input, and its residual is the first sum."""

    def forward(self, x: Tensor) -> Any:
        h = self.ln_1(x)
        return h + self.attn(h) + self.mlp(self.ln_2(x))


class FunctionalDropout(Block):
    def forward(self, x: Tensor) -> Any:
        x = x + F.dropout(self.attn(self.ln_1(x)), 0.1, self.training)
        return x + self.mlp(self.ln_2(x))


class NoFunctionalDropout(Block):
    """With p = 0, as nanoGPT's configuration for pretraining."""

    def forward(self, x: Tensor) -> Any:
        x = x + F.dropout(self.attn(self.ln_1(x)), 0.0, self.training)
        return x + self.mlp(self.ln_2(x))


class DroppingMLP(MLP):
    def forward(self, x: Tensor) -> Any:
        hidden = F.gelu(self.c_fc(x), approximate="tanh")
        out: Tensor = self.c_proj(F.dropout(hidden, p=0.1, training=self.training))
        return out


class Reads(Block):
    """Something besides the sum reads what is inside."""

    def forward(self, x: Tensor) -> Any:
        y: Tensor = super().forward(x)
        return y * 1.5


def with_attention(attention: nn.Module) -> nn.Module:
    block = Block()
    block.attn = attention  # type: ignore[assignment]
    return block


def tied() -> nn.Module:
    block = Block()
    block.ln_2.weight = block.ln_1.weight
    return block


def half_frozen() -> Any:
    block: Any = Block(split=True)
    block.attn.k.weight.requires_grad_(False)
    return block


def hooked() -> Any:
    block: Any = Block()
    block.mlp.c_fc.register_forward_hook(lambda *_: None)
    return block


def named() -> nn.Module:
    block = Block()
    block.layernorm = nn.Identity()
    return block


def flagged() -> nn.Module:
    """An attribute that would hide a child of TE's layer."""
    block = Block()
    block.self_attention = True  # type: ignore[assignment]
    return block


def patched() -> Any:
    block: Any = Block()
    block.mlp.forward = block.mlp.forward
    return block


MISSES: dict[str, tuple[Callable[[], nn.Module], list[str] | None]] = {
    "scaled residual": (Scaled, None),
    "residual with alpha": (Alpha, None),
    "LayerScale": (LayerScale, None),
    "mask argument": (Masked, None),
    "grouped heads": (lambda: with_attention(GroupedHeads()), None),
    "normed queries": (lambda: with_attention(NormedQueries()), None),
    "residual after the norm": (NormOfInput, None),
    "scaled output": (Reads, None),
    "scale of the scores": (lambda: Block(scale=0.3), ["block.form"]),
    "rows by head": (lambda: with_attention(OtherOrderOfHeads()), ["block.form"]),
    "values first": (lambda: with_attention(Swapped()), ["block.form"]),
    "one norm": (OneNorm, ["block.form"]),
    "other eps": (lambda: Block(eps=(1e-5, 1e-6)), ["block.form"]),
    "other eps, post": (lambda: Block("post", eps=(1e-5, 1e-6)), ["block.form"]),
    "some biases": (lambda: Block(bias=False), ["block.form"]),
    "extra parameter": (ExtraParameter, ["block.form"]),
    "own buffer": (OwnBuffer, ["block.form"]),
    "tied norms": (tied, ["block.form"]),
    "one of three frozen": (half_frozen, ["block.form"]),
    "hook inside": (hooked, ["module.hooks"]),
    "child with a name of TE's": (named, ["block.form"]),
    "attribute with a name of TE's": (flagged, ["block.form"]),
    "forward replaced": (patched, ["block.form"]),
    "dropout": (lambda: NanoBlock(0.1), ["block.dropout"]),
    "dropout by function": (FunctionalDropout, ["block.dropout"]),
    "dropout by function in the mlp": (lambda: Block(mlp=DroppingMLP()), ["block.dropout"]),
    "exact gelu": (lambda: Block(mlp=MLP("gelu")), ["activation.gelu-erf"]),
    "several": (lambda: Block(eps=(1e-5, 1e-6), mlp=MLP("gelu", bias=False)), ["activation.gelu-erf", "block.form", "block.form"]),
}


@pytest.mark.parametrize("name", sorted(MISSES))
def test_near_misses(name: str) -> None:
    make, expected = MISSES[name]
    found = plan(make())
    assert "0" not in [fusion.fqn for fusion in found.fusions]
    decisions = {decision.fqn: decision for decision in found.decisions}
    if expected is None:
        assert "0" not in decisions or not {"block.form", "block.dropout"} & set(codes(decisions["0"]))
        return
    assert (decisions["0"].outcome, sorted(codes(decisions["0"]))) == (Outcome.NO_MATCH, expected)


@pytest.mark.parametrize("cls", [NanoBlock, InPlace, OtherOrder, NoFunctionalDropout])
def test_ways_of_writing_the_same(cls: Callable[[], nn.Module]) -> None:
    assert fused(cls()).spec == SPEC


def test_a_near_miss_converts_in_parts() -> None:
    found = plan(Scaled())
    outcomes = {decision.fqn: decision.outcome for decision in found.decisions}
    assert all(outcomes[f"0.{name}"] is Outcome.FUSED for name in ("ln_1", "attn.c_attn", "ln_2", "mlp.c_fc", "mlp.c_proj"))
    assert outcomes["0.attn.c_proj"] is Outcome.CONVERTED


def test_one_odd_block_among_equals() -> None:
    """Equal blocks are proved once, and the odd one is not taken for them."""
    model = nn.Sequential(Block(), Block(), Block(scale=0.3), Block(causal=False))
    found = plan_of(perturb(model).eval(), (X,))
    whole = {fusion.fqn: fusion.spec for fusion in found.fusions if fusion.rule == "transformer-block"}
    assert whole == {"0": SPEC, "1": SPEC, "3": replace(SPEC, self_attn_mask_type="no_mask")}
    assert codes(found.get("2")) == ["block.form"]


def test_calls_that_differ() -> None:
    class Either(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) if x.shape[1] > 2 else x + self.attn(self.ln_1(x))

    found = plan_of(nn.Sequential(perturb(Either())).eval(), [(X,), (X[:, :2],)])
    assert "0" not in [fusion.fqn for fusion in found.fusions]


def test_a_dependence_on_the_length_is_seen() -> None:
    class Short(Attention):
        """Causal for long inputs only; the proof's second input has half the length."""

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
            self.causal = x.shape[1] > 4
            return super().forward(x, mask)

    found = plan(with_attention(Short()))
    assert codes(found.get("0")) == ["block.form"]


def test_a_block_with_a_mask_or_a_keyword_is_silent() -> None:
    class Outer(nn.Module):
        def __init__(self, by_name: bool) -> None:
            super().__init__()
            self.block, self.by_name = TakesAMask(), by_name

        def forward(self, x: Tensor) -> Any:
            return self.block(x=x) if self.by_name else self.block(x, torch.ones(1))

    for by_name in (True, False):
        found = plan_of(perturb(Outer(by_name)).eval(), (X,))
        assert "block" not in [fusion.fqn for fusion in found.fusions]


def test_allowed_approximation_recipe_and_options() -> None:
    block = Block(mlp=MLP("gelu"))
    fusion = fused(block, allow=("gelu-tanh",))
    assert (fusion.approximation, fusion.spec) == ("gelu-tanh", SPEC)
    assert codes(plan(block, allow=("gelu-tanh",)).get("0")) == ["activation.approximated"]
    assert fused(Block(), recipe="fp8").precision == "high"
    for options in ({"exclude": ("0.mlp.c_fc",)}, {"exclude": ("0",)}, {"include": ("0.ln_1",)}, {"fuse": False}):
        assert "transformer-block" not in [found.rule for found in plan(Block(), **options).fusions]


def test_on_meta_nothing_is_proved() -> None:
    found = plan_of(nn.Sequential(Block()).eval().to("meta"), (floats(2, 5, WIDTH).to("meta"),))
    assert "0" not in [fusion.fqn for fusion in found.fusions]
    assert "block.form" in codes(found.get("0"))


def test_the_proof_leaves_the_model_and_the_random_state_alone() -> None:
    model = nn.Sequential(perturb(Block())).train()
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    assert plan_of(model, (X,)).fusions
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.grad is None
