"""What the two processes of the distributed tests do; each case leaves its figures or its error in a file for the test to read."""

from __future__ import annotations

import copy
import json
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import te_convert
from te_convert.rewrite.fused import fused_record
from tests.integration.language_models import build, ids

Figures = dict[str, Any]
Wrap = Callable[[Any, DeviceMesh], Any]


def convert(model: Any) -> Any:
    return te_convert.convert(model, {"input_ids": ids()}, verify=False, backend="reference").model


def ddp(model: Any, mesh: DeviceMesh) -> Any:
    return nn.parallel.DistributedDataParallel(model)


def each_layer(model: Any, mesh: DeviceMesh) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(model: Any, mesh: DeviceMesh) -> Any:
    return fully_shard(model, mesh=mesh)


def each_part(model: Any, mesh: DeviceMesh) -> Any:
    for layer in model.model.layers:
        fully_shard(layer.self_attn, mesh=mesh)
        fully_shard(layer.mlp, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def new_optimizer(model: Any) -> torch.optim.Optimizer:
    """Its eps is above rounding noise, which Adam would otherwise blow up to whole steps."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range = range(2)) -> list[float]:
    """The losses of this rank, on its own rows."""
    losses, rank = [], dist.get_rank()
    for step in steps:
        batch = ids(4, 8 + step)[2 * rank : 2 * rank + 2]
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def trains(name: str, wrap: Wrap) -> Callable[[DeviceMesh, Path], Figures]:
    def case(mesh: DeviceMesh, folder: Path) -> Figures:
        model = build(name)
        alone, twin = copy.deepcopy(model), convert(model)
        losses, states = [], []
        for each in (model, twin):
            wrapped = wrap(each, mesh)
            losses.append(train(wrapped, new_optimizer(wrapped), range(3)))
            states.append({key: _full(tensor) for key, tensor in te_convert.original_state_dict(each).items()})
        kept = all(torch.equal(tensor, states[0][key]) for key, tensor in alone.state_dict().items())
        apart = max(float((tensor - states[1][key]).abs().max()) for key, tensor in states[0].items())
        ran = sum(record.executed for module in twin.modules() if (record := fused_record(module)) is not None)
        same = states[0].keys() == states[1].keys()
        return {"losses": losses, "difference": apart, "untrained": kept, "same keys": same, "ran": ran}

    return case


def _full(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def resumes(mesh: DeviceMesh, folder: Path) -> Figures:
    """Two steps, a distributed checkpoint, and the third step of this model and of a fresh one that loaded it."""
    losses = []
    first = each_layer(convert(build("llama")), mesh)
    optimizer = new_optimizer(first)
    train(first, optimizer)
    weights, state = get_state_dict(first, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=folder / "checkpoint")
    losses.append(train(first, optimizer, range(2, 4)))
    other = build("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    again = each_layer(convert(other), mesh)
    optimizer = new_optimizer(again)
    weights, state = get_state_dict(again, optimizer)
    load({"model": weights, "optimizer": state}, checkpoint_id=folder / "checkpoint")
    set_state_dict(again, optimizer, model_state_dict=weights, optim_state_dict=state)
    losses.append(train(again, optimizer, range(2, 4)))
    return {"losses": losses}


def wrapped_models(mesh: DeviceMesh, folder: Path) -> Figures:
    """What convert() says about models that are wrapped or sharded already."""
    said = {}
    for name, wrap in {"ddp": ddp, "fsdp2": whole}.items():
        try:
            te_convert.convert(wrap(build("llama"), mesh), {"input_ids": ids()})
        except te_convert.errors.InputError as error:
            said[name] = f"{error}; {error.hint}"
    return said


CASES: dict[str, Callable[[DeviceMesh, Path], Figures]] = {
    "llama-ddp": trains("llama", ddp),
    "llama-layers": trains("llama", each_layer),
    "llama-whole": trains("llama", whole),
    "mixtral-layers": trains("mixtral", each_layer),
    "llama-parts": trains("llama", each_part),
    "resume": resumes,
    "wrapped": wrapped_models,
}


def work(rank: int, folder: Path) -> None:
    """All cases in one process group: starting one costs more than they do."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, case in CASES.items():
        try:
            found = case(mesh, folder)
        except Exception as error:
            found = {"error": str(error), "trace": traceback.format_exc()}
        (folder / f"{name}.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
