"""What a rewrite keeps: Parameter objects, ties, flags, attributes, aliases, references from outside."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.rewrite import apply as rewrite_apply
from te_convert.rewrite.site import get_record, is_converted
from tests.rewrite.rewrite_samples import (
    WIDTH,
    ReadsNames,
    TiedLM,
    converted,
    floats,
    gpt2,
    ids,
    perturb,
    plan_of,
    rewritten,
    snapshot,
)


def test_parameters_are_the_same_objects_with_their_gradients() -> None:
    model = perturb(TiedLM())
    model(ids()).sum().backward()
    before = {name: (id(p), p.requires_grad, id(p.grad)) for name, p in model.named_parameters()}
    root = converted(model, (ids(),))
    after = {name: (id(p), p.requires_grad, id(p.grad)) for name, p in root.named_parameters() if name in before}
    assert after == before
    assert [name for name, _ in root.named_parameters() if name not in before] == ["norm.bias"]
    assert not root.norm.bias.requires_grad


def test_ties_and_aliases_survive() -> None:
    model = converted(TiedLM(), (ids(),))
    assert model.head.weight is model.embed.weight
    assert is_converted(model.head)
    assert model.up is model.blocks[0]
    assert is_converted(model.up)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_stays(dtype: torch.dtype) -> None:
    model = converted(perturb(TiedLM()).to(dtype), (ids(),))
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model(ids()).dtype is dtype


def test_train_flags_stay_module_by_module() -> None:
    model = TiedLM()
    model.up.eval()
    flags = {name: module.training for name, module in model.named_modules()}
    root = converted(model, (ids(),))
    assert {name: module.training for name, module in root.named_modules()} == flags
    root.eval()
    assert not root.down.training


def test_state_dict_keys_stay_in_order() -> None:
    model = TiedLM()
    keys = list(model.state_dict())
    assert list(converted(model, (ids(),)).state_dict()) == keys


def test_code_that_holds_the_original_runs_the_replacement() -> None:
    model: Any = perturb(ReadsNames())
    x, expected = floats(2, WIDTH), perturb(copy.deepcopy(model))
    expected.load_state_dict(model.state_dict())
    y = expected(x)
    original = model.proj
    result = te_convert.convert(model, (x,), inplace=True)
    root: Any = result.model
    assert original is not root.proj
    assert result.report.parity.executed["proj"] > 0
    torch.testing.assert_close(root(x), y)
    with torch.no_grad():
        root.proj.weight.zero_()
    assert torch.equal(original(x), root.proj.bias.expand(2, WIDTH))


def test_attributes_that_te_lacks_stay_readable() -> None:
    model = converted(ReadsNames(), (floats(2, WIDTH),))
    assert model.norm.variance_epsilon == 0.125
    assert model.norm.elementwise_affine is True
    assert model.proj.in_features == WIDTH


def test_an_optimizer_made_before_trains_the_converted_model() -> None:
    model = perturb(TiedLM())
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, twin)]
    root = converted(model, (ids(),))
    start = root.up.weight.detach().clone()
    for module, optimizer in zip((root, twin), optimizers, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            module(ids()).pow(2).mean().backward()
            optimizer.step()
    torch.testing.assert_close(root(ids()), twin(ids()), rtol=1e-4, atol=1e-4)
    assert not torch.equal(root.up.weight, start)


def test_a_root_linear_gives_a_new_root_and_revert_the_old_one() -> None:
    linear = nn.Linear(WIDTH, 4)
    root = converted(linear, (floats(2, WIDTH),))
    assert is_converted(root)
    assert root.weight is not None
    back = te_convert.revert(root)
    assert back is linear
    assert isinstance(back.weight, nn.Parameter)


def test_a_one_dimensional_input_and_a_keyword_work_as_in_the_original() -> None:
    linear = perturb(nn.Linear(WIDTH, 4))
    expected = linear(floats(WIDTH))
    root = converted(linear, (floats(2, WIDTH),))
    assert torch.equal(root(floats(WIDTH)), expected)
    assert torch.equal(root(input=floats(WIDTH)), expected)


@pytest.mark.parametrize("make", [TiedLM, gpt2], ids=["tied", "gpt2"])
def test_copies_stay_converted_and_equal(make: Any) -> None:
    model = converted(make(), (ids(),))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert _logits(other, ids()).equal(_logits(model, ids()))
        assert [name for name, m in other.named_modules() if is_converted(m)] == [
            name for name, m in model.named_modules() if is_converted(m)
        ]
        shared = {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}
        assert not shared
        assert _logits(te_convert.revert(other), ids()).equal(_logits(te_convert.revert(copy.deepcopy(model)), ids()))


def _logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    output = model(tokens)
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return logits


def test_to_another_dtype_reaches_the_replacements() -> None:
    model = converted(perturb(TiedLM()), (ids(),)).to(torch.bfloat16)
    assert model.head.weight is model.embed.weight
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(ids()).dtype is torch.bfloat16
    assert te_convert.revert(model)(ids()).dtype is torch.bfloat16


@pytest.mark.parametrize("make", [TiedLM, gpt2], ids=["tied", "gpt2"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_middle_restores_everything(
    make: Any, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.register_forward_hook(lambda *_: None)
    output = model(ids())
    (output if isinstance(output, torch.Tensor) else output.logits).sum().backward()
    plan = plan_of(model, (ids(),))
    before = snapshot(model)
    convert, calls = rewrite_apply._convert, []

    def fails_at_the_fourth(*args: Any) -> nn.Module:
        calls.append(args)
        if len(calls) == 4:
            raise error("planted")
        return convert(*args)

    monkeypatch.setattr(rewrite_apply, "_convert", fails_at_the_fourth)
    with pytest.raises(error, match="planted"):
        rewrite_apply.apply_plan(model, plan, "reference")
    assert len(calls) == 4
    assert snapshot(model) == before


def test_a_progress_callback_that_raises_restores_everything() -> None:
    model = TiedLM()
    plan, before = plan_of(model, (ids(),)), snapshot(model)

    def stop(done: int, total: int) -> None:
        assert total == len(plan.converting)
        if done == 2:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        rewrite_apply.apply_plan(model, plan, "reference", stop)
    assert snapshot(model) == before


def test_a_plan_for_another_model_changes_nothing() -> None:
    plan = plan_of(TiedLM(), (ids(),))
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    before = snapshot(other)
    with pytest.raises(KeyError):
        rewrite_apply.apply_plan(other, plan, "reference")
    assert snapshot(other) == before


@pytest.mark.parametrize("make", [TiedLM, gpt2], ids=["tied", "gpt2"])
def test_undo_of_one_site_and_of_all(make: Any) -> None:
    model = make()
    before, kinds = snapshot(model), {name: type(module) for name, module in model.named_modules()}
    applied = rewritten(model, (ids(),))
    names = list(applied.sites)
    assert len(names) >= 5
    applied.undo(names[1])
    assert type(model.get_submodule(names[1])) is kinds[names[1]]
    assert [name for name, m in model.named_modules() if is_converted(m)] == [name for name in names if name != names[1]]
    applied.undo_all()
    assert snapshot(model) == before


def test_undo_brings_the_own_weights_back_whatever_the_replacement_holds() -> None:
    model: Any = perturb(TiedLM())
    before = snapshot(model)
    applied = rewritten(model, (ids(),))
    model.up._parameters["weight"] = nn.Parameter(torch.zeros(16, WIDTH))
    applied.undo_all()
    assert snapshot(model) == before


def test_revert_takes_over_what_was_trained() -> None:
    model = converted(perturb(gpt2()), (ids(),))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
    expected = _logits(model, ids())
    back = te_convert.revert(model)
    assert not any(map(is_converted, back.modules()))
    torch.testing.assert_close(_logits(back, ids()), expected)


def test_sites_of_an_earlier_conversion_stay_when_a_later_one_is_undone() -> None:
    model = converted(perturb(TiedLM()), (ids(),), include="up")
    applied = rewritten(model, (ids(),))
    assert set(applied.sites) > {"up"}
    applied.undo_all()
    assert [name for name, m in model.named_modules() if is_converted(m)] == ["up"]


def test_a_converted_module_knows_where_it_came_from() -> None:
    model = converted(TiedLM(), (ids(),))
    record = get_record(model.up)
    assert (record.decision.fqn, record.backend, type(record.original)) == ("up", "reference", nn.Linear)
    with pytest.raises(KeyError):
        get_record(model.embed)
