"""Real models in an odd state: after a conversion the caller's is bit for bit the same, and the result has kept what it owes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from tests.invariants.test_states import look
from tests.property.checks import aliases, assert_same_state, clone, tied_keys, trainable
from tests.verify.model_zoo import NAMES, build, call, perturb

SAMPLE = ("llama", "gpt2", "bert", "t5", "mixtral", "vit", "swin_tiny_patch4_window7_224", "pre_norm_encoder")


class Counter:
    """A hook that counts; a copy of a model shares it, and it can be pickled."""

    calls = 0

    def __call__(self, *_: object) -> None:
        Counter.calls += 1


def odd(name: str) -> tuple[Any, Any]:
    """Moved norms and biases, gradients, frozen parameters, hooks, buffers, and modules in different modes."""
    model, inputs = build(name)
    perturb(model)
    call(model, inputs).float().square().sum().backward()
    for index, parameter in enumerate(model.parameters()):
        if index % 3 == 0:
            parameter.requires_grad_(False)
            parameter.grad = None
    holders = [module for module in model.modules() if module._modules]
    holders[len(holders) // 2].register_forward_hook(Counter())
    holders[-1].register_forward_pre_hook(Counter())
    holders[0].register_buffer("kept", torch.arange(3.0))
    holders[-1].register_buffer("passing", torch.arange(3.0), persistent=False)
    for index, module in enumerate(model.modules()):
        if not list(module.children()) and not list(module.parameters()):
            module.training = index % 2 == 0 and not isinstance(module, nn.Dropout)
    return model, inputs


def hooks_run(model: nn.Module, inputs: Any) -> int:
    Counter.calls = 0
    with torch.no_grad():
        call(model, inputs)
    return Counter.calls


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SAMPLE else (pytest.mark.slow,)) for name in NAMES])
def test_the_callers_model_and_what_the_result_keeps(name: str) -> None:
    model, inputs = odd(name)
    ran = hooks_run(model, inputs)
    before, state = look(model), clone(model.state_dict())
    result = te_convert.convert(model, inputs)
    assert look(model) == before
    assert result.report.parity.passed, str(result.report)
    assert not result.report.parity.reverted
    converted = result.model
    assert type(converted) is type(model) or result.report.sites[0].fqn == ""
    kept = te_convert.original_state_dict(converted)
    assert_same_state(kept, state)
    assert tied_keys(kept) == tied_keys(model.state_dict())
    assert trainable(converted) == trainable(model)
    assert_same_state(dict(converted.named_buffers()), dict(model.named_buffers()))
    assert hooks_run(converted, inputs) == ran
    with torch.no_grad():
        expected, found = call(model, inputs), call(converted, inputs)
    assert (found.dtype, found.device, type(found)) == (expected.dtype, expected.device, type(expected))
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    modules = dict(converted.named_modules(remove_duplicate=False))
    flags = {n: m.training for n, m in model.named_modules(remove_duplicate=False) if n in modules}
    assert {n: modules[n].training for n in flags} == flags
    check_copies(converted, inputs, found)
    back = te_convert.revert(converted)
    assert_same_state(back.state_dict(), state)
    assert aliases(back) == aliases(model)
    assert {n: type(m) for n, m in back.named_modules()} == {n: type(m) for n, m in model.named_modules()}
    assert [m.training for m in back.modules()] == [m.training for m in model.modules()]


def check_copies(converted: nn.Module, inputs: Any, expected: torch.Tensor) -> None:
    copies = [copy.deepcopy(converted)]
    if not any(nn.utils.parametrize.is_parametrized(module) for module in converted.modules()):  # torch refuses to pickle those
        copies.append(pickle.loads(pickle.dumps(converted)))
    for copied in copies:
        with torch.no_grad():
            assert torch.equal(call(copied, inputs), expected)
        assert not {id(p) for p in copied.parameters()} & {id(p) for p in converted.parameters()}


@pytest.mark.parametrize("name", [*SAMPLE, "post_norm_encoder", "vit_tiny_patch16_224"])
def test_buffers_of_any_module_are_kept(name: str) -> None:
    """What becomes one TE module has no place for them, so it is not made into one."""
    model, inputs = build(name)
    perturb(model)
    for index, module in enumerate(model.modules()):
        if module._modules:
            module.register_buffer("own", torch.tensor([float(index)]), persistent=index % 2 == 0)
    result = te_convert.convert(model, inputs)
    assert result.report.parity.passed
    assert_same_state(dict(result.model.named_buffers()), dict(model.named_buffers()))
    assert_same_state(te_convert.original_state_dict(result.model), model.state_dict())
    result.model.double()
    assert all(buffer.dtype == torch.float64 for name, buffer in result.model.named_buffers() if name.endswith("own"))
