from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from te_convert.errors import InputError
from te_convert.estimate.gpus import find_gpu
from te_convert.estimate.kernels import Product
from te_convert.estimate.predict import predict, recorded_tokens, unavailable_on
from te_convert.estimate.work import Work

H100 = find_gpu("h100")


def linear(name: str, rows: int, ins: int, outs: int, **more: Any) -> Work:
    product = Product(rows, ins, outs)
    return Work(name, "te.Linear", "linear", products=(product,), te_products=(product,), **more)


LARGE = [linear(f"layers.{index}", 16384, 8192, 8192) for index in range(4)]
TINY = [linear(f"layers.{index}", 64, 256, 256) for index in range(4)]


def test_large_products_convert() -> None:
    found = predict(LARGE, H100)
    assert (found.verdict.code, found.verdict.recipe) == ("convert", "fp8-delayed")
    assert found.tokens == 16384
    assert found.flop_shares == {"linear": 1.0}
    assert found.recipe("bf16").speedup == pytest.approx(1.0)
    assert 1.4 < found.recipe("fp8-current").speedup < found.recipe("fp8-delayed").speedup < 2
    assert found.recipe("mxfp8").unavailable == "mxfp8 needs compute capability 10.0; h100 has 9.0"
    assert not found.recipe("fp8-delayed").losing
    with pytest.raises(KeyError):
        predict(LARGE, H100, "bf16").recipe("mxfp8")


def test_tiny_products_are_not_worth_it() -> None:
    found = predict(TINY, H100)
    assert found.verdict.code == "not-worth-it"
    assert "not worth it on h100" in found.verdict.text
    delayed = found.recipe("fp8-delayed")
    assert len(delayed.losing) == 4
    assert not delayed.winning
    assert delayed.gated == found.recipe("bf16").times


def test_some_sites_are_worth_it() -> None:
    thin = [linear(f"thin.{index}", 16384, 256, 256) for index in range(4)]
    found = predict([*LARGE, *thin], H100, "fp8-current")
    chosen = found.recipe("fp8-current")
    assert found.verdict.code == "only-these-sites"
    assert {site.fqn for site in chosen.losing} == {work.fqn for work in thin}
    assert chosen.gated_speedup > chosen.speedup


def test_bf16_alone_can_be_worth_it() -> None:
    eager = Work("attn", "te.DotProductAttention", "attention", attention_flops=1e11, scores=1e9)
    found = predict([eager, linear("fc", 16384, 250, 250)], H100)
    assert (found.verdict.code, found.verdict.recipe) == ("stay-in-bf16", "bf16")


def test_a_recipe_that_the_gpu_lacks() -> None:
    found = predict(LARGE, find_gpu("a100"), "fp8")
    assert found.verdict.code == "recipe-unavailable"
    assert "fp8-current needs compute capability 8.9; a100 has 8.0" in found.verdict.text
    assert "nothing published on a100" in " ".join(found.notes)
    assert unavailable_on(find_gpu("rtx5090"), "mxfp8")
    assert not unavailable_on(find_gpu("b300"), "nvfp4")


def test_nothing_to_convert() -> None:
    assert predict([replace(LARGE[0], converted=False)], H100).verdict.code == "nothing-to-convert"


def test_fp8_is_the_best_of_the_gpu() -> None:
    assert [each.recipe for each in predict(LARGE, find_gpu("b200"), "fp8").recipes] == ["bf16", "mxfp8"]
    assert [each.recipe for each in predict(LARGE, H100, "fp8").recipes] == ["bf16", "fp8-current"]


def test_more_tokens_favour_the_recipe() -> None:
    few, many = (predict(LARGE, H100, "fp8-current", tokens=tokens).recipe("fp8-current").speedup for tokens in (64, 65536))
    assert few < 1 < many
    assert predict(LARGE, H100, tokens=4096).tokens == 4096


def test_inference_is_a_third_of_the_products() -> None:
    training, inference = (predict(LARGE, H100, "bf16", mode).original.gemm_us for mode in ("training", "inference"))
    assert training == pytest.approx(3 * inference, rel=0.02)


def test_memory_of_copies_and_of_what_is_saved() -> None:
    weights, inputs = 4 * 8192 * 8192, 4 * 16384 * 8192
    training = predict(LARGE, H100, "fp8-current").recipe("fp8-current")
    assert (training.weight_bytes, training.activation_bytes) == (2 * weights, -inputs)
    inference = predict(LARGE, H100, "fp8-current", "inference").recipe("fp8-current")
    assert (inference.weight_bytes, inference.activation_bytes) == (weights, 0)
    assert predict(LARGE, find_gpu("b200"), "fp8-current").recipe("fp8-current").weight_bytes == weights


@pytest.mark.parametrize("options", [{"recipe": "fp9"}, {"mode": "eval"}, {"tokens": 0}, {"tokens": True}, {"tokens": 1.5}])
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        predict(LARGE, H100, **options)


def test_tokens_are_the_rows_with_most_flops() -> None:
    assert recorded_tokens([linear("a", 8, 64, 64), linear("b", 512, 64, 64)]) == 512
    assert recorded_tokens([]) == 0


def test_plain_data() -> None:
    import json

    found = predict([*LARGE, *TINY], H100)
    data = json.loads(json.dumps(found.to_dict()))
    assert (data["schema"], data["predicted"], data["gpu"]) == (1, True, "h100")
    assert data["recipes"][4] == {"recipe": "mxfp8", "unavailable": "mxfp8 needs compute capability 10.0; h100 has 9.0"}
    assert str(found).splitlines()[0].startswith(found.verdict.code)
