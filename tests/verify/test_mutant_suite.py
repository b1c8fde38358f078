"""A sample of the mutation suite; `make mutants` runs all of it."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.verify.mutant_kinds import KINDS
from tests.verify.mutant_suite import ARCHITECTURES, Subject, changes, false_alarms, module_names, plant, prepare, try_mutant

SAMPLE = [
    ("keys and values swapped", "llama", "LayerNormLinear", "outputs"),
    ("gate and up swapped", "phi3", "LayerNormMLP", "outputs"),
    ("causal from the other corner", "mistral", "DotProductAttention", "decoding"),
    ("window off by one", "mistral", "DotProductAttention", "outputs"),
    ("position bias lost", "t5", "DotProductAttention", "outputs"),
    ("padding mask inverted", "bert", "DotProductAttention", "outputs"),
    ("experts of the first layer permuted", "mixtral", "GroupedLinear", "outputs"),
    ("eps lost", "gpt2", "LayerNormLinear", "outputs"),
    ("dropout of attention in eval", "vit", "DotProductAttention", "outputs"),
    ("dimensions of size one squeezed", "vit", "LayerNorm", "other inputs"),
    ("wrong for a single token", "llama", "Linear", "decoding"),
    ("weight frozen", "bert", "Linear", "gradients"),
    ("tie split", "llama", "Linear", "gradients"),
    ("tie split", "cohere", "LayerNormLinear", "gradients"),
    ("filled constant trained", "cohere", "LayerNorm", "a step"),
    ("stale weight, right gradient", "llama", "LayerNormMLP", "a step"),
    ("stale weight, right gradient", "torch encoder", "TransformerLayer", "a step"),
    ("stale copy of a transposed weight", "gpt2", "LayerNormLinear", "a step"),
    ("member shows an old weight", "bert", "Linear", "a step"),
    ("an earlier result again", "bert", "Linear", "a step"),
    ("weight map with exchanged experts", "mixtral", "GroupedLinear", "state dict"),
    ("residual before the norm", "torch encoder", "TransformerLayer", "outputs"),
]


ROUNDING = ("norm in bfloat16", "rounded inside")
"""What these cost a whole model may be too little to be counted; the site is put back all the same."""

LOW = [
    ("norm in bfloat16", "vit", "LayerNormLinear", "bfloat16"),
    ("norm in bfloat16", "vit", "LayerNorm", "float16"),
    ("rounded inside", "vit", "LayerNormLinear", "bfloat16"),
    ("norm in bfloat16", "gpt2", "LayerNormMLP", "float16"),
    ("eps lost", "gpt2", "LayerNormLinear", "float16"),
    ("keys and values swapped", "vit", "LayerNormLinear", "bfloat16"),
    ("samples mixed", "vit", "Linear", "float16"),
    ("gradient doubled", "vit", "LayerNormLinear", "bfloat16"),
    ("stale weight, right gradient", "vit", "LayerNormLinear", "bfloat16"),
    ("output dtype", "vit", "DotProductAttention", "bfloat16"),
]


@cache
def subject(name: str, dtype: str = "float32") -> Subject:
    return prepare(name, getattr(torch, dtype))


def test_the_catalogue_is_large_and_every_kind_can_be_planted() -> None:
    assert len(KINDS) >= 40
    assert len(ARCHITECTURES) >= 10
    left = set(KINDS)
    for name in ARCHITECTURES:
        applied = subject(name).convert()
        for kind in sorted(left):
            if any(plant(KINDS[kind], applied, module, 0) is not None for module in module_names(applied)):
                left.discard(kind)
                applied = subject(name).convert()
    assert not left


@pytest.mark.parametrize(("kind", "architecture", "module", "change"), SAMPLE)
def test_a_mistake_changes_something_and_is_caught(kind: str, architecture: str, module: str, change: str) -> None:
    outcome = try_mutant(subject(architecture), KINDS[kind], module)
    assert outcome is not None
    assert outcome.change == change
    assert outcome.caught


@pytest.mark.parametrize(("kind", "architecture", "module", "dtype"), LOW)
def test_a_mistake_in_low_precision_is_caught(kind: str, architecture: str, module: str, dtype: str) -> None:
    outcome = try_mutant(subject(architecture, dtype), KINDS[kind], module)
    assert outcome is not None
    assert outcome.dtype == dtype
    assert outcome.caught
    assert outcome.change or kind in ROUNDING


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "float32"),
        ("gpt2", "float32"),
        ("hand-written blocks", "float32"),
        ("vit", "bfloat16"),
        ("gpt2", "float16"),
    ],
)
def test_a_right_conversion_is_believed_by_the_gate_and_by_the_judge(name: str, dtype: str) -> None:
    assert false_alarms(subject(name, dtype)) == []


def test_a_mistake_that_changes_nothing_is_equivalent() -> None:
    right = subject("vit")
    assert changes(right, lambda: right.convert().model) == ""
    outcome = try_mutant(right, KINDS["window off by one"], "DotProductAttention")
    assert outcome is not None
    assert (outcome.change, outcome.caught) == ("", False)
