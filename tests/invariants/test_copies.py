"""Copies of a converted model: deepcopy, pickle, torch.save, and the pickle that a spawned process is given."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

import te_convert
from tests.invariants import variants
from tests.invariants.variants import X, block


def converted(model: Any) -> Any:
    result = te_convert.convert(model, (X,))
    assert result.report.parity.passed
    return result.model


def through_torch_save(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, through_torch_save])
@pytest.mark.parametrize(
    "name", ["frozen", "tied", "one_module_twice", "buffers", "mixed_flags", "cycles", "two_names_in_two_modules"]
)
def test_a_copy_computes_the_same_and_has_the_same_state(name: str, copied: Any) -> None:
    model = converted(getattr(variants, name)())
    twin = copied(model)
    with torch.no_grad():
        assert torch.equal(twin(X), model(X))
    for kept, given in ((te_convert.original_state_dict(each), each.state_dict()) for each in (model, twin)):
        assert len(kept) >= len(given)
    kept, own = te_convert.original_state_dict(twin), te_convert.original_state_dict(model)
    assert list(kept) == list(own)
    assert all(torch.equal(kept[key], value) for key, value in own.items())
    assert [(n, p.requires_grad) for n, p in twin.named_parameters()] == [(n, p.requires_grad) for n, p in model.named_parameters()]
    assert [m.training for m in twin.modules()] == [m.training for m in model.modules()]
    if copied is copy.copy:
        return  # shares everything, as a shallow copy of the original does
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(torch.equal(te_convert.original_state_dict(model)[key], value) for key, value in own.items())
    assert any(bool(value.any()) for value in own.values())
    back = te_convert.revert(twin)
    assert type(back) is type(block())


def _run(model: Any, x: torch.Tensor, queue: Any) -> None:
    with torch.no_grad():
        queue.put(model(x).tolist())


@pytest.mark.slow
def test_a_spawned_process_gets_a_converted_model() -> None:
    import torch.multiprocessing as mp

    model = converted(variants.all_frozen())
    context = mp.get_context("spawn")
    queue: Any = context.Queue()
    process = context.Process(target=_run, args=(model, X, queue))
    process.start()
    found = queue.get(timeout=120)
    process.join()
    assert process.exitcode == 0
    with torch.no_grad():
        assert torch.allclose(torch.tensor(found), model(X), atol=1e-6)
