"""convert(): what it promises about the caller's model, whatever happens."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import te_convert
from te_convert.errors import ConversionError, TeConvertError
from te_convert.rewrite import apply as rewrite_apply
from te_convert.rewrite.site import is_converted
from te_convert.verify import gate
from tests.rewrite.rewrite_samples import FUSE, Attends, TiedLM, contents, floats, gpt2, ids, perturb, plan_of, snapshot

X = floats(4, 8)


def mlp() -> nn.Sequential:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
    perturb(model)
    return model


def logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    output = model(tokens)
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return found


def random_states() -> tuple[Any, ...]:
    numpy_state = np.random.get_state(legacy=False)
    return random.getstate(), str(numpy_state), torch.get_rng_state().tolist()


def fails_in(stage: str, error: type[BaseException]) -> Callable[[str, int, int], None]:
    def progress(name: str, done: int, total: int) -> None:
        if name == stage:
            raise error("planted")

    return progress


MODELS = pytest.mark.parametrize("make", [TiedLM, gpt2, Attends], ids=["tied", "gpt2", "attends"])


# ---- the caller's model ----------------------------------------------------------------------------------------------
@FUSE
@MODELS
def test_the_callers_model_and_random_states_stay_bit_for_bit(make: Callable[[], nn.Module], fuse: bool) -> None:
    model = make()
    logits(model, ids()).sum().backward()
    model.register_forward_hook(lambda *_: None)
    before, states = snapshot(model), random_states()
    result = te_convert.convert(model, (ids(),), fuse=fuse)
    assert result.converted
    assert bool(result.plan.fusions) == fuse
    assert result.model is not model
    assert snapshot(model) == before
    assert random_states() == states
    assert not {id(p) for p in model.parameters()} & {id(p) for p in result.model.parameters()}


@FUSE
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("stage", ["capture", "rewrite", "verify"])
@MODELS
def test_an_interrupt_in_any_stage_leaves_the_model_as_it_was(
    make: Callable[[], nn.Module], stage: str, inplace: bool, fuse: bool
) -> None:
    model, look = make(), contents if fuse and inplace else snapshot
    before, states = look(model), random_states()
    result = None
    try:
        result = te_convert.convert(model, (ids(),), inplace=inplace, fuse=fuse, progress=fails_in(stage, KeyboardInterrupt))
    except KeyboardInterrupt:
        assert look(model) == before
        assert random_states() == states
    assert result is None, "the progress callback was not reached"


@FUSE
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("place", ["_isolate", "compare_all"])
def test_a_crash_in_verification_leaves_the_model_as_it_was(
    place: str, inplace: bool, fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(gate, place, crash)
    model, look = gpt2(), contents if fuse and inplace else snapshot
    before = look(model)
    with pytest.raises(MemoryError):
        te_convert.convert(model, (ids(),), inplace=inplace, fuse=fuse)
    assert look(model) == before


def test_a_rewrite_that_fails_refuses_everything_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(rewrite_apply, "_convert", crash)
    model = mlp()
    before = snapshot(model)
    result = te_convert.convert(model, (X,), inplace=True, fuse=False)
    assert (result.model, result.converted) == (model, False)
    assert snapshot(model) == before
    assert {reason.code for site in result.report.sites for reason in site.reasons} == {"internal.error"}


def test_inplace_returns_the_same_object_with_the_same_parameters() -> None:
    model = mlp()
    parameters = [id(p) for p in model.parameters()]
    result = te_convert.convert(model, (X,), inplace=True, fuse=False)
    assert result.model is model
    assert [id(p) for p in model.parameters()] == parameters
    assert is_converted(model[1])


def test_inplace_returns_the_same_object_with_the_same_parameters_in_the_fusion() -> None:
    model = mlp()
    kinds, norm, linear, last = [type(m) for m in model], *(list(model[index].parameters()) for index in (0, 1, 4))
    result = te_convert.convert(model, (X,), inplace=True)
    assert result.model is model
    assert list(map(id, model.parameters())) == list(map(id, [*norm, *linear, *last]))
    fused: Any = model.get_submodule("1.layernorm_1")
    assert [id(getattr(fused, name)) for name in ("layer_norm_weight", "layer_norm_bias", "weight", "bias")] == [
        id(p) for p in (*norm, *linear)
    ]
    assert [isinstance(m, kind) for m, kind in zip(model, kinds, strict=True)] == [True, True, True, True, False]
    assert [is_converted(m) for m in model] == [False, False, False, False, True]


def test_strict_reverts_what_it_does_not_return() -> None:
    class Unsteady(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.proj(x) + float(np.random.default_rng().normal())
            return y

    model = Unsteady()
    before = snapshot(model)
    with pytest.raises(ConversionError, match="not verified") as caught:
        te_convert.convert(model, (X,), inplace=True, strict=True)
    assert caught.value.hint
    assert caught.value.exit_code == 3
    assert snapshot(model) == before


def test_strict_names_a_site_that_fails_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_convert import reference

    forward = reference.Linear.forward
    monkeypatch.setattr(reference.Linear, "forward", lambda self, x: forward(self, x) * (2 if self.out_features == 4 else 1))
    model = mlp()
    before = snapshot(model)
    with pytest.raises(ConversionError, match="4"):
        te_convert.convert(model, (X,), inplace=True, strict=True, backend="reference", fuse=False)
    assert snapshot(model) == before
    result = te_convert.convert(model, (X,), backend="reference", fuse=False)
    assert [site.fqn for site in result.report.parity.reverted] == ["4"]
    assert any("4 was put back" in line for line in result.report.warnings)
    assert result.plan.get("4").reasons[-1].code == "parity.failed"


def test_strict_names_a_fusion_that_fails_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_convert import reference

    forward = reference.LayerNormLinear.forward
    monkeypatch.setattr(reference.LayerNormLinear, "forward", lambda self, x: forward(self, x) * 2)
    model = mlp()
    before = contents(model)
    with pytest.raises(ConversionError, match=r"1\.layernorm_1"):
        te_convert.convert(model, (X,), inplace=True, strict=True, backend="reference")
    assert contents(model) == before
    result = te_convert.convert(model, (X,), backend="reference")
    assert [site.fqn for site in result.report.parity.reverted] == ["1.layernorm_1"]
    assert any("1.layernorm_1 was put back" in line for line in result.report.warnings)
    assert [result.plan.get(name).reasons[-1].code for name in "01"] == ["parity.failed"] * 2
    assert [site.fqn for site in result.report.sites if str(site.outcome) == "REFUSED"] == ["0", "1"]
    assert [is_converted(m) for m in result.model.children()] == [False, False, False, False, True]
    assert not result.plan.fusions


@FUSE
def test_strict_passes_what_is_verified(fuse: bool) -> None:
    assert te_convert.convert(mlp(), (X,), strict=True, fuse=fuse).report.parity.passed
    with pytest.raises(ConversionError, match="nothing was converted"):
        te_convert.convert(nn.Sequential(nn.ReLU()), (X,), strict=True)


@FUSE
def test_converting_twice_changes_nothing(fuse: bool) -> None:
    once = te_convert.convert(mlp(), (X,), fuse=fuse).model
    before = snapshot(once)
    again = te_convert.convert(once, (X,), inplace=True, fuse=fuse)
    assert again.report.parity.passed
    assert {k: v for k, v in snapshot(once).items() if not k.endswith(":dict")} == {
        k: v for k, v in before.items() if not k.endswith(":dict")
    }
    copied = te_convert.convert(once, (X,), fuse=fuse).model
    assert torch.equal(copied(X) if not copied.training else copied.eval()(X), once.eval()(X))
    assert list(copied.state_dict()) == list(once.state_dict())


def test_a_partly_converted_model_is_completed() -> None:
    part = te_convert.convert(mlp(), (X,), include="1", fuse=False).model
    whole = te_convert.convert(part, (X,), fuse=False)
    assert [is_converted(m) for m in part] == [False, True, False, False, False]  # type: ignore[attr-defined]
    assert [is_converted(m) for m in whole.model] == [True, True, False, False, True]  # type: ignore[attr-defined]
    assert whole.report.parity.passed


@pytest.mark.parametrize(("first", "second"), [("4", ()), (["0", "1"], ()), (["0", "1"], "4")])
def test_a_partly_converted_model_is_completed_with_fusions(first: Any, second: Any) -> None:
    original = mlp()
    part = te_convert.convert(original, (X,), include=first).model
    whole = te_convert.convert(part, (X,), include=second)
    assert [name for name, m in whole.model.named_modules() if is_converted(m)] == ["1.layernorm_1", "4"]
    assert whole.report.parity.passed
    back = te_convert.revert(whole.model)
    assert {name: type(m) for name, m in back.named_modules()} == {name: type(m) for name, m in original.named_modules()}
    assert list(back.state_dict()) == list(original.state_dict())
    assert all(torch.equal(value, original.state_dict()[key]) for key, value in back.state_dict().items())


# ---- models of every kind --------------------------------------------------------------------------------------------
def test_a_model_without_parameters_comes_back() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Flatten())
    result = te_convert.convert(model, (X,))
    assert result.model is model
    assert not result.converted
    assert any("nothing was converted" in line for line in result.report.warnings)


def test_a_convolutional_net_converts_its_head() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    result = te_convert.convert(model, (floats(2, 3, 8, 8),))
    assert result.report.parity.passed
    assert [site.fqn for site in result.report.sites if site.replacement] == ["5"]
    assert te_convert.convert(model).report.parity.passed  # derived inputs


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_scripted_model_comes_back_with_the_reason() -> None:
    model = torch.jit.trace(nn.Sequential(nn.Linear(8, 8)), X)
    result = te_convert.convert(model, (X,))
    assert result.model is model
    assert "module.scripted" in {reason.code for site in result.report.sites for reason in site.reasons}


def test_a_compiled_model_is_an_input_error_with_a_way_out() -> None:
    compiled: Any = torch.compile(mlp(), backend="eager")
    with pytest.raises(TeConvertError, match=r"torch\.compile") as caught:
        te_convert.convert(compiled, (X,))
    assert "_orig_mod" in caught.value.hint


@pytest.mark.report("mosaicml/llm-foundry#1745", "NVIDIA/TransformerEngine#596")
def test_weights_on_meta_are_an_input_error_and_can_be_analyzed() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))
    with pytest.raises(TeConvertError, match="meta") as caught:
        te_convert.convert(model, (X,))
    assert "analyze" in caught.value.hint
    plan = te_convert.analyze(model, (X,))
    assert [decision.replacement for decision in plan if decision.fqn] == ["te.LayerNormLinear", "te.LayerNormLinear"]
    leaf = plan_of(model, (X,), fuse=False)
    assert [decision.replacement for decision in leaf if decision.fqn] == ["te.LayerNorm", "te.Linear"]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_model_that_cannot_be_copied_comes_back_and_converts_in_place() -> None:
    model = mlp()
    model.lock = threading.Lock()  # type: ignore[assignment]
    before = snapshot(model)
    result = te_convert.convert(model, (X,), fuse=False)
    assert result.model is model
    assert not result.converted
    assert any("model.not-copyable" in line for line in result.report.warnings)
    assert snapshot(model) == before
    assert te_convert.convert(model, (X,), inplace=True, fuse=False).report.parity.passed
    broken = mlp()
    broken.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ConversionError, match="nothing was converted"):
        te_convert.convert(broken, (X,), strict=True, fuse=False)


@pytest.mark.parametrize("value", ["model", None, nn.Linear, {"a": 1}])
def test_anything_else_is_an_input_error(value: Any) -> None:
    with pytest.raises(TeConvertError, match=r"nn\.Module"):
        te_convert.convert(value)


# ---- threads ---------------------------------------------------------------------------------------------------------
def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    results: list[Any] = [None] * count

    def run(index: int) -> None:
        results[index] = work(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_conversion_works_outside_the_main_thread() -> None:
    assert in_threads(1, lambda _: te_convert.convert(mlp(), (X,)).report.parity.passed) == [True]


@FUSE
@MODELS
def test_eight_threads_run_a_converted_model(make: Callable[[], nn.Module], fuse: bool) -> None:
    model = te_convert.convert(make().eval(), (ids(),), fuse=fuse).model
    inputs = [ids().roll(index, 1) for index in range(8)]
    with torch.no_grad():
        expected = [logits(model, tokens) for tokens in inputs]

        def work(index: int) -> bool:
            with torch.no_grad():
                return all(torch.equal(logits(model, inputs[index]), expected[index]) for _ in range(20))

    assert in_threads(8, work) == [True] * 8


@FUSE
@MODELS
def test_training_goes_the_same_way(make: Callable[[], nn.Module], fuse: bool) -> None:
    original = perturb(make())
    model = te_convert.convert(copy.deepcopy(original), (ids(),), fuse=fuse).model
    losses: list[list[float]] = []
    for module in (original, model):
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05)
        losses.append([])
        for _ in range(5):
            loss = logits(module, ids()).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0] * 0.99
