"""The parts of a transformer block, found in the recorded graph; what is no block says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_convert.capture.graph import ModuleCall, Recording
from te_convert.capture.run import capture
from te_convert.capture.scenario import normalize_inputs
from te_convert.config import ConvertConfig
from te_convert.match.blocks import Block as Site
from te_convert.match.candidate import find_candidates
from te_convert.match.leaves import LeafPolicy
from te_convert.match.transformer_blocks import BlockError, Parts, parse_block, random_input
from te_convert.plan import choose
from te_convert.plan.fusions import _sort
from te_convert.rules.registry import load_rules
from tests.rewrite.block_samples import HEADS, MLP, WIDTH, Block, GatedMLP, X


def parsed(block: nn.Module, *inputs: Any) -> Parts:
    """The parts of the block inside a model, as the rule sees them."""
    model = nn.Sequential(block).eval() if not inputs else block.eval()
    found = capture(model, normalize_inputs(inputs or (X,)), LeafPolicy())
    assert found.failures == ()
    config = ConvertConfig()
    candidates = find_candidates(model, found, None)
    sites = [(site, choose._decide(site, load_rules(), config, 0)) for site in candidates]
    known = _sort(model, found, sites, config)
    name = "" if inputs else "0"
    site = next(site for site in candidates if site.fqn == name)
    recording: Recording = found.recordings[0]
    call: ModuleCall = next(call for call in recording.calls if call.fqn == name)
    return parse_block(Site(site, known.modules, found, (), known.linears, known.norms), recording, call)


NAMES = ("0.attn.c_attn",)
SPLIT = ("0.attn.q", "0.attn.k", "0.attn.v")


@pytest.mark.parametrize("order", ["pre", "post", "parallel"])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_every_order(order: str, split: bool, causal: bool) -> None:
    parts = parsed(Block(order, split=split, causal=causal))
    assert (parts.order, parts.norms, parts.qkv) == (order, ("0.ln_1", "0.ln_2"), SPLIT if split else NAMES)
    assert (parts.proj, parts.inputs, parts.down) == ("0.attn.c_proj", ("0.mlp.c_fc",), "0.mlp.c_proj")
    assert (parts.heads, parts.is_causal) == (HEADS, causal)
    assert (parts.first.target, parts.last.target) == ("0.mlp.c_fc", "0.mlp.c_proj")


def test_two_linears_before_a_product() -> None:
    parts = parsed(Block(mlp=GatedMLP()))
    assert (parts.inputs, parts.down) == (("0.mlp.gate", "0.mlp.up"), "0.mlp.down")


def test_one_norm_for_both_branches_is_found() -> None:
    class One(Block):
        def forward(self, x: Tensor) -> Any:
            h = self.ln_1(x)
            return x + self.attn(h) + self.mlp(h)

    assert parsed(One()).norms == ("0.ln_1", "0.ln_1")


def test_three_terms_in_any_order() -> None:
    class Mixed(Block):
        def forward(self, x: Tensor) -> Any:
            return self.mlp(self.ln_2(x)) + (x + self.attn(self.ln_1(x)))

    assert parsed(Mixed()).order == "parallel"


def forward(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    class Own(Block):
        def forward(self, x: Tensor) -> Any:
            return function(self, x)

    return Own()


def no_second_residual(m: Any, x: Tensor) -> Tensor:
    x = x + m.attn(m.ln_1(x))
    y: Tensor = m.mlp(m.ln_2(x))
    return y


def no_first_residual(m: Any, x: Tensor) -> Tensor:
    x = m.attn(m.ln_1(x))
    y: Tensor = x + m.mlp(m.ln_2(x))
    return y


def no_norm_before_attention(m: Any, x: Tensor) -> Tensor:
    x = x + m.attn(x)
    y: Tensor = x + m.mlp(m.ln_2(x))
    return y


def no_norm_before_mlp(m: Any, x: Tensor) -> Tensor:
    x = x + m.attn(m.ln_1(x))
    y: Tensor = x + m.mlp(x)
    return y


def residual_of_the_norm(m: Any, x: Tensor) -> Tensor:
    h = m.ln_1(x)
    x = h + m.attn(h)
    y: Tensor = x + m.mlp(m.ln_2(x))
    return y


def three_times(m: Any, x: Tensor) -> Tensor:
    y: Tensor = x + x + m.attn(m.ln_1(x)) + m.mlp(m.ln_2(x))
    return y


def twice_attended(m: Any, x: Tensor) -> Tensor:
    x = x + m.attn(m.ln_1(x)) + m.attn(m.ln_1(x))
    y: Tensor = x + m.mlp(m.ln_2(x))
    return y


def only_attention(m: Any, x: Tensor) -> Tensor:
    y: Tensor = x + m.attn(m.ln_1(x))
    return y


def only_mlp(m: Any, x: Tensor) -> Tensor:
    y: Tensor = x + m.mlp(m.ln_2(x))
    return y


def mlp_of_the_input_after_norm(m: Any, x: Tensor) -> Tensor:
    """Post-norm with the residual of the input."""
    h = m.ln_1(x + m.attn(x))
    y: Tensor = m.ln_2(x + m.mlp(h))
    return y


def attention_behind_a_norm_in_post_order(m: Any, x: Tensor) -> Tensor:
    h = m.ln_1(x + m.attn(x * 2))
    y: Tensor = m.ln_2(h + m.mlp(h))
    return y


MISSES = [
    no_second_residual,
    no_first_residual,
    no_norm_before_attention,
    no_norm_before_mlp,
    residual_of_the_norm,
    three_times,
    twice_attended,
    only_attention,
    only_mlp,
    mlp_of_the_input_after_norm,
    attention_behind_a_norm_in_post_order,
]


@pytest.mark.parametrize("function", MISSES)
def test_what_is_no_block_says_why(function: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(BlockError) as caught:
        parsed(forward(function))
    assert str(caught.value)


def test_a_second_argument_is_refused() -> None:
    class Two(Block):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
            return super().forward(x if y is None else x + 0 * y)

    with pytest.raises(BlockError, match="it takes more than one tensor"):
        parsed(Two(), X, X + 1)


def test_a_plain_mlp_is_no_block() -> None:
    with pytest.raises(BlockError):
        parsed(MLP())


def test_random_input_is_seeded_and_like_the_parameters() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    first, second = (random_input((2, 3, WIDTH), like) for _ in range(2))
    assert torch.equal(first, second)
    assert (first.shape, first.dtype) == ((2, 3, WIDTH), torch.float64)
