"""Converted attention taken back, copied, pickled, saved and completed."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import te_convert
from tests.rewrite import attention_models as zoo
from tests.rewrite.test_attention import attention_sites, configs, convert, records


def test_the_callers_model_keeps_its_implementation() -> None:
    model = zoo.llama()
    before = model(**zoo.inputs_of("llama")).logits
    converted, _ = convert(model, zoo.inputs_of("llama"))
    assert set(configs(model)) == {"sdpa"}
    assert set(configs(converted)) == {"te_convert"}
    assert torch.equal(model(**zoo.inputs_of("llama")).logits, before)
    assert not records(model)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_revert_restores_the_implementation_bit_for_bit(implementation: str) -> None:
    model, inputs = zoo.llama(implementation), zoo.inputs_of("llama")
    before, names = model(**inputs).logits, [name for name, _ in model.named_modules()]
    keys = list(model.state_dict())
    converted, _ = convert(model, inputs, inplace=True)
    assert converted is model
    assert set(configs(model)) == {"te_convert" if implementation == "sdpa" else "te_convert_eager"}
    te_convert.revert(model)
    assert set(configs(model)) == {implementation}
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.state_dict()) == keys
    assert torch.equal(model(**inputs).logits, before)


def test_the_implementation_comes_back_with_the_last_site() -> None:
    from te_convert.rewrite.apply import restore_site

    converted, _ = convert(zoo.llama(), zoo.inputs_of("llama"))
    first, second = records(converted)
    restore_site(converted, first.module)
    assert set(configs(converted)) == {"te_convert"}
    restore_site(converted, second.module)
    assert set(configs(converted)) == {"sdpa"}


def test_without_fusions_attention_is_left_alone() -> None:
    converted, report = convert(zoo.llama(), zoo.inputs_of("llama"), fuse=False)
    assert set(configs(converted)) == {"sdpa"}
    assert not records(converted)
    assert not attention_sites(report)


def test_excluded_attention_runs_the_original_beside_converted_ones() -> None:
    model, inputs = zoo.llama(), zoo.inputs_of("llama")
    converted, report = convert(model, inputs, exclude="model.layers.0.self_attn")
    assert [str(site.outcome) for site in attention_sites(report)] == ["EXCLUDED", "CONVERTED"]
    with torch.no_grad():
        torch.testing.assert_close(converted(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)
    assert len(records(converted)) == 1


def test_converting_twice_is_a_no_op_and_completes() -> None:
    inputs = zoo.inputs_of("llama")
    once, _ = convert(zoo.llama(), inputs, exclude="model.layers.0")
    twice, report = convert(once, inputs)
    assert [str(site.outcome) for site in attention_sites(report)] == ["CONVERTED", "CONVERTED"]
    assert len(records(twice)) == 2
    thrice, again = convert(twice, inputs)
    assert len(records(thrice)) == 2
    assert again.parity.passed
    assert set(configs(te_convert.revert(thrice))) == {"sdpa"}


def test_deepcopy_is_independent() -> None:
    inputs = zoo.inputs_of("llama")
    converted, _ = convert(zoo.llama(), inputs)
    copied = copy.deepcopy(converted)
    ours, theirs = records(converted), records(copied)
    assert len(theirs) == 2
    assert all(a is not b and a.configs[0] is not b.configs[0] for a, b in zip(ours, theirs, strict=True))
    expected = converted(**inputs).logits
    te_convert.revert(copied)
    assert set(configs(copied)) == {"sdpa"}
    assert set(configs(converted)) == {"te_convert"}
    assert torch.equal(converted(**inputs).logits, expected)


def test_whole_model_pickles() -> None:
    inputs = zoo.inputs_of("llama")
    converted, _ = convert(zoo.llama(), inputs)
    file = io.BytesIO()
    torch.save(converted, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(**inputs).logits, converted(**inputs).logits)
    assert all(record.executed == 1 for record in records(loaded))


def test_a_pickle_registers_the_functions_in_a_fresh_process(tmp_path: Path) -> None:
    inputs = zoo.inputs_of("llama")
    converted, _ = convert(zoo.llama(), inputs)
    torch.save((converted, inputs, converted(**inputs).logits.detach()), tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "model, inputs, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "assert torch.allclose(model(**inputs).logits, expected, atol=1e-6)\n"
        "record = model.model.layers[0].self_attn._te_convert_attention\n"
        "assert (record.executed, record.fallbacks) == (1, 0), (record.executed, record.fallbacks)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], check=True, timeout=200)


def test_saved_and_loaded(tmp_path: Path) -> None:
    inputs = zoo.inputs_of("llama")
    result = te_convert.convert(zoo.llama(), inputs, backend="reference")
    te_convert.save(result, tmp_path / "out")
    loaded: Any = te_convert.load(tmp_path / "out", backend="reference")
    assert set(configs(loaded)) == {"te_convert"}
    assert torch.equal(loaded(**inputs).logits, result.model(**inputs).logits)
    assert all(record.executed == 1 for record in records(loaded))
    assert set(configs(te_convert.revert(loaded))) == {"sdpa"}


def test_save_pretrained_writes_a_plain_model(tmp_path: Path) -> None:
    inputs, model = zoo.inputs_of("llama"), zoo.llama()
    converted, _ = convert(model, inputs)
    converted.save_pretrained(tmp_path / "out")
    assert "te_convert" not in (tmp_path / "out" / "config.json").read_text(encoding="utf-8")
    plain = type(model).from_pretrained(tmp_path / "out")
    assert torch.equal(plain(**inputs).logits, model(**inputs).logits)


def test_state_dict_has_no_new_keys() -> None:
    model, inputs = zoo.llama(), zoo.inputs_of("llama")
    converted, _ = convert(model, inputs)
    assert not [key for key in converted.state_dict() if "core_attention" in key]
    assert list(te_convert.original_state_dict(converted)) == list(model.state_dict())
