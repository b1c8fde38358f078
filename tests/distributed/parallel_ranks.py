"""What the two processes of the tensor-parallel tests do; each case leaves figures or an error in a file for the test to read."""

from __future__ import annotations

import copy
import json
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor

import te_convert
from te_convert.errors import TeConvertError
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.rewrite import tensor_parallel
from te_convert.rewrite.fused import fused_record
from te_convert.rewrite.tensor_parallel import parallel_modules
from tests.distributed.parallel_models import WIDTH, Attention, Block, Mlp, Net, make, moved
from tests.integration.language_models import ids

Figures = dict[str, Any]


def convert(model: Any, mesh: DeviceMesh, **options: Any) -> te_convert.Result:
    return te_convert.convert(model, {"input_ids": ids()}, backend="reference", tp_mesh=mesh, **options)


def first(output: Any) -> Tensor:
    """The logits or the hidden states."""
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return tensor


def apart(one: Any, other: Any) -> float:
    """Largest difference over the largest value."""
    scale = max(max(float(tensor.abs().max()) for tensor in one.values()), 1e-12)
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items()) / scale


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Of an original; zeros where a parameter has none."""
    named = model.named_parameters(remove_duplicate=False)
    return {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in named}


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of every parameter in the original layout, put together from all ranks by the same way as the values."""
    values = [(parameter, parameter.data) for parameter in model.parameters()]
    for parameter, value in values:
        parameter.data = torch.zeros_like(value) if parameter.grad is None else parameter.grad
    try:
        return {name: tensor.clone() for name, tensor in te_convert.original_state_dict(model).items()}
    finally:
        for parameter, value in values:
            parameter.data = value


def generated(model: Any, batch: Tensor) -> Any:
    """Six more tokens, greedily, with a cache."""
    return model.generate(batch, max_new_tokens=6, do_sample=False).tolist()


def steps(model: Any, count: int) -> list[float]:
    """Losses of AdamW on the same rows on every rank; its eps is above rounding noise."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4), []
    for step in range(count):
        loss = first(model(input_ids=ids(2, 8 + step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def divides(name: str) -> Callable[[DeviceMesh, Path], Figures]:
    """Outputs, gradients, two optimizer steps, state dicts, a member on its own, and the way back."""

    def case(mesh: DeviceMesh, folder: Path) -> Figures:
        original = make(name)
        result = convert(copy.deepcopy(original), mesh)
        model = result.model
        figures: Figures = {
            "modes": {fqn: module.__dict__[SITE_ATTRIBUTE].parallel.mode for fqn, module in parallel_modules(model)},
            "replicated": replicated(result),
            "scenarios": [[s.name, s.passed] for s in result.report.parity.scenarios if "ranks" in s.name],
            "share": sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in original.parameters()),
        }
        batch = ids(3, 11)
        for each in (original, model):
            first(each(input_ids=batch)).square().mean().backward()
        figures["output"] = apart({"": first(original(input_ids=batch)).detach()}, {"": first(model(input_ids=batch)).detach()})
        wanted = gradients_of(original)
        found = named_gradients(model)
        figures["gradients"] = apart(wanted, found)
        off = [record for module in model.modules() if (record := fused_record(module)) is not None]
        if name == "llama":
            figures["tokens"] = [generated(each, batch) for each in (original, model)]
        figures["fallbacks"] = sum(record.fallbacks for record in off)
        figures["off"] = alone(original, model, off, batch)
        for each in (original, model):
            each.zero_grad()
        losses = [steps(each, 2) for each in (original, model)]
        figures["losses"] = losses
        figures["trained"] = apart(original.state_dict(), te_convert.original_state_dict(model))
        figures["same keys"] = list(original.state_dict()) == list(te_convert.original_state_dict(model))
        figures |= loads(name, model, batch)
        kept = te_convert.original_state_dict(model)
        kept = {key: tensor.clone() for key, tensor in kept.items()}
        back = te_convert.revert(model)
        figures["reverted"] = apart(kept, back.state_dict()) == 0.0 and not parallel_modules(back)
        return figures

    return case


def alone(original: Any, model: Any, records: list[Any], batch: Tensor) -> list[float]:
    """With every fusion off, the members compute their parts themselves: output and gradients."""
    for each in (original, model):
        each.zero_grad()
    for record in records:
        record.enabled = False
    first(original(input_ids=batch)).square().mean().backward()
    y = first(model(input_ids=batch))
    y.square().mean().backward()
    for record in records:
        record.enabled = True
    output = apart({"": first(original(input_ids=batch)).detach()}, {"": y.detach()})
    wanted = gradients_of(original)
    return [output, apart(wanted, named_gradients(model))]


def loads(name: str, model: Any, batch: Tensor) -> Figures:
    """Whole checkpoints in both layouts, and this rank's own part, into a model that is divided."""
    other = make(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.7)
        wanted = first(other(input_ids=batch))
        part = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        te = {key: tensor.clone() for key, tensor in te_convert.te_state_dict(model).items()}
        before = first(model(input_ids=batch))
        te_convert.load_original_state_dict(model, other.state_dict())
        found = first(model(input_ids=batch))
        model.load_state_dict(part)
        again = first(model(input_ids=batch))
        te_convert.load_original_state_dict(model, other.state_dict())
        model.load_state_dict({key: tensor for key, tensor in te.items() if key in part})
        last = first(model(input_ids=batch))
    return {
        "loaded": apart({"": wanted}, {"": found}),
        "part loaded": torch.equal(before, again),
        "whole te loaded": torch.equal(before, last),
    }


def replicated(result: te_convert.Result) -> dict[str, str]:
    """FQN → why it is whole on every rank."""
    return {site.fqn: reason.detail for site in result.report.sites for reason in site.reasons if reason.code == "tp.replicated"}


def stays_whole(build: Callable[[], Any], verify: bool = False) -> Callable[[DeviceMesh, Path], Figures]:
    """Models of which something is not divided: what and why, and that the output is right."""

    def case(mesh: DeviceMesh, folder: Path) -> Figures:
        original = build()
        result = convert(original, mesh, verify=verify)
        batch = ids(3, 11)
        with torch.no_grad():
            one, other = (first(each(input_ids=batch)).float() for each in (original, result.model))
        modes = {fqn: module.__dict__[SITE_ATTRIBUTE].parallel.mode for fqn, module in parallel_modules(result.model)}
        return {
            "replicated": replicated(result),
            "modes": modes,
            "output": apart({"": one}, {"": other}),
            "notes": list(result.report.notes),
            "scenarios": [[s.name, s.passed] for s in result.report.parity.scenarios if "ranks" in s.name],
        }

    return case


def odd_heads() -> Any:
    """Three heads cannot be shared by two ranks; the MLP can."""
    from tests.integration.language_models import build

    return build("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48)


def refusals(mesh: DeviceMesh, folder: Path) -> Figures:
    """What convert() and its neighbours say about what they do not take."""
    rank = dist.get_rank()
    model = make("mlp")
    other = make("mlp")
    with torch.no_grad():
        other.head.weight.add_(rank)
    divided = convert(make("mlp"), mesh)
    optimizer = torch.optim.SGD(divided.model.parameters(), lr=0.1)
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    inputs = {"input_ids": ids() + rank}
    sharded = make("mlp")
    sharded.head.weight = nn.Parameter(distribute_tensor(sharded.head.weight.detach(), mesh))
    calls: dict[str, Callable[[], Any]] = {
        "no mesh": lambda: convert(model, 2),  # type: ignore[arg-type]
        "two dimensions": lambda: convert(model, two),
        "other weights": lambda: convert(other, mesh),
        "other inputs": lambda: te_convert.convert(model, inputs, backend="reference", tp_mesh=mesh),
        "again": lambda: convert(divided.model, mesh),
        "dtensor": lambda: convert(sharded, mesh),
        "save": lambda: te_convert.save(divided, folder / "out"),
        "verify": lambda: te_convert.verify(model, divided.model, {"input_ids": ids()}),
        "revert": lambda: te_convert.revert(divided.model, optimizer),
        "remap": lambda: te_convert.remap_optimizer(optimizer, divided),
    }
    said: Figures = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing"
        except TeConvertError as error:
            said[name] = f"{error}; {error.hint}"
    with torch.no_grad():
        same = torch.equal(copy.deepcopy(divided.model)(ids()), divided.model(ids()))
    return {"said": said, "named dimension": bool(convert(model, two["tp"]).converted), "copy": same}


def caught(mesh: DeviceMesh, folder: Path) -> Figures:
    """A division that is wrong is found out and taken back: here every rank keeps the columns of another one."""
    module: Any = tensor_parallel
    right = module.divide

    def wrong(tensor: Tensor, dim: int, segments: Any, rank: int, size: int) -> Tensor:
        part: Tensor = right(tensor, dim, segments, size - 1 - rank if dim == 1 else rank, size)
        return part

    module.divide = wrong
    try:
        result = convert(make("mlp"), mesh)
        strict = ""
        try:
            convert(make("mlp"), mesh, strict=True)
        except TeConvertError as error:
            strict = str(error)
    finally:
        module.divide = right
    with torch.no_grad():
        output = apart({"": make("mlp")(ids())}, {"": result.model(ids())})
    return {"notes": list(result.report.notes), "modes": len(parallel_modules(result.model)), "output": output, "strict": strict}


def bias_once(mesh: DeviceMesh, folder: Path) -> Figures:
    """The bias of a row is there once, also in a model whose biases are zero when it is converted."""
    model = make("separate")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    converted = convert(copy.deepcopy(model), mesh).model
    with torch.no_grad():
        state = {k: v + 0.5 if k.endswith("bias") else v for k, v in model.state_dict().items()}
        model.load_state_dict(state)
        te_convert.load_original_state_dict(converted, state)
        return {"output": apart({"": model(ids())}, {"": converted(ids())})}


def shared_fc1(mesh: DeviceMesh | None = None) -> Any:
    """Two blocks with one MLP weight between them: nothing of it may be divided."""
    torch.manual_seed(0)
    net = moved(Net(Block(Attention(), Mlp(nn.GELU())), Block(None, Mlp(nn.GELU()))))
    net.blocks[1].mlp.fc2.weight = net.blocks[0].mlp.fc2.weight
    return net


class Scaled(nn.Module):
    """A trained scale inside the region: each rank would see its part of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x)) * self.scale)  # type: ignore[no-any-return]


WHOLE = ("llama-tied", "llama-bf16", "packed-fixed", "fixed", "lone", "gpt2", "qwen3")
DIVIDED = ("llama", "bert", "separate", "packed", "erf", "mlp")
CASES: dict[str, Callable[[DeviceMesh, Path], Figures]] = {
    **{name: divides(name) for name in DIVIDED},
    **{name: stays_whole(partial(make, name), verify=name == "llama-bf16") for name in WHOLE},
    "odd": stays_whole(odd_heads),
    "shared": stays_whole(shared_fc1),
    "scaled": stays_whole(lambda: moved(Net(Block(Scaled(), None)))),
    "refusals": refusals,
    "caught": caught,
    "bias": bias_once,
}


def work(rank: int, folder: Path) -> None:
    """All cases in one process group: starting one costs more than they do."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, case in CASES.items():
        try:
            torch.manual_seed(0)
            found = case(mesh, folder)
        except Exception as error:
            found = {"error": str(error), "trace": traceback.format_exc()}
        (folder / f"{name}.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
