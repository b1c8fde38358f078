"""Nothing is put back and nothing is noted where nothing is wrong."""

from __future__ import annotations

import pytest
import torch

import te_convert
from tests.rewrite.rewrite_samples import FUSE
from tests.verify.model_zoo import NAMES, build

LOW = [
    ("bert", torch.bfloat16),
    ("llama", torch.bfloat16),
    ("gpt2", torch.bfloat16),
    ("t5", torch.bfloat16),
    ("vit", torch.bfloat16),
    ("mamba", torch.bfloat16),
    ("gemma", torch.float16),
    ("whisper", torch.float16),
    ("post_norm_encoder", torch.float16),
]


@FUSE
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in NAMES), *LOW],
    ids=lambda value: value if isinstance(value, str) else str(value).removeprefix("torch."),
)
def test_a_right_conversion_passes_as_a_whole(name: str, dtype: torch.dtype, fuse: bool) -> None:
    model, inputs = build(name, dtype)
    result = te_convert.convert(model, inputs, backend="reference", fuse=fuse)
    parity = result.report.parity
    assert result.converted
    assert parity.passed, result.report
    assert not parity.reverted
    assert not [note for note in parity.notes if not (fuse and "padded positions" in note)]
    assert all(count > 0 for count in parity.executed.values())
    assert {scenario.perturbed for scenario in parity.scenarios} == {True, False}
