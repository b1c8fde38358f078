"""What a conversion owes a model, checked without the package's own verification."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import te_convert
from te_convert.api import open_model
from te_convert.rewrite.state import converted_modules
from tests.property.composer import Composed, ModelForm, build, inputs

REL_FLOAT32 = 2e-5
"""As the package's own bound on outputs; an error of the mapping is far above."""
REL_GRADIENT = 1e-4
RATIO_LOW = 8.0
"""bfloat16: error against float32 over the original's own.  Single runs of equally good models scatter between 0.6 and 8."""
STEP = 1e4
"""A step of this length leaves (almost) nothing but the gradient in a parameter."""


def check_conversion(form: ModelForm, directory: Path | None = None) -> te_convert.Result:
    """Convert the model of a form and check everything; with a directory, also that it can be saved and loaded."""
    original, calls = hooked(form)
    args = inputs(form)
    state, random = clone(original.state_dict()), torch.random.get_rng_state()
    result = te_convert.convert(original, args)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert_same_state(original.state_dict(), state)
    if not result.converted:
        assert result.model is original
        return result
    parity = result.report.parity
    assert parity.passed, str(result.report)
    assert not parity.reverted, str(result.report)
    model = result.model
    assert isinstance(model, Composed)
    check_state(original, model)
    check_hook(original, model, form, calls)
    check_outputs(original, model, form)
    check_second_conversion(result, args)
    if directory is not None:
        check_directory(result, form, directory)
    check_training(original, model, form)
    check_revert(model, form)
    return result


def hooked(form: ModelForm) -> tuple[Composed, list[int]]:
    """The model, and the list that its hook (which a copy shares) adds to."""
    model, calls = build(form), [0]
    if form.hooked >= 0:
        modules = list(model.modules())
        modules[form.hooked % len(modules)].register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    return model, calls


def clone(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() for key, value in state.items()}


def assert_same_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(state) == list(expected)
    for key, value in expected.items():
        assert state[key].dtype == value.dtype, key
        assert torch.equal(state[key], value), key


def tied_keys(state: dict[str, Any]) -> set[frozenset[str]]:
    """Which entries lie at one address with one shape."""
    places: dict[Any, list[str]] = {}
    for key, value in state.items():
        places.setdefault((value.data_ptr(), value.shape), []).append(key)
    return {frozenset(keys) for keys in places.values() if len(keys) > 1}


def check_state(original: nn.Module, model: nn.Module) -> None:
    """Values, ties, trainable elements, buffers, dtypes, names and flags of modules."""
    kept = te_convert.original_state_dict(model)
    assert_same_state(kept, original.state_dict())
    assert tied_keys(kept) == tied_keys(original.state_dict())
    assert trainable(model) == trainable(original)
    assert {p.dtype for p in model.parameters()} == {p.dtype for p in original.parameters()}
    assert_same_state(dict(model.named_buffers()), dict(original.named_buffers()))
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in original.named_modules(remove_duplicate=False):
        if name in modules:  # what became one TE module keeps no parts
            assert modules[name].training == module.training, name


def trainable(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def check_hook(original: nn.Module, model: nn.Module, form: ModelForm, calls: list[int]) -> None:
    args, kwargs = inputs(form)
    counts = []
    for side in (original, model):
        calls[0] = 0
        side(*args, **kwargs)
        counts.append(calls[0])
    assert counts[0] == counts[1]


def results(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return list(output.values()) if isinstance(output, dict) else list(output)


def error(exact: Tensor, other: Tensor) -> float:
    """Largest difference over the largest value."""
    a, b = exact.detach().double(), other.detach().double()
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-30))


def rms(exact: Tensor, other: Tensor) -> float:
    a, b = exact.detach().double(), other.detach().double()
    return float((a - b).square().mean().sqrt() / a.square().mean().sqrt().clamp(min=1e-30))


def check_outputs(original: nn.Module, model: nn.Module, form: ModelForm) -> None:
    """On other inputs, of other sizes."""
    for batch, length, seed in ((3, 9, 7), (1, 1, 8)):
        args, kwargs = inputs(form, batch, length, seed)
        if length == 1:
            kwargs = {name: torch.ones_like(mask) for name, mask in kwargs.items()}
        with torch.no_grad():
            expected, found = results(original(*args, **kwargs)), results(model(*args, **kwargs))
            exact = results(build_float32(form)(*floats(args), **kwargs)) if form.dtype != "float32" else expected
        assert len(expected) == len(found)
        for a, b, reference in zip(expected, found, exact, strict=True):
            assert type(b) is Tensor
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            if form.dtype == "float32":
                assert error(a, b) <= REL_FLOAT32
            else:
                assert rms(reference, b) <= RATIO_LOW * max(rms(reference, a), torch.finfo(a.dtype).eps / 2 / math.sqrt(3))


def build_float32(form: ModelForm) -> nn.Module:
    """The same values, computed in float32."""
    return build(form).float()


def floats(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.float() if t.is_floating_point() else t for t in args)


def check_second_conversion(result: te_convert.Result, args: Any) -> None:
    """It changes nothing, and says so."""
    model = result.model
    before, names = clone(model.state_dict()), [name for name, _ in converted_modules(model)]
    types = {name: type(module) for name, module in model.named_modules()}
    again = te_convert.convert(model, args)
    assert_same_state(again.model.state_dict(), before)
    assert [name for name, _ in converted_modules(again.model)] == names
    assert {name: type(module) for name, module in again.model.named_modules()} == types
    assert again.report.parity.passed
    outcomes = {site.fqn: (site.outcome, site.fused_into) for site in result.report.sites}
    assert {site.fqn: (site.outcome, site.fused_into) for site in again.report.sites} == outcomes
    (x, *_), kwargs = args
    with torch.no_grad():
        for a, b in zip(results(model(x, **kwargs)), results(again.model(x, **kwargs)), strict=True):
            assert torch.equal(a, b)


def check_directory(result: te_convert.Result, form: ModelForm, directory: Path) -> None:
    """Saved, loaded: the same state, flags and numbers."""
    source = directory / "composed_source.py"
    names = "AttentionForm, BlockForm, MLPForm, ModelForm, NormForm, build"
    source.write_text(
        f"from tests.property.composer import {names}\n\n\ndef build_model():\n    return build({form!r})\n", encoding="utf-8"
    )
    out = te_convert.save(result, directory / "out", source=open_model(str(source)).source, force=True)
    loaded = te_convert.load(out)
    assert_same_state(loaded.state_dict(), result.model.state_dict())
    flags = [(name, p.requires_grad) for name, p in result.model.named_parameters(remove_duplicate=False)]
    assert [(name, p.requires_grad) for name, p in loaded.named_parameters(remove_duplicate=False)] == flags
    assert tied_keys(loaded.state_dict()) == tied_keys(result.model.state_dict())
    args, kwargs = inputs(form, 2, 5, 9)
    with torch.no_grad():
        for a, b in zip(results(result.model(*args, **kwargs)), results(loaded(*args, **kwargs)), strict=True):
            assert torch.equal(a, b)


def check_training(original: nn.Module, model: nn.Module, form: ModelForm) -> None:
    """One step of the same loss, in train mode under one seed: the change of every original parameter is its gradient.

    Also the random stream: afterwards both stand at the same place.  The models are changed by it.
    """
    if not trainable(original):
        return
    args, kwargs = inputs(form, 2, 8, 11)
    states, streams, given, losses = [], [], [], []
    for side in (original, model):
        torch.manual_seed(17)
        x = args[0].clone().requires_grad_(args[0].is_floating_point())
        with training(side):
            losses.append(train_step(side, x, kwargs))
        states.append(te_convert.original_state_dict(side))
        streams.append(torch.random.get_rng_state())
        given.append(x.grad)
    assert torch.equal(*streams)
    if form.dtype != "float32":
        return  # one run of two correct bfloat16 gradients says little; the gate computes them in float32
    before = build(form).state_dict()
    gradients = [{key: (before[key] - state[key]) / STEP for key in before} for state in states]
    largest = max(float(g.norm()) for g in gradients[0].values())
    for key, expected in gradients[0].items():
        distance = float((expected - gradients[1][key]).norm())
        assert distance <= REL_GRADIENT * max(float(expected.norm()), 1e-3 * largest), key
    assert (given[0] is None) == (given[1] is None)
    if given[0] is not None and given[1] is not None:
        assert error(given[0], given[1]) <= REL_GRADIENT
    assert math.isclose(*losses, rel_tol=1e-4, abs_tol=1e-6)


class training:  # noqa: N801
    """Train mode for a while; every module gets its own flag back."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.flags = model, {module: module.training for module in model.modules()}

    def __enter__(self) -> None:
        self.model.train()

    def __exit__(self, *_: object) -> None:
        for module, flag in self.flags.items():
            module.training = flag


def train_step(model: nn.Module, x: Tensor, kwargs: dict[str, Tensor]) -> float:
    random = torch.Generator().manual_seed(3)
    loss = torch.zeros(())
    for tensor in results(model(x, **kwargs)):
        loss = loss + (tensor.float() * torch.randn(tensor.shape, generator=random)).mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=STEP)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def check_revert(model: Composed, form: ModelForm) -> None:
    """Classes, keys, aliases and flags of the original; with the original's values, its outputs bit for bit."""
    original = build(form)
    te_convert.load_original_state_dict(model, original.state_dict())
    back = te_convert.revert(model)
    assert back is model
    assert_same_state(back.state_dict(), original.state_dict())
    assert {name: type(m) for name, m in back.named_modules()} == {name: type(m) for name, m in original.named_modules()}
    assert aliases(back) == aliases(original)
    flags = [(name, p.requires_grad) for name, p in original.named_parameters(remove_duplicate=False)]
    assert [(name, p.requires_grad) for name, p in back.named_parameters(remove_duplicate=False)] == flags
    assert [m.training for m in back.modules()] == [m.training for m in original.modules()]
    args, kwargs = inputs(form, 2, 7, 13)
    with torch.no_grad():
        for a, b in zip(results(original(*args, **kwargs)), results(back(*args, **kwargs)), strict=True):
            assert torch.equal(a, b)


def aliases(model: nn.Module) -> list[list[str]]:
    """Names that share a Parameter or a module."""
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)
    return sorted(names for names in places.values() if len(names) > 1)
