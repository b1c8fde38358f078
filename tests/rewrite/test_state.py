"""State dicts in both layouts: what is saved, what loads, what is forgiven and what is not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import te_convert
from te_convert.errors import InputError
from te_convert.rewrite.site import is_converted
from tests.rewrite.rewrite_samples import TiedLM, converted, ids, perturb
from tests.rewrite.rewrite_samples import gpt2 as make_gpt2


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    """GPT-2 and its conversion: transposed weights, square and not, and a tied head."""
    original = make_gpt2()
    return original, converted(copy.deepcopy(original), (ids(),))


def test_the_state_dict_is_in_tes_layout_without_empty_extra_state(pair: tuple[nn.Module, nn.Module]) -> None:
    original, model = pair
    state, before = model.state_dict(), original.state_dict()
    assert list(state) == list(before)
    name = "transformer.h.0.mlp.c_fc.weight"
    assert torch.equal(state[name], before[name].t())


def test_the_layouts_are_inverses_of_each_other(pair: tuple[nn.Module, nn.Module]) -> None:
    original, model = pair
    assert same(te_convert.original_state_dict(model), original.state_dict())
    fresh = converted(make_gpt2(), (ids(),))
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    te_convert.load_original_state_dict(fresh, original.state_dict())
    assert same(te_convert.te_state_dict(fresh), te_convert.te_state_dict(model))


def test_both_layouts_load_strictly_by_themselves(pair: tuple[nn.Module, nn.Module]) -> None:
    original, model = pair
    states = [original.state_dict(), model.state_dict(), te_convert.te_state_dict(model), dict(original.state_dict())]
    wanted = copy.deepcopy(te_convert.te_state_dict(model))
    for state in copy.deepcopy(states):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        result = model.load_state_dict(state)
        assert not result.missing_keys
        assert same(te_convert.te_state_dict(model), wanted)


def test_loading_by_assignment_gives_contiguous_weights(pair: tuple[nn.Module, nn.Module]) -> None:
    original, model = pair
    wanted = copy.deepcopy(model.state_dict())
    model.load_state_dict(copy.deepcopy(original.state_dict()), assign=True)
    assert same(model.state_dict(), wanted)
    assert model.get_submodule("transformer.h.0.mlp.c_fc").weight.is_contiguous()  # type: ignore[operator]


def test_a_wrapper_around_the_converted_model_loads_too(pair: tuple[nn.Module, nn.Module]) -> None:
    original, model = pair
    wanted = copy.deepcopy(model.state_dict())
    wrapper = nn.ModuleDict({"inner": model})
    wrapper.load_state_dict({f"inner.{key}": value * 1 for key, value in original.state_dict().items()})
    assert same(model.state_dict(), wanted)


class OneSquare(nn.Module):
    """A single square transposed weight, under two names."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.first = Conv1D(6, 6)
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.again(self.first(x))
        return y


def test_a_square_weight_alone_is_ambiguous_and_says_what_to_do() -> None:
    original = OneSquare()
    model = converted(copy.deepcopy(original), (torch.randn(2, 6),))
    plain = {key: value.clone() for key, value in original.state_dict().items()}
    with pytest.raises(RuntimeError, match="load_original_state_dict"):
        model.load_state_dict(plain)
    te_convert.load_original_state_dict(model, plain)
    assert torch.equal(model.first.weight, original.first.weight.t())
    model.load_state_dict(model.state_dict())  # its own state dict says which layout it is


def test_aliases_of_a_square_weight_load_in_either_layout() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            from transformers.pytorch_utils import Conv1D

            self.square = OneSquare()
            self.wide = Conv1D(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.wide(self.square(x))
            return y

    original = Net()
    model = converted(copy.deepcopy(original), (torch.randn(2, 6),))
    wanted = copy.deepcopy(model.state_dict())
    for state in (original.state_dict(), wanted):
        model.load_state_dict({key: value.clone() for key, value in state.items()})
        assert same(model.state_dict(), wanted)


def test_what_one_load_saw_does_not_decide_a_later_one(pair: tuple[nn.Module, nn.Module]) -> None:
    original, model = pair
    name = "transformer.h.0.attn.c_proj"
    state = {key: value for key, value in original.state_dict().items() if not key.startswith(name)}
    model.load_state_dict(state, strict=False)
    square = model.get_submodule(name)
    with pytest.raises(RuntimeError, match="square weight"):
        square.load_state_dict({"weight": torch.zeros(8, 8), "bias": torch.zeros(8)})


@pytest.mark.parametrize("drop", ["up.weight", "final.weight", "embed.weight"])
def test_any_other_missing_key_stays_fatal(drop: str) -> None:
    model = converted(TiedLM(), (ids(),))
    state = model.state_dict()
    del state[drop]
    with pytest.raises(RuntimeError, match=drop):
        model.load_state_dict(state)


def test_an_unexpected_key_and_a_wrong_shape_stay_fatal(pair: tuple[nn.Module, nn.Module]) -> None:
    model = pair[1]
    with pytest.raises(RuntimeError, match="stray"):
        model.load_state_dict({**model.state_dict(), "stray": torch.ones(1)})
    name = "transformer.h.0.mlp.c_fc.weight"
    with pytest.raises(RuntimeError, match="c_fc"):
        model.load_state_dict({**model.state_dict(), name: torch.ones(3, 3)})


@pytest.mark.parametrize("extra", [None, torch.empty(0, dtype=torch.uint8)])
def test_strict_loading_with_and_without_extra_state(extra: torch.Tensor | None) -> None:
    model = converted(TiedLM(), (ids(),))
    state = model.state_dict()
    assert not [key for key in state if key.endswith("_extra_state")]
    if extra is not None:
        state.update({f"{name}._extra_state": extra for name, m in model.named_modules() if is_converted(m)})
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"


def test_a_pickled_history_is_refused_not_dropped() -> None:
    model = converted(TiedLM(), (ids(),))
    state = {**model.state_dict(), "up._extra_state": torch.zeros(40, dtype=torch.uint8)}
    with pytest.raises(RuntimeError, match="delayed-scaling history"):
        model.load_state_dict(state)


def test_te_state_dict_is_complete_for_plain_te_modules() -> None:
    from te_convert import reference

    model = converted(perturb(TiedLM()), (ids(),))
    state = te_convert.te_state_dict(model)
    norm = reference.LayerNorm(8)
    norm.load_state_dict({key.removeprefix("norm."): value for key, value in state.items() if key.startswith("norm.")})
    assert torch.equal(norm.bias, torch.zeros(8))
    assert "norm.bias" not in model.state_dict()
    assert "norm.bias" not in te_convert.original_state_dict(model)


def test_a_quantisation_history_is_kept_in_tes_layout_and_left_out_of_the_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted(TiedLM(), (ids(),))
    history = torch.ones(7, dtype=torch.uint8)
    monkeypatch.setattr(type(model.up), "get_extra_state", lambda self: history)
    assert torch.equal(te_convert.te_state_dict(model)["up._extra_state"], history)
    assert list(te_convert.original_state_dict(model)) == list(TiedLM().state_dict())


def test_safetensors_stores_a_converted_model(tmp_path: Path) -> None:
    model = converted(perturb(TiedLM()), (ids(),))
    state = {key: value for key, value in model.state_dict().items() if key not in ("head.weight", "blocks.0.weight")}
    aliases = [key for key in state if key.startswith("blocks.")]
    save_file({key: value for key, value in state.items() if key not in aliases}, tmp_path / "m.safetensors")
    stored = load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(stored[key], state[key]) for key in stored)
    assert {"embed.weight", "norm.weight", "up.weight", "up.bias", "down.weight", "final.weight"} == set(stored)


@pytest.mark.parametrize("name", ["BertModel", "LlamaForCausalLM", "GPT2LMHeadModel"])
def test_save_pretrained_writes_what_from_pretrained_reads(name: str, tmp_path: Path) -> None:
    import transformers

    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    configs: dict[str, Any] = {
        "BertModel": lambda: transformers.BertConfig(**small),
        "LlamaForCausalLM": lambda: transformers.LlamaConfig(**small, tie_word_embeddings=True),
    }
    cls: Any = getattr(transformers, name)
    original = make_gpt2() if name.startswith("GPT2") else perturb(cls(configs[name]()).eval())
    model: Any = converted(copy.deepcopy(original), {"input_ids": ids()})
    model.save_pretrained(tmp_path)
    loaded = cls.from_pretrained(tmp_path).eval()
    assert same(dict(loaded.state_dict()), dict(original.state_dict()))
    assert torch.equal(loaded(ids())[0], original(ids())[0])


def test_a_copy_saves_its_own_weights(tmp_path: Path) -> None:
    import transformers

    model: Any = converted(make_gpt2(), {"input_ids": ids()})
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.transformer.ln_f.weight.fill_(7.0)
    other.save_pretrained(tmp_path)
    loaded: Any = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.transformer.ln_f.weight, torch.full((8,), 7.0))


def test_revert_is_exact_and_leaves_nothing_behind() -> None:
    original = make_gpt2()
    state, attributes = copy.deepcopy(original.state_dict()), set(original.__dict__)
    model = te_convert.revert(converted(original, (ids(),)))
    assert model is original
    assert same(dict(model.state_dict()), dict(state))
    assert set(model.__dict__) <= attributes | {"_te_convert_plan"}
    assert not model._load_state_dict_pre_hooks
    assert not model._load_state_dict_post_hooks


def test_revert_takes_modules_only() -> None:
    with pytest.raises(InputError, match=r"nn\.Module"):
        te_convert.revert("model")  # type: ignore[arg-type]
    linear = nn.Linear(2, 2)
    assert te_convert.revert(linear) is linear
