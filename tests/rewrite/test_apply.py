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
from te_convert.rewrite.fuse import fuse as fuse_modules
from te_convert.rewrite.fused import fused_record, get_fused
from te_convert.rewrite.loans import is_borrower
from te_convert.rewrite.site import get_record, is_converted
from tests.rewrite.rewrite_samples import (
    FUSE,
    WIDTH,
    Attends,
    ReadsNames,
    TiedLM,
    contents,
    converted,
    floats,
    gpt2,
    ids,
    perturb,
    plan_of,
    rewritten,
    snapshot,
)


def facts(model: nn.Module) -> dict[str, Any]:
    return {name: (id(p), p.requires_grad, id(p.grad)) for name, p in model.named_parameters()}


def test_parameters_are_the_same_objects_with_their_gradients() -> None:
    model = perturb(TiedLM())
    model(ids()).sum().backward()
    before = facts(model)
    root = converted(model, (ids(),), fuse=False)
    after = facts(root)
    assert {name: after[name] for name in after if name in before} == before
    assert [name for name in after if name not in before] == ["norm.bias"]
    assert not root.norm.bias.requires_grad


def test_a_fusion_of_one_linear_holds_the_same_objects_under_tes_names() -> None:
    model = perturb(TiedLM())
    model(ids()).sum().backward()
    before = facts(model)
    root = converted(model, (ids(),))
    renamed = {
        "norm.weight": "layernorm_up.layer_norm_weight",
        "up.weight": "layernorm_up.weight",
        "up.bias": "layernorm_up.bias",
        "final.weight": "layernorm_head.layer_norm_weight",
    }
    after = facts(root)
    assert {name: after[name] for name in after if name != "layernorm_up.layer_norm_bias"} == {
        renamed.get(name, name): value for name, value in before.items()
    }
    assert not root.layernorm_up.layer_norm_bias.requires_grad
    assert all((id(root.get_parameter(new)), new) == (id(_read(root, old)), new) for old, new in renamed.items())


def _read(root: nn.Module, name: str) -> Any:
    """A member's parameter, which is borrowed and so no entry of ``_parameters``."""
    owner, _, leaf = name.rpartition(".")
    return getattr(root.get_submodule(owner), leaf)


def test_a_fusion_of_several_linears_holds_everything_once() -> None:
    model: Any = perturb(Attends())
    model(ids()).sum().backward()
    values = {key: value.clone() for key, value in model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    own = {name: p for name, p in model.named_parameters() if "_proj" in name}
    root = converted(model, (ids(),))
    fused = root.attn.layernorm_qkv
    for leaf in ("weight", "bias"):
        joined = getattr(fused, leaf)
        parts = [f"attn.{short}_proj.{leaf}" for short in "qkv"]
        assert torch.equal(joined, torch.cat([values[name] for name in parts]))
        assert torch.equal(joined.grad, torch.cat([grads[name] for name in parts]))
        for index, name in enumerate(parts):
            start = index * WIDTH
            assert torch.equal(_read(root, name), values[name])
            for part in (_read(root, name), own[name]):  # what was the Parameter shows the new memory and frees its own
                assert part.untyped_storage().data_ptr() == joined.untyped_storage().data_ptr()
                assert part.data_ptr() == joined[start].data_ptr()
    assert root.norm.weight is fused.layer_norm_weight
    assert torch.equal(root.norm.weight.grad, grads["norm.weight"])
    with torch.no_grad():
        root.attn.k_proj.weight.zero_()
    assert torch.equal(fused.weight[WIDTH : 2 * WIDTH], torch.zeros(WIDTH, WIDTH))


@FUSE
def test_ties_and_aliases_survive(fuse: bool) -> None:
    model = converted(TiedLM(), (ids(),), fuse=fuse)
    assert model.head.weight is model.embed.weight
    assert model.up is model.blocks[0]
    for member in (model.head, model.up):
        assert (is_converted(member), is_borrower(member)) == (not fuse, fuse)
    if fuse:
        assert model.layernorm_head.weight is model.embed.weight


@FUSE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_stays(dtype: torch.dtype, fuse: bool) -> None:
    model = converted(perturb(TiedLM()).to(dtype), (ids(),), fuse=fuse)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model(ids()).dtype is dtype


@FUSE
def test_train_flags_stay_module_by_module(fuse: bool) -> None:
    model = TiedLM()
    model.up.eval()
    flags = {name: module.training for name, module in model.named_modules()}
    added = {"layernorm_up": True, "layernorm_head": True} if fuse else {}
    root = converted(model, (ids(),), fuse=fuse)
    assert {name: module.training for name, module in root.named_modules()} == {**flags, **added}
    root.eval()
    assert not any(module.training for module in root.modules())


def test_state_dict_keys_stay_in_order() -> None:
    model = TiedLM()
    keys = list(model.state_dict())
    assert list(converted(model, (ids(),), fuse=False).state_dict()) == keys


def test_a_fusion_stands_last_in_the_state_dict_and_the_originals_keys_stay_in_order() -> None:
    model = Attends()
    keys, others = list(model.state_dict()), ["embed.weight", "attn.o_proj.weight", "attn.o_proj.bias"]
    root = converted(model, (ids(),))
    names = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
    assert list(root.state_dict()) == [*others, *(f"attn.layernorm_qkv.{name}" for name in names)]
    assert list(te_convert.original_state_dict(root)) == keys


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


@FUSE
def test_an_optimizer_made_before_trains_the_converted_model(fuse: bool) -> None:
    model = perturb(TiedLM())
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, twin)]
    root = converted(model, (ids(),), fuse=fuse)
    start = root.up.weight.detach().clone()
    for module, optimizer in zip((root, twin), optimizers, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            module(ids()).pow(2).mean().backward()
            optimizer.step()
    torch.testing.assert_close(root(ids()), twin(ids()), rtol=1e-4, atol=1e-4)
    assert not torch.equal(root.up.weight, start)


@pytest.mark.report("pytorch/ao#2241", "peer:root-linear")
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


@FUSE
@pytest.mark.parametrize("make", [TiedLM, gpt2, Attends], ids=["tied", "gpt2", "attends"])
def test_copies_stay_converted_and_equal(make: Any, fuse: bool) -> None:
    model = converted(make(), (ids(),), fuse=fuse)
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
        assert borrowers(other) == borrowers(model)
        assert bool(borrowers(model)) == fuse
        for fusion in filter(is_fused, other.modules()):
            record = get_fused(fusion)
            assert record.module is fusion
            assert {id(member) for role, member in record.members if role != "owner"} <= set(map(id, other.modules()))
        assert _logits(te_convert.revert(other), ids()).equal(_logits(te_convert.revert(copy.deepcopy(model)), ids()))


def is_fused(module: nn.Module) -> bool:
    return fused_record(module) is not None


def borrowers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_borrower(module)]


def _logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    output = model(tokens)
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return logits


@FUSE
def test_to_another_dtype_reaches_the_replacements(fuse: bool) -> None:
    model = converted(perturb(TiedLM()), (ids(),), fuse=fuse).to(torch.bfloat16)
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
    plan = plan_of(model, (ids(),), fuse=False)
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


@pytest.mark.parametrize("make", [TiedLM, gpt2, Attends], ids=["tied", "gpt2", "attends"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_between_fusions_restores_everything(
    make: Any, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    output = model(ids())
    (output if isinstance(output, torch.Tensor) else output.logits).sum().backward()
    plan = plan_of(model, (ids(),))
    before = contents(model)
    calls = []

    def fails_at_the_last(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == len(plan.fusions):
            raise error("planted")
        return fuse_modules(*args)

    monkeypatch.setattr(rewrite_apply, "fuse", fails_at_the_last)
    with pytest.raises(error, match="planted"):
        rewrite_apply.apply_plan(model, plan, "reference")
    assert len(calls) == len(plan.fusions) > 0
    assert contents(model) == before


@pytest.mark.parametrize(("fuse", "steps"), [(False, 5), (True, 3)], ids=["leaf", "fused"])
def test_a_progress_callback_that_raises_restores_everything(fuse: bool, steps: int) -> None:
    for last in range(1, steps + 1):
        model = TiedLM()
        plan = plan_of(model, (ids(),), fuse=fuse)
        before = contents(model) if fuse else snapshot(model)
        seen: list[tuple[int, int]] = []

        def stop(done: int, total: int, seen: list[tuple[int, int]] = seen, last: int = last) -> None:
            seen.append((done, total))
            if done == last:
                raise RuntimeError("stop")

        with pytest.raises(RuntimeError, match="stop"):
            rewrite_apply.apply_plan(model, plan, "reference", stop)
        assert seen == [(done, steps) for done in range(1, last + 1)]
        assert len(plan.swaps) + len(plan.fusions) == steps
        assert (contents(model) if fuse else snapshot(model)) == before


@FUSE
def test_a_plan_for_another_model_changes_nothing(fuse: bool) -> None:
    plan = plan_of(TiedLM(), (ids(),), fuse=fuse)
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    before = snapshot(other)
    with pytest.raises(KeyError):
        rewrite_apply.apply_plan(other, plan, "reference")
    assert snapshot(other) == before


@pytest.mark.parametrize("make", [TiedLM, gpt2], ids=["tied", "gpt2"])
def test_undo_of_one_site_and_of_all(make: Any) -> None:
    model = make()
    before, kinds = snapshot(model), {name: type(module) for name, module in model.named_modules()}
    applied = rewritten(model, (ids(),), fuse=False)
    names = list(applied.sites)
    assert len(names) >= 5
    applied.undo(names[1])
    assert type(model.get_submodule(names[1])) is kinds[names[1]]
    assert [name for name, m in model.named_modules() if is_converted(m)] == [name for name in names if name != names[1]]
    applied.undo_all()
    assert snapshot(model) == before


@pytest.mark.parametrize("make", [TiedLM, gpt2, Attends], ids=["tied", "gpt2", "attends"])
def test_undo_of_one_fusion_and_of_all(make: Any) -> None:
    model = perturb(make())
    output = model(ids())
    (output if isinstance(output, torch.Tensor) else output.logits).sum().backward()
    before = contents(model)
    kinds = {name: type(module) for name, module in model.named_modules()}
    plan = plan_of(model, (ids(),))
    for fusion in plan.fusions:
        applied = rewrite_apply.apply_plan(model, plan, "reference")
        names = list(applied.sites)
        assert names == [decision.fqn for decision in plan.swaps] + [each.fqn for each in plan.fusions]
        applied.undo(fusion.fqn)
        assert {name: type(model.get_submodule(name)) for name in (m.fqn for m in fusion.members)} == {
            member.fqn: kinds[member.fqn] for member in fusion.members
        }
        others = [name for name in names if name != fusion.fqn]
        assert sorted(name for name, m in model.named_modules() if is_converted(m)) == sorted(others)
        applied.undo_all()
        assert contents(model) == before


@FUSE
def test_undo_brings_the_own_weights_back_whatever_the_replacement_holds(fuse: bool) -> None:
    model: Any = perturb(TiedLM())
    before = contents(model) if fuse else snapshot(model)
    applied = rewritten(model, (ids(),), fuse=fuse)
    (model.layernorm_up if fuse else model.up)._parameters["weight"] = nn.Parameter(torch.zeros(16, WIDTH))
    applied.undo_all()
    assert (contents(model) if fuse else snapshot(model)) == before


@FUSE
@pytest.mark.parametrize("make", [gpt2, Attends], ids=["gpt2", "attends"])
def test_revert_takes_over_what_was_trained(make: Any, fuse: bool) -> None:
    model = converted(perturb(make()), (ids(),), fuse=fuse)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
    expected = _logits(model, ids())
    back = te_convert.revert(model)
    assert not any(map(is_converted, back.modules()))
    assert not borrowers(back)
    torch.testing.assert_close(_logits(back, ids()), expected)


@pytest.mark.parametrize(
    ("include", "site", "fuse"),
    [("up", "up", False), (["norm", "up"], "layernorm_up", False), (["norm", "up"], "layernorm_up", True)],
    ids=["leaf", "fused, then leaf", "fused"],
)
def test_sites_of_an_earlier_conversion_stay_when_a_later_one_is_undone(include: Any, site: str, fuse: bool) -> None:
    model = converted(perturb(TiedLM()), (ids(),), include=include)
    applied = rewritten(model, (ids(),), fuse=fuse)
    assert set(applied.sites) > {site}
    assert model.get_submodule(site) is applied.sites[site]
    applied.undo_all()
    assert [name for name, m in model.named_modules() if is_converted(m)] == [site]
    assert te_convert.verify(te_convert.revert(copy.deepcopy(model)), model, (ids(),)).passed


def test_a_converted_module_knows_where_it_came_from() -> None:
    model = converted(TiedLM(), (ids(),), fuse=False)
    record = get_record(model.up)
    assert (record.decision.fqn, record.backend, type(record.original)) == ("up", "reference", nn.Linear)
    with pytest.raises(KeyError):
        get_record(model.embed)
