from __future__ import annotations

import pytest
from torch import nn

import te_convert
from te_convert.estimate.kernels import Product
from te_convert.estimate.work import Work, find_work
from tests.estimate.models import Attention, Block, tokens


def _works(model: nn.Module, **options: object) -> dict[str, Work]:
    return {work.fqn: work for work in find_work(te_convert.analyze(model, tokens(), **options))}  # type: ignore[arg-type]


def test_a_fused_norm_and_its_readers_are_one_product() -> None:
    work = next(work for work in _works(Block()).values() if work.kind == "te.LayerNormLinear")
    assert work.products == (Product(16, 64, 64),) * 3
    assert work.te_products == (Product(16, 64, 192),)
    assert (work.norm_elements, work.norm_fused, work.norm_in_python) == (16 * 64, True, False)
    assert work.flops == 3 * 2 * 16 * 64 * 64


def test_a_gated_mlp_is_two_products_and_its_activation() -> None:
    work = next(work for work in _works(Block()).values() if work.kind == "te.LayerNormMLP")
    assert work.te_products == (Product(16, 64, 256), Product(16, 128, 64))
    assert (work.gated, work.activation_elements) == (True, 16 * 128)


def test_a_whole_layer_is_four_products_and_its_attention() -> None:
    (work,) = find_work(te_convert.analyze(Block(scaled=False, eager=True), tokens()), eager=("attn",))
    assert work.kind == "te.TransformerLayer"
    assert len(work.products) == 7
    assert work.te_products == (Product(16, 64, 192), Product(16, 64, 64), Product(16, 64, 256), Product(16, 128, 64))
    assert (work.attention_flops, work.scores) == (4 * 16 * 8 * 64, 2 * 4 * 8 * 8)
    assert (work.norm_elements, work.activation_elements, work.gated) == (2 * 16 * 64, 16 * 128, True)


def test_without_fusion_each_site_stands_alone() -> None:
    works = _works(Block(), fuse=False)
    assert works["attn.q"].products == works["attn.q"].te_products == (Product(16, 64, 64),)
    assert works["norm"].share == "norm"


def test_eager_attention_writes_its_scores() -> None:
    eager = next(work for work in _works(Attention(64, 4, True)).values() if work.share == "attention")
    assert eager.scores == 2 * 4 * 8 * 8
    assert eager.attention_flops == 4 * 2 * 4 * 8 * 8 * 16


def test_what_is_not_converted_is_counted_and_stays() -> None:
    work = _works(Block(), exclude="attn.o")["attn.o"]
    assert (work.converted, work.products) == (False, (Product(16, 64, 64),))


def test_convolutions_are_other_flops() -> None:
    import torch

    model = nn.Conv2d(3, 8, 4, stride=4)
    (work,) = find_work(te_convert.analyze(model, torch.randn(1, 3, 16, 16)))
    assert (work.share, work.flops) == ("other", 2 * (1 * 8 * 4 * 4) * 3 * 4 * 4)


def test_a_linear_that_runs_twice_counts_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.fc(self.fc(x))

    work = _works(Twice())["fc"]
    assert (work.calls, work.flops) == (2, 2 * 2 * 16 * 64 * 64)


def test_more_tokens_are_more_rows_and_as_many_weights() -> None:
    work = next(work for work in _works(Attention(64, 4, True)).values() if work.share == "attention")
    assert work.scaled(4).scores == 4 * work.scores
    linear = _works(Block())["attn.o"]
    assert linear.scaled(4).products == (Product(64, 64, 64),)
    assert linear.scaled(4).weights == linear.weights
    assert linear.repeated(3).flops == pytest.approx(3 * linear.flops)
