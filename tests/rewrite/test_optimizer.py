"""Optimizers move to the converted parameters and back, with their state, and then take the same steps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import te_convert
from te_convert.errors import InputError
from te_convert.rewrite.optimizer import Link, move_optimizer
from tests.integration.language_models import build, ids

Make = Callable[[Any], torch.optim.Optimizer]
STEPS = 2


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Its eps is above rounding noise: a key bias has no gradient in theory, and Adam would blow its noise up to whole steps."""
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1, amsgrad=True, eps=1e-4)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=3e-3, momentum=0.9, nesterov=True)


OPTIMIZERS = pytest.mark.parametrize("make", [adamw, momentum])


def train(model: Any, optimizer: torch.optim.Optimizer, first: int, count: int = STEPS) -> list[float]:
    losses = []
    for step in range(first, first + count):
        batch = ids(2, 8 + step)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def convert(model: Any, **options: Any) -> te_convert.Result:
    return te_convert.convert(model, {"input_ids": ids()}, verify=False, backend="reference", **options)


def difference(one: nn.Module, other: nn.Module) -> float:
    """Largest difference of any weight in the original layout."""
    left, right = te_convert.original_state_dict(one), te_convert.original_state_dict(other)
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).detach().abs().max()) for name in left)


def tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


@OPTIMIZERS
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gpt_neox"])
@pytest.mark.report("peer:optimizer")
def test_the_next_steps_are_the_originals(name: str, make: Make) -> None:
    model = build(name)
    optimizer = make(model.parameters())
    train(model, optimizer, 0)
    result = convert(model)
    moved = te_convert.remap_optimizer(optimizer, result)
    shared = {tensor.data_ptr() for tensor in tensors(optimizer)} & {tensor.data_ptr() for tensor in tensors(moved)}
    assert not shared  # else one of the two would step the other's moments
    held = {id(parameter) for group in moved.param_groups for parameter in group["params"]}
    assert held == {id(p) for p in result.model.parameters() if p.requires_grad}
    assert train(result.model, moved, STEPS) == pytest.approx(train(model, optimizer, STEPS), rel=1e-5)
    assert difference(model, result.model) < 2e-5


def test_the_moments_of_joined_weights_follow() -> None:
    """After three steps and one more on either side, Adam's own state is the original's, block for block."""
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train(model, optimizer, 0, 3)
    result = convert(model)
    moved = te_convert.remap_optimizer(optimizer, result)
    train(model, optimizer, 3, 1)
    train(result.model, moved, 3, 1)
    for joined, names in (
        ("self_attn.layernorm_qkv.weight", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("mlp.fc1_weight", ("mlp.gate_proj", "mlp.up_proj")),
    ):
        ours = moved.state[result.model.get_parameter(f"model.layers.1.{joined}")]
        theirs = [optimizer.state[model.get_parameter(f"model.layers.1.{name}.weight")] for name in names]
        for key in ("exp_avg", "exp_avg_sq"):
            expected = torch.cat([state[key] for state in theirs])
            assert float((ours[key] - expected).abs().max() / expected.abs().max()) < 1e-5
        assert ours["step"] == theirs[0]["step"] == 4


def test_without_the_moments_the_next_steps_are_others() -> None:
    """What the comparison above would see if the state were lost, or the blocks of a joined weight were exchanged."""
    model = build("llama")
    optimizer = adamw(model.parameters())
    train(model, optimizer, 0)
    lost, mixed = convert(model), convert(model)
    train(lost.model, adamw(lost.model.parameters()), STEPS)
    wrong = te_convert.remap_optimizer(optimizer, mixed)
    qkv = mixed.model.get_parameter("model.layers.0.self_attn.layernorm_qkv.weight")
    wrong.state[qkv] = {k: v.roll(48, 0) if v.dim() else v for k, v in wrong.state[qkv].items()}
    train(mixed.model, wrong, STEPS)
    train(model, optimizer, STEPS)
    assert difference(model, lost.model) > 1e-3
    assert difference(model, mixed.model) > 1e-3


@OPTIMIZERS
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_revert_takes_the_optimizer_back(name: str, make: Make) -> None:
    model = build(name)
    plain = copy.deepcopy(model)
    optimizer = make(plain.parameters())
    result = convert(model)
    moved = te_convert.remap_optimizer(make(model.parameters()), result)
    for each, steps in ((plain, optimizer), (result.model, moved)):
        train(each, steps, 0)
    back = te_convert.revert(result.model, moved)
    assert {id(p) for group in moved.param_groups for p in group["params"]} == {id(p) for p in back.parameters()}
    assert train(back, moved, STEPS) == pytest.approx(train(plain, optimizer, STEPS), rel=1e-5)
    assert difference(plain, back) < 2e-5


def test_param_groups_names_and_schedulers_stay() -> None:
    model = build("llama")
    decayed: list[Any] = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    others: list[Any] = [(n, p) for n, p in model.named_parameters() if p.dim() == 1]
    groups: Any = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, 0)
    scheduler.step()
    result = convert(model)
    moved = te_convert.remap_optimizer(optimizer, result, inplace=True)
    assert moved is optimizer
    names = {id(parameter): name for name, parameter in result.model.named_parameters()}
    for group, dims in zip(moved.param_groups, (2, 1), strict=True):
        assert [names[id(p)] for p in group["params"]] == group["param_names"]
        assert all(min(p.dim(), 2) == dims for p in group["params"])
    train(result.model, moved, STEPS)
    scheduler.step()
    assert [group["lr"] for group in moved.param_groups] == [1e-3 / 4, 1e-2 / 4]
    assert [group["weight_decay"] for group in moved.param_groups] == [0.1, 0.0]


def test_a_copy_leaves_the_schedulers_step_behind() -> None:
    model = build("llama")
    optimizer = adamw(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    result = convert(model)
    moved = te_convert.remap_optimizer(optimizer, result)
    before = {name: tensor.clone() for name, tensor in te_convert.original_state_dict(model).items()}
    train(result.model, moved, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in te_convert.original_state_dict(model).items())
    assert difference(model, result.model) > 1e-3


def test_settings_that_differ_inside_a_joined_weight_are_named() -> None:
    model = build("llama")
    query = model.model.layers[0].self_attn.q_proj.weight
    rest = [parameter for parameter in model.parameters() if parameter is not query]
    groups: Any = [{"params": [query], "lr": 1.0}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    before = copy.deepcopy(optimizer.state_dict())
    result = convert(model)
    with pytest.raises(InputError, match=r"layers\.0\.self_attn\.q_proj\.weight and .*k_proj\.weight became .* differ in lr"):
        te_convert.remap_optimizer(optimizer, result, inplace=True)
    assert optimizer.state_dict() == before
    equal = torch.optim.AdamW([{"params": [query]}, {"params": rest}], lr=1e-3)
    moved = te_convert.remap_optimizer(equal, result)
    assert [len(group["params"]) for group in moved.param_groups] == [1, len(list(result.model.parameters())) - 1]


def test_a_member_that_the_optimizer_lacks_is_named() -> None:
    model = build("llama")
    query = model.model.layers[0].self_attn.q_proj.weight
    optimizer = adamw([parameter for parameter in model.parameters() if parameter is not query])
    with pytest.raises(InputError, match=r"q_proj\.weight is not in the optimizer"):
        te_convert.remap_optimizer(optimizer, convert(model))


def test_state_of_another_shape_is_refused_for_joined_weights_only() -> None:
    model = build("llama")
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    train(model, optimizer, 0)
    with pytest.raises(InputError, match="row_var"):
        te_convert.remap_optimizer(optimizer, convert(model))
    plain = convert(model, fuse=False)
    moved = te_convert.remap_optimizer(optimizer, plain)
    assert train(plain.model, moved, STEPS) == pytest.approx(train(model, optimizer, STEPS), rel=1e-5)


def test_members_of_which_only_some_were_stepped() -> None:
    model = build("llama")
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    optimizer = adamw(model.parameters())
    train(model, optimizer, 0)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    with pytest.raises(InputError, match="only some of them were stepped"):
        te_convert.remap_optimizer(optimizer, convert(model))


@pytest.mark.report("huggingface/accelerate#3554", "huggingface/accelerate#3870", "huggingface/accelerate#3154", "peer:optimizer")
def test_tied_and_frozen_parameters() -> None:
    model = build("llama", tie_word_embeddings=True)
    model.model.layers[1].mlp.requires_grad_(False)
    optimizer = adamw(model.parameters())
    train(model, optimizer, 0)
    result = convert(model)
    moved = te_convert.remap_optimizer(optimizer, result)
    frozen = {id(p) for p in result.model.parameters() if not p.requires_grad}
    assert frozen
    assert not any(id(p) in frozen and moved.state.get(p) for group in moved.param_groups for p in group["params"])
    assert train(result.model, moved, STEPS) == pytest.approx(train(model, optimizer, STEPS), rel=1e-5)
    assert difference(model, result.model) < 2e-5


def test_a_second_conversion_moves_only_what_it_changed() -> None:
    model = build("gpt2")
    first = te_convert.convert(model, {"input_ids": ids()}, include="transformer.h.0.*", verify=False, backend="reference")
    optimizer = adamw(first.model.parameters())
    train(first.model, optimizer, 0)
    second = convert(first.model)
    moved = te_convert.remap_optimizer(optimizer, second)
    assert train(second.model, moved, STEPS) == pytest.approx(train(first.model, optimizer, STEPS), rel=1e-5)
    assert difference(first.model, second.model) < 2e-5


def test_inplace_conversion() -> None:
    model = build("llama")
    plain = copy.deepcopy(model)
    optimizers = [adamw(each.parameters()) for each in (model, plain)]
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        train(each, optimizer, 0)
    result = convert(model, inplace=True)
    te_convert.remap_optimizer(optimizers[0], result, inplace=True)
    assert train(result.model, optimizers[0], STEPS) == pytest.approx(train(plain, optimizers[1], STEPS), rel=1e-5)


def test_what_cannot_be_moved_says_so() -> None:
    model = build("llama")
    result = convert(model)
    with pytest.raises(InputError, match="no parameter of the model"):
        te_convert.remap_optimizer(adamw(build("llama").parameters()), result)
    with pytest.raises(InputError, match="no parameter of the model"):
        te_convert.remap_optimizer(adamw(model.parameters()), pickle.loads(pickle.dumps(result)))
    with pytest.raises(InputError, match="LBFGS"):
        te_convert.remap_optimizer(torch.optim.LBFGS(model.parameters()), result)
    with pytest.raises(InputError, match="takes a torch optimizer"):
        te_convert.remap_optimizer(model, result)


def test_parameters_of_other_models_stay() -> None:
    other = nn.Parameter(torch.ones(3))
    old, new = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = momentum([other, old])
    other.grad, old.grad = torch.ones(3), torch.ones(2)
    optimizer.step()
    moved = move_optimizer(optimizer, [Link(("a",), (old,), "b", new, None)], inplace=False)
    assert [id(p) for p in moved.param_groups[0]["params"]] == [id(other), id(new)]
    assert torch.equal(moved.state[other]["momentum_buffer"], torch.ones(3))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("how", ["torch", "safetensors", "dcp"])
def test_training_resumes_from_a_checkpoint(how: str, tmp_path: Path) -> None:
    model = build("llama")
    optimizer = adamw(model.parameters())
    train(model, optimizer, 0)
    result = convert(model)
    twin, moved = result.model, te_convert.remap_optimizer(optimizer, result)
    train(twin, moved, STEPS, 1)
    fresh = convert(build("llama")).model
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.mul_(0.5)
    again = adamw(fresh.parameters())
    SAVE[how](twin, moved, fresh, again, tmp_path)
    assert train(fresh, again, STEPS + 1, 1) == train(twin, moved, STEPS + 1, 1)
    assert difference(twin, fresh) == 0


def _with_torch(twin: Any, moved: Any, fresh: Any, again: Any, folder: Path) -> None:
    torch.save({"model": twin.state_dict(), "optimizer": moved.state_dict()}, folder / "state.pt")
    state = torch.load(folder / "state.pt", weights_only=True)
    fresh.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])


def _with_safetensors(twin: Any, moved: Any, fresh: Any, again: Any, folder: Path) -> None:
    state = moved.state_dict()
    flat = {f"{index}.{key}": value for index, entry in state["state"].items() for key, value in entry.items()}
    save_file({name: tensor.contiguous() for name, tensor in twin.state_dict().items()}, folder / "model.safetensors")
    save_file(flat, folder / "optimizer.safetensors")
    fresh.load_state_dict(load_file(folder / "model.safetensors"))
    entries: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "optimizer.safetensors").items():
        index, _, key = name.partition(".")
        entries.setdefault(int(index), {})[key] = tensor
    again.load_state_dict({"state": entries, "param_groups": state["param_groups"]})


def _with_checkpoint(twin: Any, moved: Any, fresh: Any, again: Any, folder: Path) -> None:
    weights, state = get_state_dict(twin, moved)
    save({"model": weights, "optimizer": state}, checkpoint_id=folder, no_dist=True)
    weights, state = get_state_dict(fresh, again)
    load({"model": weights, "optimizer": state}, checkpoint_id=folder, no_dist=True)
    set_state_dict(fresh, again, model_state_dict=weights, optim_state_dict=state)


SAVE: dict[str, Any] = {"torch": _with_torch, "safetensors": _with_safetensors, "dcp": _with_checkpoint}
