"""Traps 11 and 12: copies of a model and of a part of it, undo, dtype changes, files with shared storage."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import te_convert
from te_convert.rewrite.apply import apply_plan
from te_convert.rewrite.fused import get_fused
from te_convert.rewrite.loans import is_borrower
from te_convert.rewrite.site import is_converted
from tests.rewrite.rewrite_samples import contents, plan_of
from tests.rewrite.trap_samples import (
    Net,
    One,
    Pair,
    assert_near,
    assert_same_gradients,
    gradients,
    loss_of,
    pair,
    perturb,
    relative_error,
    x_of,
)

QKV, FFN = "blocks.0.attn.layernorm_qkv", "blocks.0.mlp"


def _saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": _saved,
}


# ---- 11: copies and undo ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", COPIES)
def test_trap_11_a_copy_fuses_computes_and_trains_by_itself(way: str) -> None:
    made = pair(Net(), fused=5)
    other: Any = COPIES[way](made.model)
    for name, module in other.named_modules():
        assert is_converted(module) == is_converted(made.model.get_submodule(name))
        assert is_borrower(module) == is_borrower(made.model.get_submodule(name))
    assert not {id(p) for p in other.parameters()} & {id(p) for p in made.model.parameters()}
    assert not {p.data_ptr() for p in other.parameters()} & {p.data_ptr() for p in made.model.parameters()}
    assert_near(other(x_of()), made.original(x_of()))
    for fqn in made.fused:
        assert (get_fused(other.get_submodule(fqn)).executed, get_fused(other.get_submodule(fqn)).fallbacks) == (1, 0)
    assert made.counts(QKV) == (0, 0)
    with torch.no_grad():
        other.blocks[0].attn.q_proj.weight.zero_()
        other.blocks[0].norm1.weight.zero_()
    assert_near(made.model(x_of()), made.original(x_of()))
    fresh = COPIES[way](made.model)
    for model in (fresh, made.original):
        loss_of(model(x_of())).backward()
    assert all(p.grad is None for p in made.model.parameters())
    assert_same_gradients(gradients(fresh), gradients(made.original))


def test_trap_11_a_copy_between_norm_and_reader_copies_values() -> None:
    made = pair(One(), fused=1)
    n = made.model.norm(x_of())
    assert relative_error(copy.deepcopy(n.detach()), made.original.norm(x_of())) <= 2e-5
    assert relative_error(pickle.loads(pickle.dumps(n.detach())), made.original.norm(x_of())) <= 2e-5
    assert_near(made.model.a(n), made.original.a(made.original.norm(x_of())))


@pytest.mark.parametrize("part", ["blocks.0", "blocks.0.attn", "blocks.0.mlp", "blocks.0.norm1", "blocks.0.attn.q_proj"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_trap_11_a_copied_part_works_alone(part: str, way: str) -> None:
    made = pair(Net(), fused=5)
    other = COPIES[way](made.model.get_submodule(part))
    original = made.original.get_submodule(part)
    assert_near(_plain(other(x_of())), original(x_of()))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert_near(made.model(x_of()), made.original(x_of()))


def _plain(y: torch.Tensor) -> torch.Tensor:
    return y * 1 if type(y) is not torch.Tensor else y


def test_trap_11_a_copied_reader_is_not_the_originals_partner() -> None:
    """The copy of an attention gets the norm's lazy tensor from the model that it was copied from."""
    made = pair(Net(1), fused=3)
    for model in made.both():
        model.blocks[0].attn = copy.deepcopy(model.blocks[0].attn)
        with torch.no_grad():
            model.blocks[0].attn.k_proj.weight.mul_(2)
    assert_near(made.model(x_of()), made.original(x_of()))


def test_trap_11_deepcopied_blocks_stacked_onto_the_model() -> None:
    made = pair(Net(1), fused=3)
    for model in made.both():
        model.blocks.append(copy.deepcopy(model.blocks[0]))
    assert_near(made.model(x_of()), made.original(x_of()))
    record = get_fused(made.model.get_submodule("blocks.1.attn.layernorm_qkv"))
    assert (record.executed, record.fallbacks) == (1, 0)


@pytest.mark.parametrize("ran", [False, True])
def test_trap_11_undo_brings_back_every_object_bit_for_bit(ran: bool) -> None:
    model = perturb(Net())
    if ran:
        model(x_of()).sum().backward()
    before = contents(model)
    applied = apply_plan(model, plan_of(model, (x_of(),)), "reference")
    assert sum(map(is_borrower, model.modules())) > 8
    if ran:
        model(x_of())
    applied.undo_all()
    assert contents(model) == before


def test_trap_11_undo_of_one_fusion_leaves_the_others() -> None:
    model = perturb(Net())
    expected = model(x_of())
    applied = apply_plan(model, plan_of(model, (x_of(),)), "reference")
    applied.undo(QKV)
    applied.undo(FFN)
    assert not is_borrower(model.get_submodule("blocks.0.norm1"))
    assert is_borrower(model.get_submodule("blocks.1.norm1"))
    assert type(model.get_submodule(FFN)).__name__ == "MLP"
    assert_near(model(x_of()), expected)
    applied.undo_all()
    assert torch.equal(model(x_of()), expected)


def test_trap_11_revert_gives_the_originals_numbers_bit_for_bit() -> None:
    made = pair(Net(), fused=5)
    made.model(x_of()).sum().backward()
    back = te_convert.revert(made.model)
    assert {name: type(m) for name, m in back.named_modules()} == {name: type(m) for name, m in made.original.named_modules()}
    assert list(back.state_dict()) == list(made.original.state_dict())
    for name, tensor in made.original.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)
        assert back.get_parameter(name).is_contiguous()
        assert back.get_parameter(name).untyped_storage().nbytes() == tensor.numel() * 4
    assert torch.equal(back(x_of()), made.original(x_of()))


# ---- 12: dtype changes and files -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_trap_12_to_another_dtype_keeps_members_views_of_the_fused_weight(dtype: torch.dtype) -> None:
    made = pair(Net(), fused=5)
    for model in made.both():
        model.to(dtype)
    fused = made.model.get_submodule(QKV)
    attn = made.model.blocks[0].attn
    assert {p.dtype for p in made.model.parameters()} == {dtype}
    assert attn.k_proj.weight.dtype is dtype
    with torch.no_grad():
        attn.k_proj.weight[0, 0] = 3.0
    assert fused.weight[16, 0] == 3.0
    with torch.no_grad():
        made.original.blocks[0].attn.k_proj.weight[0, 0] = 3.0
    outputs = [model(x_of().to(dtype)) for model in made.both()]
    assert outputs[1].dtype is dtype
    assert made.counts(QKV) == (1, 0)
    bound = {torch.float64: 1e-12, torch.bfloat16: 6e-2, torch.float16: 8e-3}[dtype]
    assert relative_error(outputs[1].double(), outputs[0].double()) <= bound


def test_trap_12_to_on_a_member_alone_does_not_tear_the_group_apart() -> None:
    made = pair(One(), fused=1)
    made.model.a.to(torch.float64)  # owns no parameter any more: the group keeps its dtype
    assert made.model.a.weight.dtype is torch.float32
    assert_near(made.model(x_of()), made.original(x_of()))


@pytest.mark.parametrize("swap", [True, False])
def test_trap_12_to_float64_and_back_with_either_way_of_torch_to_replace_tensors(swap: bool) -> None:
    made = pair(One(), fused=1)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        made.model.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert_near(made.model(x_of()), made.original(x_of()))
    assert made.counts("layernorm_a_b") == (1, 0)


def _states(made: Pair) -> dict[str, dict[str, Any]]:
    return {"te": dict(made.model.state_dict()), "original": dict(te_convert.original_state_dict(made.model))}


@pytest.mark.parametrize("layout", ["te", "original"])
def test_trap_12_safetensors_stores_and_loads_both_layouts(layout: str, tmp_path: Path) -> None:
    made = pair(Net(), fused=5)
    state = _states(made)[layout]
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "m.safetensors")
    assert sum(t.numel() for t in state.values()) == sum(t.numel() for t in made.original.state_dict().values())
    fresh = pair(Net(), fused=5).model
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(1.0)
    fresh.load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert_near(fresh(x_of()), made.original(x_of()))


def test_trap_12_safetensors_takes_the_original_layout_as_it_is(tmp_path: Path) -> None:
    """q, k and v are parts of one storage, but do not overlap."""
    made = pair(One(), fused=1)
    state = te_convert.original_state_dict(made.model)
    assert state["a.weight"].untyped_storage().data_ptr() == state["b.weight"].untyped_storage().data_ptr()
    save_file(dict(state), tmp_path / "m.safetensors")
    loaded = load_file(tmp_path / "m.safetensors")
    for name, tensor in made.original.state_dict().items():
        assert torch.equal(loaded[name], tensor)


def test_trap_12_torch_save_of_one_part_loads_as_that_part() -> None:
    made = pair(One(), fused=1)
    buffer = io.BytesIO()
    torch.save(te_convert.original_state_dict(made.model)["b.weight"].clone(), buffer)
    clone_size = len(buffer.getvalue())
    buffer = io.BytesIO()
    torch.save(made.model.b.weight.detach(), buffer)
    assert len(buffer.getvalue()) > clone_size  # the whole joint storage: docs tell to clone
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), made.original.b.weight)


def test_trap_12_an_original_checkpoint_reaches_every_part() -> None:
    made = pair(Net(), fused=5)
    torch.manual_seed(9)
    other = Net()
    torch.manual_seed(10)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    made.model.load_state_dict(other.state_dict())
    assert_near(made.model(x_of()), other(x_of()))
    assert list(te_convert.original_state_dict(made.model)) == list(other.state_dict())
    for name, tensor in te_convert.original_state_dict(made.model).items():
        assert torch.equal(tensor, other.state_dict()[name])


def test_trap_12_replacing_a_borrowed_parameter_is_refused_with_a_way_out() -> None:
    made = pair(One(), fused=1)
    with pytest.raises(AttributeError, match="revert"):
        made.model.a.weight = nn.Parameter(torch.zeros(6, 16))
    with pytest.raises(AttributeError, match="revert"):
        made.model.norm.register_parameter("bias", None)
    assert_near(made.model(x_of()), made.original(x_of()))


def test_trap_12_an_optimizer_made_after_the_conversion_trains_as_the_original() -> None:
    made = pair(Net(1), fused=3)
    for model in made.both():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            model(x_of(seed=step)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    state = te_convert.original_state_dict(made.model)
    for name, tensor in made.original.state_dict().items():
        assert relative_error(state[name], tensor) <= 1e-4, name
    assert relative_error(made.model(x_of()), made.original(x_of())) <= 1e-4
