"""Inputs are derived for models that came with none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_convert.capture.inputs import derive_scenario
from tests.capture.architectures import ARCHITECTURES, SMALL, hugging_face, timm, whisper


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Any:
        return self.left(a) + self.right(b) * scale


class WithExample(nn.Module):
    def __init__(self, example: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 2)
        self.example_input_array = example

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        if x.shape != (7, 5):
            raise ValueError("only the example's shape will do")
        return self.fc(x)


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    @property
    def dummy_inputs(self) -> Any:
        raise RuntimeError("no network")

    def forward(self, x: Tensor) -> Any:
        return self.fc(x)


class Wants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, graph: dict[str, Tensor]) -> Any:
        return self.fc(graph["nodes"])


def lstm_first() -> nn.Module:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.fc = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            return self.fc(self.lstm(x)[0])

    return Tagger()


def vit() -> nn.Module:
    sizes = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    return hugging_face("ViTConfig", "ViTModel", **sizes, image_size=32, patch_size=16)


FIRST = "the first layers "
CASES: dict[str, tuple[Callable[[], nn.Module], str, dict[Any, tuple[int, ...]]]] = {
    "ids": (lambda: nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 4)), FIRST + "(Embedding)", {0: (2, 8)}),
    "floats": (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU()), FIRST + "(Linear)", {0: (2, 8, 6)}),
    "flat floats": (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), FIRST + "(Linear)", {0: (2, 6)}),
    "bfloat16": (lambda: nn.Linear(6, 4, dtype=torch.bfloat16), FIRST + "(Linear)", {0: (2, 8, 6)}),
    "image": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), FIRST + "(Conv2d)", {0: (2, 3, 32, 32)}),
    "sound": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3)), FIRST + "(Conv1d)", {0: (2, 2, 32)}),
    "large image": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 62 * 62, 2)),
        FIRST + "(Conv2d)",
        {0: (2, 3, 64, 64)},
    ),
    "two arguments": (Two, FIRST + "(Linear)", {0: (2, 8, 6), 1: (2, 8, 6)}),
    "lstm first": (lstm_first, FIRST + "(LSTM)", {0: (2, 8, 6)}),
    "dummy inputs": (ARCHITECTURES["bert"][0], "the model's dummy_inputs", {"input_ids": (3, 5)}),
    "transformers vision": (vit, "the Transformers config", {"pixel_values": (2, 3, 32, 32)}),
    "transformers audio": (whisper, "the Transformers config", {"input_features": (2, 8, 16), "decoder_input_ids": (2, 8)}),
    "timm": (lambda: timm("convnext_atto", depths=(1, 1, 1, 1)), "the model's default_cfg", {0: (2, 3, 224, 224)}),
    "example": (lambda: WithExample(torch.ones(7, 5)), "the model's example_input_array", {0: (7, 5)}),
    "example tuple": (
        lambda: WithExample((torch.ones(7, 5), torch.ones(1))),
        "the model's example_input_array",
        {0: (7, 5), 1: (1,)},
    ),
    "example dict": (lambda: WithExample({"x": torch.ones(7, 5)}), "the model's example_input_array", {"x": (7, 5)}),
    "bad example": (lambda: nn.Sequential(nn.Linear(6, 4)), FIRST + "(Linear)", {0: (2, 8, 6)}),
    "property that raises": (Raising, FIRST + "(Linear)", {0: (2, 8, 6)}),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_derived(case: str) -> None:
    make, source, shapes = CASES[case]
    model = make()
    if case == "bad example":
        model.example_input_array = object()  # type: ignore[assignment]
    state = torch.get_rng_state()
    scenario = derive_scenario(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert scenario is not None
    assert scenario.derived == source
    found: dict[Any, Any] = {**dict(enumerate(scenario.args)), **scenario.kwargs}
    assert {name: tuple(value.shape) for name, value in found.items() if isinstance(value, Tensor)} == shapes
    with torch.no_grad():
        assert scenario.call(model) is not None
    if case == "bfloat16":
        assert scenario.args[0].dtype == torch.bfloat16


@pytest.mark.parametrize("make", [Wants, nn.Identity, lambda: nn.ParameterList([torch.ones(3)])])
def test_nothing_can_be_derived(make: Callable[[], nn.Module]) -> None:
    assert derive_scenario(make()) is None


def test_the_same_inputs_each_time() -> None:
    first, second = (derive_scenario(nn.Linear(6, 4)) for _ in range(2))
    assert first is not None
    assert second is not None
    assert torch.equal(first.args[0], second.args[0])


def test_transformers_is_not_needed() -> None:
    assert importlib.util.find_spec("te_convert") is not None
    scenario = derive_scenario(nn.Sequential(nn.Embedding(3, 4)))
    assert scenario is not None
    assert int(scenario.args[0].max()) < 3
