"""Mistakes that a whole-module fusion could make, planted after the rewrite: verification must find each and put the site back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_convert
from te_convert.capture.scenario import normalize_inputs
from te_convert.rewrite import blocks
from te_convert.rewrite.apply import Applied
from te_convert.rewrite.loans import holder_of
from te_convert.verify.gate import verify_applied
from te_convert.verify.model import Parity
from te_convert.verify.reference import record_reference
from tests.rewrite.block_samples import (
    HEADS,
    MEMORY,
    WIDTH,
    Attends,
    Block,
    Experts,
    MoE,
    X,
    convert,
    decoder_layer,
    encoder_layer,
    records,
)
from tests.rewrite.rewrite_samples import perturb, rewritten

Change = Callable[[Any], None]


def change(name: str, function: Callable[[Tensor], Tensor]) -> Change:
    """Another Parameter in place of one of the TE module's, so that the original's own stays right."""

    def plant(module: nn.Module) -> None:
        holder, leaf = holder_of(module, name)
        parameter = holder._parameters[leaf]
        assert parameter is not None
        holder._parameters[leaf] = nn.Parameter(function(parameter.detach().clone()))

    return plant


def rolled(rows: int, start: int = 0) -> Callable[[Tensor], Tensor]:
    """Two neighbouring blocks of rows in the other order."""
    return lambda t: torch.cat([t[:start], t[start + rows : start + 2 * rows], t[start : start + rows], t[start + 2 * rows :]])


def exchanged(first: str, second: str) -> Change:
    def plant(module: nn.Module) -> None:
        places = [holder_of(module, name) for name in (first, second)]
        values = [holder._parameters[leaf] for holder, leaf in places]
        for (holder, leaf), value in zip(places, reversed(values), strict=True):
            holder._parameters[leaf] = value

    return plant


def both(*changes: Change) -> Change:
    def plant(module: nn.Module) -> None:
        for each in changes:
            each(module)

    return plant


def halved(module: Any) -> None:
    attention = module.self_attention
    attention.num_attention_heads, attention.num_gqa_groups, attention.head_dim = 1, 1, WIDTH
    core = attention.core_attention
    core.num_attention_heads, core.num_gqa_groups, core.head_dims = 1, 1, (WIDTH, WIDTH)
    core.softmax_scale = WIDTH**-0.5


def residual_before_norm(module: Any) -> None:
    """Post-norm with the residual of a pre-norm layer."""
    own = module._added

    def added(branch: Any, hidden: Tensor) -> Tensor:
        y: Tensor = own(branch[:2], hidden)
        return y

    module._added = added


def no_final_norm(module: Any) -> None:
    module.output_layernorm = False


def not_causal(module: Any) -> None:
    module.self_attention.attn_mask_type = "no_mask"


def other_activation(module: Any) -> None:
    module.layernorm_mlp.activation = "silu"


def other_eps(module: Any) -> None:
    module.layernorm_mlp.eps = 1e-3


def weights_ignored(module: Any) -> None:
    forward = module.te_forward
    module.te_forward = lambda hidden, index, weights: forward(hidden, index, torch.ones_like(weights))


def mutant(model: nn.Module, inputs: Any, plant: Change) -> tuple[Applied, Parity]:
    reference = record_reference(model, normalize_inputs(inputs))
    applied = rewritten(model, inputs)
    (name,) = records(applied.model)
    plant(applied.sites[name])
    return applied, verify_applied(applied, reference)


def pre() -> nn.Module:
    return nn.Sequential(encoder_layer(norm_first=True))


def post() -> nn.Module:
    return nn.Sequential(encoder_layer())


def block() -> nn.Module:
    return nn.Sequential(perturb(Block()))


def moe() -> nn.Module:
    return perturb(MoE(Experts()))


NORM = "self_attention.layernorm_qkv.layer_norm_"
SECOND = "layernorm_mlp.layer_norm_"
MUTANTS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], Change]] = {
    "queries and keys swapped": (pre, (X,), change("self_attention.layernorm_qkv.weight", rolled(WIDTH))),
    "keys and values swapped": (post, (X,), change("self_attention.qkv.weight", rolled(WIDTH, WIDTH))),
    "heads halved": (pre, (X,), halved),
    "norms swapped": (pre, (X,), both(exchanged(f"{NORM}weight", f"{SECOND}weight"), exchanged(f"{NORM}bias", f"{SECOND}bias"))),
    "residual before the norm": (post, (X,), residual_before_norm),
    "final norm lost": (post, (X,), no_final_norm),
    "bias of the attention lost": (block, (X,), change("self_attention.proj.bias", torch.zeros_like)),
    "bias of the mlp lost": (pre, (X,), change("layernorm_mlp.fc2_bias", torch.zeros_like)),
    "causal lost": (block, (X,), not_causal),
    "another activation": (block, (X,), other_activation),
    "another eps": (block, (X,), other_eps),
    "heads permuted": (block, (X,), change("self_attention.layernorm_qkv.weight", rolled(WIDTH // HEADS))),
    "a head of the memory": (
        lambda: perturb(Attends()),
        (X, MEMORY),
        change("key_value.weight", rolled(WIDTH)),
    ),
    "experts permuted": (moe, (X,), exchanged("fc1.weight0", "fc1.weight1")),
    "gate and up swapped": (moe, (X,), change("fc1.weight0", rolled(8))),
    "weights of the router ignored": (moe, (X,), weights_ignored),
}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_planted_mistake_is_found_and_put_back(name: str) -> None:
    make, inputs, plant = MUTANTS[name]
    model = make().eval()
    expected, original = model(*inputs), copy.deepcopy(model)
    applied, parity = mutant(model, inputs, plant)
    assert [site.fqn for site in parity.reverted] == [next(iter(records(convert(original, inputs).model)))]
    assert not records(applied.model)
    assert torch.equal(applied.model(*inputs), expected)


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_verify_alone_reports_it(name: str) -> None:
    make, inputs, plant = MUTANTS[name]
    model = make().eval()
    root = convert(model, inputs).model
    assert te_convert.verify(model, root, inputs).passed
    (record,) = records(root).values()
    plant(record.module)
    assert not te_convert.verify(model, root, inputs).passed


def inverted(mask: Tensor) -> Tensor:
    return ~mask


def masks_lost(mask: Tensor) -> Tensor:
    return torch.zeros_like(mask)


PADDED = {"src": X, "src_key_padding_mask": torch.tensor([[False] * 4 + [True], [False, False, False, True, True]])}


@pytest.mark.parametrize("mistake", [inverted, masks_lost])
def test_a_wrong_mask_is_found_and_put_back(mistake: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    right = blocks._as_bool

    def wrong(mask: Tensor) -> Tensor | None:
        found = right(mask)
        return None if found is None else mistake(found)

    model = encoder_layer(norm_first=True).eval()
    expected = model(**PADDED)
    monkeypatch.setattr(blocks, "_as_bool", wrong)
    result = te_convert.convert(model, PADDED, backend="reference")
    assert not records(result.model)
    assert "parity.failed" in [reason.code for reason in result.report.site("").reasons]
    assert torch.equal(result.model(**PADDED), expected)


def test_a_lost_causal_hint_is_found_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    right = blocks._masking

    def wrong(mask: Any, padding: Any, is_causal: bool, sizes: Any) -> Any:
        found = right(mask, padding, is_causal, sizes)
        return (None, "no_mask") if found is not None and found[1] == "causal" else found

    monkeypatch.setattr(blocks, "_masking", wrong)
    inputs = {"tgt": X, "memory": MEMORY, "tgt_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "tgt_is_causal": True}
    result = te_convert.convert(decoder_layer().eval(), inputs, backend="reference")
    assert not records(result.model)
