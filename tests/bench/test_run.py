from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.bench.model import BenchResult
from te_convert.errors import EnvironmentLacksError, InputError
from tests.bench.bench_samples import inputs, net
from tests.check.test_run import ReadsAgainWithGradients

SOURCE = """
import torch
from torch import nn


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def example_inputs():
    return (torch.randn(4, 16, generator=torch.Generator().manual_seed(0)),)
"""


def measure(model: Any = None, given: Any = None, **options: Any) -> BenchResult:
    settings = {"rounds": 3, "warmup": 1, "compiler": None, "recipes": (), "device": "cpu", **options}
    return te_convert.bench(net() if model is None else model, inputs() if given is None else given, **settings)


def test_all_figures_of_a_training_step() -> None:
    found = measure()
    assert [row.name for row in found.rows] == ["original", "converted"]
    assert (found.work, found.items, found.dtype, found.converted_sites) == ("training step", ("samples", 4), "float32", 3)
    for row in found.rows:
        assert len(row.rounds_ms) == 3
        assert min(row.rounds_ms) > 0
        assert row.median_ms is not None
        assert row.items_per_s == pytest.approx(4 / row.median_ms * 1e3, rel=1e-3)
        assert not row.reason
    assert (found.row("original").speedup, found.row("original").max_rel) == (1.0, 0.0)
    assert found.row("converted").sqnr_db is not None
    assert found.row("converted").sqnr_db > 90  # type: ignore[operator]
    assert found.exit_code == 0


def test_memory_is_what_is_held_and_what_a_call_adds() -> None:
    held = 4 * sum(parameter.numel() for parameter in net().parameters())
    forward = measure(training=False).row("original").peak_bytes
    training = measure().row("original").peak_bytes
    assert forward is not None
    assert training is not None
    assert forward >= held + 4 * 4 * (32 + 32)  # both sides of the ReLU at a time
    assert training >= held + held  # all gradients at a time
    assert measure().row("original").peak_bytes == training


def test_an_error_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_convert import api

    real = api.convert

    def worse(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        with torch.no_grad():
            next(found.model.parameters()).mul_(1.01)
        return found

    monkeypatch.setattr(api, "convert", worse)
    row = measure().row("converted")
    assert row.sqnr_db is not None
    assert row.sqnr_db < 60
    assert row.max_rel is not None
    assert row.max_rel > 1e-4


def test_rounds_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_convert.bench import run as module

    order: list[str] = []
    sample = module._Runner.sample

    def noted(self: Any) -> None:
        order.append(self.variant.name)
        sample(self)

    monkeypatch.setattr(module._Runner, "sample", noted)
    measure()
    assert order == ["original", "converted", "converted", "original", "original", "converted"]


def test_a_slower_model_takes_longer() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return self.net(x)  # type: ignore[no-any-return]

    median = measure(Slow(), training=False).row("original").median_ms
    assert median is not None
    assert median >= 50


def test_the_compiled_original_shares_its_parameters() -> None:
    from te_convert.bench.variants import compiled

    original = net()
    found = compiled(original, "eager")
    assert all(a is b for a, b in zip(original.parameters(), found.parameters(), strict=True))
    assert original._compiled_call_impl is None
    assert measure(compiler="eager").row("original, torch.compile").max_rel == 0.0


def test_a_variant_that_fails_is_a_row_with_a_reason() -> None:
    found = measure(compiler="no-such-compiler")
    row = found.row("original, torch.compile")
    assert "no-such-compiler" in row.reason
    assert (row.rounds_ms, row.median_ms, row.speedup) == ((), None, None)
    assert found.row("converted").rounds_ms


def test_recipes_that_do_not_run_here_say_why() -> None:
    found = measure(recipes=None)
    reasons = {row.recipe: row.reason for row in found.rows if row.recipe}
    assert set(reasons) == {"fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4"}
    assert all(why.startswith("needs a GPU") for why in reasons.values())
    assert [row.recipe for row in measure(recipes=["mxfp8"]).rows if row.recipe] == ["mxfp8"]


def test_a_cpu_says_first_that_this_says_nothing_about_a_gpu() -> None:
    assert str(measure()).startswith("Measured on a CPU with the reference twins. These times and sizes say nothing about a GPU.\n")


def test_the_callers_model_and_inputs_are_as_they_were() -> None:
    model, given = net().eval(), inputs()
    before, value = copy.deepcopy(model.state_dict()), given[0].clone()
    measure(model, given, dtype="bfloat16")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not model.training
    assert torch.equal(value, given[0])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_low_precision_is_compared_with_float32() -> None:
    found = measure(dtype="bfloat16")
    own = found.row("original").sqnr_db
    assert (found.dtype, found.row("original").max_rel) != ("bfloat16", 0.0)
    assert own is not None
    assert 20 < own < 90


def test_a_directory_is_measured_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(SOURCE)
    opened = te_convert.open_model("net.py")
    te_convert.convert(opened.model, opened.example_inputs, exclude="3").save("net_te", source=opened.source)
    found = measure("net_te", None, dtype=None)
    assert (found.model_class, found.converted_sites, found.items) == ("Sequential", 2, ("samples", 4))
    assert found.row("converted").sqnr_db > 90  # type: ignore[operator]
    with pytest.raises(InputError, match="converted already"):
        measure("net_te", exclude="1")
    with pytest.raises(InputError, match="converted already"):
        measure("net_te", dtype="bfloat16")


def test_generation_compares_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    found = measure(model, {"input_ids": torch.randint(1, 64, (2, 5))}, generate=4)
    assert (found.work, found.items) == ("generation of 4 tokens", ("tokens", 8))
    assert [row.tokens_equal for row in found.rows] == [1.0, 1.0]
    assert "tokens equal" in str(found)


def test_nothing_to_convert() -> None:
    found = measure(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (torch.randn(1, 3, 8, 8),))
    assert (found.converted_sites, found.exit_code) == (0, 1)
    assert "nothing was converted" in str(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 1}, "rounds is 1"),
        ({"warmup": 0}, "warmup is 0"),
        ({"max_slowdown": 0.0}, "max_slowdown is 0"),
        ({"recipes": ["fp5"]}, "unknown recipe 'fp5'"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"generate": 3}, r"Sequential has no generate\(\)"),
        ({"given": (torch.randn(4, 5),)}, "the original fails: RuntimeError"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        measure(**options)


def test_a_model_without_anything_to_train_says_what_to_do() -> None:
    with pytest.raises(InputError, match="no output depends on a parameter that is trained") as caught:
        measure(net().requires_grad_(False))
    assert "--inference" in caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(EnvironmentLacksError):
        measure(device="cuda")
    with pytest.raises(EnvironmentLacksError):
        measure(backend="te")


def test_json_is_strict_and_complete() -> None:
    data = json.loads(json.dumps(measure(compiler="no-such-compiler").to_dict(), allow_nan=False))
    assert data["schema"] == 1
    assert data["environment"]["threads"] == torch.get_num_threads()
    assert {"name", "median_ms", "q1_ms", "q3_ms", "rounds_ms", "items_per_s", "peak_bytes", "sqnr_db", "reason"} <= set(
        data["rows"][0]
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    model = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    found = measure(model, (torch.randn(64, 256),), dtype="bfloat16", device="cuda", recipes=None)
    assert all(row.rounds_ms or row.reason for row in found.rows)
    assert (found.row("original").peak_bytes or 0) > 2 * 256 * 512 * 2


def test_calls_that_a_fusion_does_not_cover_are_told() -> None:
    """Their time is that of the original modules, so the figures would mislead."""
    x = (torch.randn(4, 32, generator=torch.Generator().manual_seed(0)),)
    (note,) = (note for note in measure(ReadsAgainWithGradients(), x).notes if "did not run on the replacement" in note)
    assert note.startswith("converted: ")
    assert "(te.LayerNormLinear)" in note
    assert not [note for note in measure(ReadsAgainWithGradients(), x, training=False).notes if "did not run" in note]
