"""Twins keep Transformer Engine's names: parameters, state-dict keys, shapes, dtypes, arguments and their defaults."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_convert import reference
from tests.reference.twin_samples import RECORDED, build, perturb, randn

MODULES: list[dict[str, Any]] = RECORDED["modules"]
SIGNATURES: dict[str, dict[str, list[list[Any]]]] = RECORDED["signatures"]

WITHOUT_DEVICE = ("DotProductAttention", "RotaryPositionEmbedding")
SHIFTS_OF_KEYS = ("key_bias", "k_norm.bias")
"""A shift of all keys moves all scores of a query alike: softmax does not see it, unless a rotation comes in between."""


def label(entry: dict[str, Any]) -> str:
    """Module and arguments, without the sizes."""
    sizes = ("hidden_size", "ffn_hidden_size", "num_attention_heads", "in_features", "out_features", "normalized_shape")
    return ",".join([entry["module"], *(f"{key}={value}" for key, value in entry["kwargs"].items() if key not in sizes)])


def described(module: nn.Module) -> dict[str, list[Any]]:
    return {key: [str(value.dtype).removeprefix("torch."), list(value.shape)] for key, value in module.state_dict().items()}


@pytest.mark.parametrize("entry", MODULES, ids=label)
def test_state_dict(entry: dict[str, Any]) -> None:
    twin = build(entry["module"], entry["kwargs"])
    assert described(twin) == entry["state"]
    assert [name for name, _ in twin.named_parameters()] == entry["parameters"]
    other = build(entry["module"], entry["kwargs"])
    other.load_state_dict(perturb(twin).state_dict())
    torch.testing.assert_close(other.state_dict(), twin.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("entry", [entry for entry in MODULES if entry["module"] not in WITHOUT_DEVICE], ids=label)
def test_meta_allocates_and_draws_nothing(entry: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    twin = build(entry["module"], entry["kwargs"], device="meta")
    assert all(parameter.is_meta for parameter in twin.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    assert described(twin) == entry["state"]
    output = run(entry, twin.train(False), device="meta")
    assert output.is_meta


@pytest.mark.parametrize("entry", [entry for entry in MODULES if entry["parameters"]], ids=label)
def test_every_parameter_counts(entry: dict[str, Any]) -> None:
    twin = perturb(build(entry["module"], entry["kwargs"])).eval()
    names = [name for name, _ in twin.named_parameters() if not name.endswith(SHIFTS_OF_KEYS)]
    base = run(entry, twin)
    for name in names:
        changed = copy.deepcopy(twin)
        with torch.no_grad():
            changed.get_parameter(name).add_(randn(*changed.get_parameter(name).shape, seed=3).to(torch.float32))
        assert not torch.equal(run(entry, changed), base), name


def run(entry: dict[str, Any], twin: nn.Module, device: str = "cpu") -> Tensor:
    """First output of a twin for random input."""
    kwargs = entry["kwargs"]
    dtype = getattr(torch, kwargs.get("params_dtype", "float32"))

    def tensor(*shape: int, seed: int = 1) -> Tensor:
        return randn(*shape, seed=seed, dtype=dtype).to(device)

    if entry["module"] == "RotaryPositionEmbedding":
        output = twin(5)
    elif entry["module"] == "GroupedLinear":
        output = twin(tensor(8, kwargs["in_features"]), [3, 1, 4])
    elif entry["module"] == "DotProductAttention":
        wide, groups = kwargs["kv_channels"], kwargs.get("num_gqa_groups", 4)
        sizes = (wide, wide) if isinstance(wide, int) else wide
        output = twin(tensor(5, 2, 4, sizes[0]), tensor(5, 2, groups, sizes[0], seed=2), tensor(5, 2, groups, sizes[1], seed=3))
    else:
        size = next(kwargs[key] for key in ("in_features", "normalized_shape", "hidden_size") if key in kwargs)
        crosses = kwargs.get("attention_type") == "cross" or kwargs.get("layer_type") == "decoder"
        output = twin(tensor(5, 2, size), **({"encoder_output": tensor(5, 2, size, seed=2)} if crosses else {}))
    first = output[0] if isinstance(output, tuple) else output
    assert isinstance(first, Tensor)
    assert first.dtype == dtype
    return first


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_spelled_as_in_te(name: str) -> None:
    twin = getattr(reference, name)
    check_arguments(twin, dict_of(SIGNATURES[name]["init"]))
    if isinstance(twin, type):
        check_arguments(vars(twin)["forward"], dict_of(SIGNATURES[name]["forward"]))


def dict_of(parameters: list[list[Any]]) -> dict[str, Any]:
    return {parameter[0]: parameter[1] if len(parameter) > 1 else inspect.Parameter.empty for parameter in parameters}


def check_arguments(function: Callable[..., Any], recorded: dict[str, Any]) -> None:
    """Names are TE's, positional ones come in TE's order, defaults are TE's but for the device."""
    parameters = [value for key, value in inspect.signature(function).parameters.items() if key != "self"]
    assert {parameter.name for parameter in parameters} <= set(recorded)
    positional = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == list(recorded)[: len(positional)]
    for parameter in parameters:
        # te.DotProductAttention's tensors may be missing there, when they come packed.
        if parameter.name != "device" and parameter.default is not inspect.Parameter.empty:
            assert parameter.default == recorded[parameter.name], parameter.name


def test_unknown_arguments_are_errors() -> None:
    with pytest.raises(TypeError):
        build("LayerNormLinear", {"in_features": 8, "out_features": 8, "sequence_parallel": True})
    with pytest.raises(TypeError):
        reference.TransformerLayer(8, 8, 2)(torch.zeros(1, 1, 8), is_first_microbatch=True)


@pytest.mark.parametrize("name", ["LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
def test_dtypes_must_agree_outside_autocast(name: str) -> None:
    twin = build(name, {"num_gemms": 1, "in_features": 8, "out_features": 8} if name == "GroupedLinear" else SIZES[name])
    x = torch.zeros(4, 8, dtype=torch.bfloat16)
    arguments: tuple[Any, ...] = ([4],) if name == "GroupedLinear" else ()
    with pytest.raises(TypeError, match=r"torch\.bfloat16 and .* is torch\.float32"):
        twin(x, *arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert twin(x.float(), *arguments).dtype is torch.bfloat16


SIZES: dict[str, dict[str, int]] = {
    "LayerNormLinear": {"in_features": 8, "out_features": 8},
    "LayerNormMLP": {"hidden_size": 8, "ffn_hidden_size": 8},
}
