"""The original model of a converted directory: built anew, with the stored weights, untouched by any conversion."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import te_convert
from te_convert.emit.original import rebuild_original
from te_convert.errors import LoadError
from te_convert.rewrite.site import is_converted
from tests.emit.emit_samples import PLAIN, write_source


def written(tmp_path: Path, text: str = PLAIN, seed: int = 1) -> tuple[nn.Module, Path]:
    """A model with weights that its source does not make, and the directory of its conversion."""
    opened = te_convert.open_model(str(write_source(tmp_path, text)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in opened.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    original = copy.deepcopy(opened.model)
    result = te_convert.convert(opened.model, opened.example_inputs)
    assert result.converted
    return original, te_convert.save(result, tmp_path / "out", source=opened.source)


def test_it_has_the_stored_values_under_the_original_names(tmp_path: Path) -> None:
    original, directory = written(tmp_path)
    rebuilt = rebuild_original(directory)
    assert not any(map(is_converted, rebuilt.modules()))
    expected, found = original.state_dict(), rebuilt.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    buffers = dict(original.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in rebuilt.named_buffers())
    assert rebuilt.get_parameter("head.weight") is rebuilt.get_parameter("embed.weight")


def test_frozen_parameters_and_dtypes_stay(tmp_path: Path) -> None:
    text = PLAIN.replace("return Net()", "net = Net().bfloat16()\n    net.fc.bias.requires_grad_(False)\n    return net")
    original, directory = written(tmp_path, text)
    rebuilt = rebuild_original(directory)
    before = {name: (p.requires_grad, p.dtype) for name, p in original.named_parameters()}
    assert {name: (p.requires_grad, p.dtype) for name, p in rebuilt.named_parameters()} == before


def test_a_source_that_makes_other_tensors_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PLAIN.replace("import torch\n", "import os\nimport torch\n", 1).replace(
        "self.fc = ", 'if "NET_MORE" in os.environ:\n            self.more = nn.Linear(8, 8)\n        self.fc = '
    )
    _, directory = written(tmp_path, text)
    rebuild_original(directory)
    monkeypatch.setenv("NET_MORE", "1")
    with pytest.raises(LoadError, match=r"more\.weight"):
        rebuild_original(directory)


def test_the_random_state_is_as_it_was(tmp_path: Path) -> None:
    _, directory = written(tmp_path)
    before = torch.get_rng_state()
    rebuild_original(directory)
    assert torch.equal(torch.get_rng_state(), before)
