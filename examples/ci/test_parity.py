"""The same checks as tests of your own: the fixtures come with te_convert."""

from __future__ import annotations

from typing import Any

import model

import te_convert


def test_the_converted_model_computes_the_same(te_convert_parity: Any) -> None:
    original, inputs = model.build_model(), model.example_inputs()
    converted, _ = te_convert.convert(original, inputs)
    te_convert_parity(original, converted, inputs, golden="golden.json")


def test_the_file_checks_out(te_convert_check: Any) -> None:
    parity = te_convert_check("model.py")
    assert len(parity.sites) == len(parity.executed)  # each TE module was also compared alone
