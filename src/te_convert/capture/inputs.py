"""Example inputs for a model that came with none: the model's own, else what its signature and first layer take."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from te_convert.capture.fake import is_meta
from te_convert.capture.made_inputs import BATCH, LENGTH, floats, ids
from te_convert.capture.run import runs
from te_convert.capture.scenario import Scenario, normalize_inputs
from te_convert.capture.tensors import model_device
from te_convert.capture.transformers_inputs import transformers_candidates

_IMAGE_SIZES = (32, 64, 224)


def derive_scenario(model: nn.Module) -> Scenario | None:
    """The first candidate on which the model runs, or None; ``scenario.derived`` says where it came from."""
    for source, inputs in _candidates(model):
        try:
            scenario = replace(normalize_inputs(inputs)[0], derived=source)
        except Exception:  # a model's own attribute can be anything
            continue
        scenario = scenario if is_meta(model) else _on_device(scenario, model_device(model))
        if runs(model, scenario) is None:
            return scenario
    return None


def _on_device(scenario: Scenario, device: torch.device) -> Scenario:
    from torch.utils._pytree import tree_map

    args, kwargs = tree_map(
        lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, (scenario.args, scenario.kwargs)
    )
    return replace(scenario, args=args, kwargs=kwargs)


def _candidates(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for attribute in ("example_input_array", "dummy_inputs"):
        value = _attribute(model, attribute)
        if value is not None:
            yield f"the model's {attribute}", value
    config = _attribute(model, "pretrained_cfg") or _attribute(model, "default_cfg")
    size = config.get("input_size") if isinstance(config, dict) else None
    if size:
        yield "the model's default_cfg", floats(model, BATCH, *size)
    if _attribute(model, "main_input_name") is not None:
        yield from transformers_candidates(model)
    for source, tensor in _first_layer_tensors(model):
        yield from _fill_signature(model, source, tensor)


def _attribute(model: nn.Module, name: str) -> Any:
    try:
        return getattr(model, name, None)
    except Exception:  # a property may compute and fail
        return None


def _first_layer_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that the first parameter-owning module can take."""
    first = next((m for m in model.modules() if any(p is not None for p in m._parameters.values())), None)
    layers = [m for m in model.modules() if m is first or isinstance(m, (nn.Embedding, nn.Linear, nn.modules.conv._ConvNd))]
    for module in layers[:3]:
        source = f"the first layers ({type(module).__name__})"
        if isinstance(module, nn.Embedding):
            yield source, ids(module.num_embeddings)
        elif isinstance(module, nn.modules.conv._ConvNd):
            for size in _IMAGE_SIZES:
                yield source, floats(model, BATCH, module.in_channels, *[size] * len(module.kernel_size))
        elif isinstance(module, (nn.LSTM, nn.GRU, nn.RNN)):
            yield source, floats(model, BATCH, LENGTH, module.input_size)
        else:
            weight = next((p for p in module._parameters.values() if p is not None and p.dim() in (1, 2)), None)
            if weight is not None:
                yield source, floats(model, BATCH, LENGTH, weight.shape[-1])
                yield source, floats(model, BATCH, weight.shape[-1])


def _fill_signature(model: nn.Module, source: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """The tensor alone, and once for every required argument of the forward."""
    yield source, (tensor,)
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return
    required = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(required) > 1:
        yield source, tuple(tensor for _ in required)
