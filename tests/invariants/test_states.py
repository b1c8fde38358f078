"""Whatever state a model is in: it is converted right or refused with the exact code, and the caller's object stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from tests.invariants import variants
from tests.invariants.variants import X
from tests.rewrite.rewrite_samples import snapshot

DEPRECATED = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch")
"""TorchScript, the old weight_norm and torch's own quantisation say that they will go; models have them all the same."""
UNTOUCHED: dict[str, str] = {}

CASES: dict[str, tuple[Callable[[], Any], dict[str, str]]] = {
    "expanded": (variants.expanded, UNTOUCHED),
    "non_contiguous": (variants.non_contiguous, UNTOUCHED),
    "slices_of_one": (variants.slices_of_one, UNTOUCHED),
    "with_gradients": (variants.with_gradients, UNTOUCHED),
    "frozen": (variants.frozen, UNTOUCHED),
    "all_frozen": (variants.all_frozen, UNTOUCHED),
    "made_in_inference_mode": (variants.made_in_inference_mode, UNTOUCHED),
    "subclassed_parameter": (variants.subclassed_parameter, {"q": "parameter.tensor-subclass"}),
    "packed_parameter": (variants.packed_parameter, {"o": "parameter.tensor-subclass"}),
    "two_names_in_one_module": (variants.two_names_in_one_module, {"q": "module.extra-state"}),
    "two_names_in_two_modules": (variants.two_names_in_two_modules, UNTOUCHED),
    "one_module_twice": (variants.one_module_twice, UNTOUCHED),
    "tied": (variants.tied, UNTOUCHED),
    "parametrized": (variants.parametrized, dict.fromkeys(("q", "up", "o"), "module.parametrized")),
    "skipped_init": (variants.skipped_init, UNTOUCHED),
    "hooked": (variants.hooked, UNTOUCHED),
    "state_dict_hooks": (variants.state_dict_hooks, UNTOUCHED),
    "parameter_hooks": (variants.parameter_hooks, UNTOUCHED),
    "buffers": (variants.buffers, {"o": "module.extra-state", "norm2": "norm.not-recognised"}),
    "registered_nones": (variants.registered_nones, UNTOUCHED),
    "mixed_flags": (variants.mixed_flags, UNTOUCHED),
    "cycles": (variants.cycles, UNTOUCHED),
    "forward_of_an_instance": (variants.forward_of_an_instance, {"q": "module.subclass"}),
    "traced_part": (variants.traced_part, {"q": "module.scripted"}),
    "lazy_part": (variants.lazy_part, {"2": "parameter.uninitialized"}),
    "integer_weights": (variants.integer_weights, {"o": "dtype.unsupported"}),
    "ComputesAttributes": (variants.OTHERS["ComputesAttributes"], UNTOUCHED),
    "LogsAssignments": (variants.OTHERS["LogsAssignments"], UNTOUCHED),
    "CopiesItself": (variants.OTHERS["CopiesItself"], UNTOUCHED),
    "Containers": (variants.OTHERS["Containers"], UNTOUCHED),
    "ForwardList": (variants.OTHERS["ForwardList"], UNTOUCHED),
}


def look(model: nn.Module) -> tuple[Any, ...]:
    """Everything of a model, its memory layouts, and the random state."""
    kinds: list[tuple[nn.Parameter, Any]] = [(p, type(p.data)) for p in model.parameters()]
    plain = [p for p, kind in kinds if kind is torch.Tensor and not isinstance(p, nn.UninitializedParameter)]
    layouts = [(p.stride(), p.data_ptr(), None if p.is_inference() else p._version) for p in plain]
    numbers = [(name, b.clone().tolist()) for name, b in model.named_buffers()]
    odd = len(plain) < len(list(model.parameters())) or any(isinstance(m, torch.jit.ScriptModule) for m in model.modules())
    found = {} if odd else snapshot(model)
    return found, layouts, numbers, torch.get_rng_state().tolist()


def buffers_of(model: nn.Module) -> list[Any]:
    plain = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    return [(list(module._buffers), module._non_persistent_buffers_set) for module in plain]


@DEPRECATED
@pytest.mark.parametrize("name", CASES)
def test_converted_right_or_refused_with_the_code(name: str) -> None:
    make, refused = CASES[name]
    model = make()
    before = look(model)
    result = te_convert.convert(model, (X,))
    assert look(model) == before
    assert result.converted
    assert result.report.parity.passed, str(result.report)
    assert not result.report.parity.reverted
    found = {s.fqn: {r.code for r in s.reasons} for s in result.report.sites if not s.replacement and s.kind != "Attention"}
    found = {fqn: codes - {"fusion.other-reader", "dtype.mixed"} for fqn, codes in found.items()}
    assert {fqn: codes for fqn, codes in found.items() if codes} == {fqn: {code} for fqn, code in refused.items()}
    if name == "lazy_part":
        return  # each side draws the lazy weights for itself
    with torch.no_grad():
        assert torch.allclose(result.model(X), model(X), rtol=1e-5, atol=1e-5)
    kept, state = te_convert.original_state_dict(result.model), model.state_dict()
    assert list(kept) == list(state)
    assert all(torch.equal(kept[key], value) for key, value in state.items() if type(value) is torch.Tensor)
    flags = [(n, p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False)]
    back = te_convert.revert(result.model)
    assert [(n, p.requires_grad) for n, p in back.named_parameters(remove_duplicate=False)] == flags
    assert [m.training for m in back.modules()] == [m.training for m in model.modules()]
    assert buffers_of(back) == buffers_of(model)
    assert type(back) is type(model)


COPIES = {
    "old_weight_norm": (variants.old_weight_norm, "graph leaves"),
    "pruned": (variants.pruned, "graph leaves"),
    "HasSlots": (variants.OTHERS["HasSlots"], "a copy fails where the model itself runs"),
    "IsItsOwnCopy": (variants.OTHERS["IsItsOwnCopy"], "it shares the model itself"),
    "SharesAPart": (variants.OTHERS["SharesAPart"], "it shares down"),
    "CannotBeCopied": (variants.OTHERS["CannotBeCopied"], "no copies"),
    "forward_of_the_root": (variants.forward_of_the_root, "a forward is bound to them"),
}


@DEPRECATED
@pytest.mark.parametrize("name", COPIES)
def test_without_a_true_copy_the_model_comes_back_and_converts_in_place(name: str) -> None:
    make, why = COPIES[name]
    model = make()
    before = look(model)
    result = te_convert.convert(model, (X,))
    assert look(model) == before
    assert result.model is model
    assert not result.converted
    warning = next(line for line in result.report.warnings if line.startswith("model.not-copyable"))
    assert why in warning
    assert warning.endswith("pass inplace=True")
    with torch.no_grad():
        expected = model(X)
    converted = te_convert.convert(model, (X,), inplace=True, verify=name not in ("old_weight_norm", "pruned"))
    assert converted.converted
    with torch.no_grad():
        assert torch.allclose(converted.model(X), expected, rtol=1e-5, atol=1e-5)


@DEPRECATED
def test_a_scripted_model_is_refused_as_a_whole() -> None:
    model = variants.scripted()
    result = te_convert.convert(model, (X,))
    assert result.model is model
    assert [[reason.code for reason in site.reasons] for site in result.report.sites] == [["module.scripted"]] * 2


def test_memory_formats_survive() -> None:
    """Convolutions in channels_last stay so, also where the Linears behind them are converted."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(1), nn.Linear(8 * 16, 32))
    model = model.to(memory_format=torch.channels_last).eval()
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    result = te_convert.convert(model, (images,))
    assert result.report.parity.passed
    converted: Any = result.model
    for side in (model, converted):
        assert side[0].weight.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert torch.equal(converted[:2](images), model[:2](images))
        assert converted[:2](images).is_contiguous(memory_format=torch.channels_last)


def test_gradients_never_reach_the_callers_parameters() -> None:
    """The copy of an instance's forward reads the original's weight, so a backward through the copy reaches the original."""
    model = variants.forward_of_an_instance()
    model.q.weight.grad = torch.full_like(model.q.weight, 3.0)
    assert te_convert.convert(model, (X,)).report.parity.passed
    assert model.q.bias.grad is None
    assert torch.equal(model.q.weight.grad, torch.full_like(model.q.weight, 3.0))


@DEPRECATED
def test_a_quantised_model_keeps_its_quantised_layers() -> None:
    from torch.ao.nn.quantized.dynamic import Linear

    model = variants.block()
    model.o = Linear(variants.WIDTH, variants.WIDTH)
    result = te_convert.convert(model, (X,))
    assert result.report.parity.passed
    assert type(result.model.o) is Linear
    (left,) = (site for site in result.report.sites if site.fqn == "o")
    assert (left.outcome, left.kind, [reason.code for reason in left.reasons]) == (
        "REFUSED",
        "Linear",
        ["parameter.tensor-subclass"],
    )
    with torch.no_grad():
        assert torch.allclose(result.model(X), model(X), rtol=1e-5, atol=1e-5)


@DEPRECATED
def test_each_quantised_linear_of_a_model_is_listed() -> None:
    names = [name for name, module in variants.block().named_modules() if isinstance(module, nn.Linear)]
    model = torch.ao.quantization.quantize_dynamic(variants.block(), {nn.Linear})
    sites = te_convert.convert(model, (X,)).report.sites
    assert [site.fqn for site in sites if site.kind == "LayerNorm" and site.outcome == "CONVERTED"] == ["norm", "norm2"]
    assert [site.fqn for site in sites if site.kind == "Linear"] == names
    assert {str(site.outcome) for site in sites if site.kind == "Linear"} == {"REFUSED"}


@DEPRECATED
def test_no_gradient_passes_a_quantised_product() -> None:
    """And that is no failure of the norm before it, whose gradient nobody has."""
    model = nn.Sequential(nn.LayerNorm(variants.WIDTH), nn.Linear(variants.WIDTH, 8))
    result = te_convert.convert(torch.ao.quantization.quantize_dynamic(model, {nn.Linear}), (X,))
    assert result.report.parity.passed
    assert [str(site.outcome) for site in result.report.sites] == ["CONVERTED", "REFUSED"]
    assert "gradients were not compared: none reaches a parameter or an input of the original" in result.report.notes
    assert "gradients" in result.report.not_verified
