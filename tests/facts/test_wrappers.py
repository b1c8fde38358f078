"""Wrappers and shards that have to come after the conversion are told with the way out; TorchScript inside a model is not one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module

import te_convert
from te_convert.errors import InputError
from te_convert.facts.wrappers import find_wrapper

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


class OptimizedModule(nn.Module):
    """Somebody else's class of the same name."""


@pytest.mark.parametrize("model", [net(), nn.Sequential(OptimizedModule(), net()), nn.LazyLinear(4)])
def test_plain_models_are_not_wrapped(model: nn.Module) -> None:
    assert find_wrapper(model) is None


def test_compiled_by_method_is_converted() -> None:
    model = net()
    model.compile(backend="eager")
    assert te_convert.convert(model, (X,)).report.parity.passed


@pytest.mark.parametrize("call", [te_convert.convert, te_convert.analyze])
def test_a_compiled_part_is_named(call: Any) -> None:
    compiled: Any = torch.compile(net(), backend="eager")
    model = nn.Sequential(net(), compiled)
    with pytest.raises(InputError, match=r"part 1 is wrapped by torch\.compile") as caught:
        call(model, (X,))
    assert "model.1._orig_mod" in caught.value.hint


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_data_parallel_wrappers_and_shards(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        cases: dict[str, Any] = {
            "DistributedDataParallel": nn.parallel.DistributedDataParallel(net()),
            "DataParallel": nn.DataParallel(net()),
            "FullyShardedDataParallel": FullyShardedDataParallel(net(), device_id=torch.device("cpu")),
            r"0\.weight is a DTensor": fully_shard(net(), mesh=mesh),
            r"0\.0\.weight is a DTensor": nn.Sequential(distribute_module(net(), mesh)),
        }
        for text, model in cases.items():
            for inplace in (False, True):
                with pytest.raises(InputError, match=text) as caught:
                    te_convert.convert(model, (X,), inplace=inplace)
                assert "convert" in caught.value.hint
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_scripted_parts_stay_and_the_rest_is_converted() -> None:
    """The activation inside, which has no parameters, was once probed and made the recording fail."""
    model = nn.Sequential(torch.jit.script(net()), nn.Linear(32, 8))
    result = te_convert.convert(model, (X,))
    outcomes = {site.fqn: [reason.code for reason in site.reasons] for site in result.report.sites if site.reasons}
    assert result.report.parity.passed
    assert set(outcomes) == {"0.0", "0.1", "0.3"}
    assert all(codes == ["module.scripted"] for codes in outcomes.values())


def test_lazy_modules_are_refused() -> None:
    result = te_convert.convert(nn.Sequential(nn.LayerNorm(32), nn.LazyLinear(8)), (X,))
    assert {s.fqn: [r.code for r in s.reasons] for s in result.report.sites}["1"] == ["parameter.uninitialized"]
