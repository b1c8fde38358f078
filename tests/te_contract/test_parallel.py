"""The real modules take the tensor-parallel arguments, and have the parts that the twins have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from te_convert.replacements.build import module_class, new_module
from te_convert.replacements.parallel import Parallel
from tests.replacements.test_parallel import every_case
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu

pytestmark = needs_te


@pytest.fixture(autouse=True)
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # TE warns without it
    with te_on_cpu() as package:
        yield package


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """A group of one rank."""
    store: Any = vars(dist)["FileStore"](str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@every_case
def test_the_real_module_has_one_ranks_part(spec: Any, mode: str, arguments: dict[str, Any], shapes: Any) -> None:
    del shapes
    parallel = Parallel(mode, None, 2, 0)
    twin, real = (new_module(module_class(spec, name), spec, name, parallel) for name in ("reference", "te"))
    assert real.tp_size == 2
    assert all(getattr(real, name) == value for name, value in arguments.items())
    expected = {name: tuple(parameter.shape) for name, parameter in twin.named_parameters()}
    assert {name: tuple(parameter.shape) for name, parameter in real.named_parameters()} == expected


@every_case
def test_the_group_is_taken(spec: Any, mode: str, arguments: Any, shapes: Any, group: Any) -> None:
    del arguments, shapes
    real = new_module(module_class(spec, "te"), spec, "te", Parallel(mode, group, 1, 0))
    assert real.tp_group is group
    assert real.tp_size == 1
    assert torch.distributed.get_world_size(real.tp_group) == 1
