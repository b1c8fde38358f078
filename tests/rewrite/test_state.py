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
from tests.rewrite.rewrite_samples import FUSE, Attends, TiedLM, converted, ids, perturb
from tests.rewrite.rewrite_samples import gpt2 as make_gpt2


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    """GPT-2 and its conversion site by site: transposed weights, square and not, and a tied head."""
    original = make_gpt2()
    return original, converted(copy.deepcopy(original), (ids(),), fuse=False)


@pytest.fixture(params=[make_gpt2, Attends], ids=["gpt2", "attends"])
def fused_pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """A model and its conversion with fusions: of transposed weights and a whole MLP, and of three Linears."""
    original = perturb(request.param())
    return original, converted(copy.deepcopy(original), (ids(),))


@pytest.fixture
def attends() -> tuple[nn.Module, nn.Module]:
    """A model without transposed weights and its conversion with one fusion."""
    original = perturb(Attends())
    return original, converted(copy.deepcopy(original), (ids(),))


def zeroed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def clones(state: Any) -> dict[str, torch.Tensor]:
    """Values alone, as a file has them: no metadata."""
    return {key: value.clone() for key, value in state.items()}


def test_the_state_dict_is_in_tes_layout_without_empty_extra_state(pair: tuple[nn.Module, nn.Module]) -> None:
    original, model = pair
    state, before = model.state_dict(), original.state_dict()
    assert list(state) == list(before)
    name = "transformer.h.0.mlp.c_fc.weight"
    assert torch.equal(state[name], before[name].t())


def test_the_state_dict_of_a_fusion_is_in_tes_layout_under_its_name() -> None:
    original = make_gpt2()
    before = clones(original.state_dict())
    state = converted(original, (ids(),)).state_dict()
    fused, mlp = "transformer.h.0.attn.layernorm_qkv", "transformer.h.0.mlp"
    assert list(state) == [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.h.0.attn.c_proj.weight",
        "transformer.h.0.attn.c_proj.bias",
        *(f"{fused}.{name}" for name in ("layer_norm_weight", "layer_norm_bias", "weight", "bias")),
        *(f"{mlp}.{name}" for name in ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")),
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
        "lm_head.weight",
    ]
    assert torch.equal(state[f"{fused}.weight"], before["transformer.h.0.attn.c_attn.weight"].t())
    assert torch.equal(state[f"{fused}.layer_norm_bias"], before["transformer.h.0.ln_1.bias"])
    for number, name in ((1, "c_fc"), (2, "c_proj")):
        assert torch.equal(state[f"{mlp}.fc{number}_weight"], before[f"{mlp}.{name}.weight"].t())
        assert torch.equal(state[f"{mlp}.fc{number}_bias"], before[f"{mlp}.{name}.bias"])


def test_three_linears_are_one_matrix_in_the_state_dict(attends: tuple[nn.Module, nn.Module]) -> None:
    before, state = attends[0].state_dict(), attends[1].state_dict()
    for leaf in ("weight", "bias"):
        expected = torch.cat([before[f"attn.{short}_proj.{leaf}"] for short in "qkv"])
        assert torch.equal(state[f"attn.layernorm_qkv.{leaf}"], expected)
        assert torch.equal(state[f"attn.layernorm_qkv.layer_norm_{leaf}"], before[f"norm.{leaf}"])


def test_the_layouts_are_inverses_of_each_other(pair: tuple[nn.Module, nn.Module]) -> None:
    original, model = pair
    assert same(te_convert.original_state_dict(model), original.state_dict())
    fresh = zeroed(converted(make_gpt2(), (ids(),), fuse=False))
    te_convert.load_original_state_dict(fresh, original.state_dict())
    assert same(te_convert.te_state_dict(fresh), te_convert.te_state_dict(model))


def test_the_layouts_of_fusions_are_inverses_of_each_other(fused_pair: tuple[nn.Module, nn.Module]) -> None:
    original, model = fused_pair
    assert same(te_convert.original_state_dict(model), original.state_dict())
    wanted = clones(te_convert.te_state_dict(model))
    result = te_convert.load_original_state_dict(zeroed(model), original.state_dict())
    assert str(result) == "<All keys matched successfully>"
    assert same(te_convert.te_state_dict(model), wanted)
    assert same(te_convert.original_state_dict(model), original.state_dict())


def test_both_layouts_of_a_fusion_load_strictly_by_themselves(attends: tuple[nn.Module, nn.Module]) -> None:
    original, model = attends
    wanted, expected = clones(te_convert.te_state_dict(model)), model(ids())
    own, state = copy.deepcopy(model.state_dict()), original.state_dict()
    for given in (own, clones(own), wanted, state, clones(state), copy.deepcopy(te_convert.original_state_dict(model))):
        keys = list(given)
        assert str(zeroed(model).load_state_dict(given)) == "<All keys matched successfully>"
        assert list(given) == keys  # the caller's dictionary stays as it is
        assert same(te_convert.te_state_dict(model), wanted)
        assert same(te_convert.original_state_dict(model), original.state_dict())
    assert torch.equal(model(ids()), expected)  # one product of three matrices may round otherwise than three products
    torch.testing.assert_close(expected, original(ids()), rtol=1e-5, atol=1e-6)


def test_a_fusion_loads_inside_a_wrapper(attends: tuple[nn.Module, nn.Module]) -> None:
    original, model = attends
    wanted = clones(model.state_dict())
    wrapper = nn.ModuleDict({"inner": model})
    for state in (clones(original.state_dict()), wanted):
        zeroed(model)
        wrapper.load_state_dict({f"inner.{key}": value for key, value in state.items()})
        assert same(model.state_dict(), wanted)


def test_a_fusion_loads_by_assignment(attends: tuple[nn.Module, nn.Module]) -> None:
    original, model = attends
    expected = model(ids())
    for state in (clones(original.state_dict()), clones(model.state_dict())):
        zeroed(model).load_state_dict(state, assign=True)
        assert same(te_convert.original_state_dict(model), original.state_dict())
        assert torch.equal(model(ids()), expected)
    torch.testing.assert_close(expected, original(ids()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("drop", ["norm.bias", "attn.k_proj.weight", "attn.o_proj.bias", "embed.weight"])
def test_a_missing_original_key_of_a_fusion_stays_fatal(drop: str, attends: tuple[nn.Module, nn.Module]) -> None:
    original, model = attends
    state = clones(original.state_dict())
    del state[drop]
    fused = {"norm.bias": "layernorm_qkv.layer_norm_bias", "attn.k_proj.weight": "layernorm_qkv.weight"}
    with pytest.raises(RuntimeError, match=fused.get(drop, drop)):
        model.load_state_dict(state)


@pytest.mark.report("NVIDIA/TransformerEngine#199")
def test_both_layouts_load_strictly_by_themselves(pair: tuple[nn.Module, nn.Module]) -> None:
    original, model = pair
    states = [original.state_dict(), model.state_dict(), te_convert.te_state_dict(model), dict(original.state_dict())]
    wanted = copy.deepcopy(te_convert.te_state_dict(model))
    for state in copy.deepcopy(states):
        result = zeroed(model).load_state_dict(state)
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


@pytest.mark.parametrize(
    ("drop", "fuse"),
    [
        *((name, False) for name in ("up.weight", "final.weight", "embed.weight")),
        *((name, True) for name in ("layernorm_up.weight", "layernorm_head.layer_norm_weight", "embed.weight", "down.weight")),
    ],
)
@pytest.mark.report("NVIDIA-NeMo/Automodel#2247", "NVIDIA-NeMo/Megatron-Bridge#6032")
def test_any_other_missing_key_stays_fatal(drop: str, fuse: bool) -> None:
    model = converted(TiedLM(), (ids(),), fuse=fuse)
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


@FUSE
@pytest.mark.parametrize("extra", [None, torch.empty(0, dtype=torch.uint8)])
@pytest.mark.report("NVIDIA/TransformerEngine#199")
def test_strict_loading_with_and_without_extra_state(extra: torch.Tensor | None, fuse: bool) -> None:
    model = converted(TiedLM(), (ids(),), fuse=fuse)
    state = model.state_dict()
    assert not [key for key in state if key.endswith("_extra_state")]
    if extra is not None:
        state.update({f"{name}._extra_state": extra for name, m in model.named_modules() if is_converted(m)})
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"


@pytest.mark.parametrize(("fuse", "site"), [(False, "up"), (True, "layernorm_up")], ids=["leaf", "fused"])
@pytest.mark.report("NVIDIA/TransformerEngine:transformer_engine/pytorch/_extra_state.py")
def test_a_pickled_history_is_refused_not_dropped(fuse: bool, site: str) -> None:
    model = converted(TiedLM(), (ids(),), fuse=fuse)
    state = {**model.state_dict(), f"{site}._extra_state": torch.zeros(40, dtype=torch.uint8)}
    with pytest.raises(RuntimeError, match="delayed-scaling history"):
        model.load_state_dict(state)


def test_te_state_dict_is_complete_for_plain_te_modules() -> None:
    from te_convert import reference

    model = converted(perturb(TiedLM()), (ids(),), fuse=False)
    state = te_convert.te_state_dict(model)
    norm = reference.LayerNorm(8)
    norm.load_state_dict({key.removeprefix("norm."): value for key, value in state.items() if key.startswith("norm.")})
    assert torch.equal(norm.bias, torch.zeros(8))
    assert "norm.bias" not in model.state_dict()
    assert "norm.bias" not in te_convert.original_state_dict(model)


def test_te_state_dict_is_complete_for_a_plain_fused_te_module() -> None:
    from te_convert import reference

    model = converted(perturb(TiedLM()), (ids(),))
    state, name = te_convert.te_state_dict(model), "layernorm_up."
    fused: Any = reference.LayerNormLinear(8, 16)
    fused.load_state_dict({key.removeprefix(name): value for key, value in state.items() if key.startswith(name)})
    assert torch.equal(fused.layer_norm_bias, torch.zeros(8))
    assert torch.equal(fused.weight, model.up.weight)
    assert f"{name}layer_norm_bias" not in model.state_dict()
    assert "norm.bias" not in te_convert.original_state_dict(model)


@pytest.mark.parametrize(("fuse", "site"), [(False, "up"), (True, "layernorm_up")], ids=["leaf", "fused"])
def test_a_quantisation_history_is_kept_in_tes_layout_and_left_out_of_the_originals(
    fuse: bool, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = converted(TiedLM(), (ids(),), fuse=fuse)
    history = torch.ones(7, dtype=torch.uint8)
    monkeypatch.setattr(type(model.get_submodule(site)), "get_extra_state", lambda self: history)
    assert torch.equal(te_convert.te_state_dict(model)[f"{site}._extra_state"], history)
    assert list(te_convert.original_state_dict(model)) == list(TiedLM().state_dict())


def test_safetensors_stores_a_converted_model(tmp_path: Path) -> None:
    model = converted(perturb(TiedLM()), (ids(),), fuse=False)
    state = {key: value for key, value in model.state_dict().items() if key not in ("head.weight", "blocks.0.weight")}
    aliases = [key for key in state if key.startswith("blocks.")]
    save_file({key: value for key, value in state.items() if key not in aliases}, tmp_path / "m.safetensors")
    stored = load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(stored[key], state[key]) for key in stored)
    assert {"embed.weight", "norm.weight", "up.weight", "up.bias", "down.weight", "final.weight"} == set(stored)


def test_safetensors_stores_a_fused_model_and_its_original_layout(attends: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
    original, model = attends
    wanted = clones(model.state_dict())
    for name, state in (("te", model.state_dict()), ("original", te_convert.original_state_dict(model))):
        save_file({key: value.contiguous().clone() for key, value in state.items()}, tmp_path / name)
        zeroed(model).load_state_dict(load_file(tmp_path / name))
        assert same(model.state_dict(), wanted)
    original.load_state_dict(load_file(tmp_path / "original"))


@FUSE
@pytest.mark.parametrize("name", ["BertModel", "LlamaForCausalLM", "GPT2LMHeadModel"])
@pytest.mark.report("huggingface/transformers#38154", "huggingface/transformers#38155")
def test_save_pretrained_writes_what_from_pretrained_reads(name: str, fuse: bool, tmp_path: Path) -> None:
    import transformers

    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    configs: dict[str, Any] = {
        "BertModel": lambda: transformers.BertConfig(**small),
        "LlamaForCausalLM": lambda: transformers.LlamaConfig(**small, tie_word_embeddings=True),
    }
    cls: Any = getattr(transformers, name)
    original = make_gpt2() if name.startswith("GPT2") else perturb(cls(configs[name]()).eval())
    model: Any = converted(copy.deepcopy(original), {"input_ids": ids()}, fuse=fuse)
    model.save_pretrained(tmp_path)
    loaded = cls.from_pretrained(tmp_path).eval()
    assert same(dict(loaded.state_dict()), dict(original.state_dict()))
    assert torch.equal(loaded(ids())[0], original(ids())[0])


@FUSE
def test_a_copy_saves_its_own_weights(fuse: bool, tmp_path: Path) -> None:
    import transformers

    model: Any = converted(make_gpt2(), {"input_ids": ids()}, fuse=fuse)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for norm in (other.transformer.ln_f, other.transformer.h[0].ln_1):
            norm.weight.fill_(7.0)
    other.save_pretrained(tmp_path)
    loaded: Any = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    for norm in (loaded.transformer.ln_f, loaded.transformer.h[0].ln_1):
        assert torch.equal(norm.weight, torch.full((8,), 7.0))


@FUSE
@pytest.mark.parametrize("make", [make_gpt2, TiedLM, Attends], ids=["gpt2", "tied", "attends"])
@pytest.mark.report("peer:way-back")
def test_revert_is_exact_and_leaves_nothing_behind(make: Any, fuse: bool) -> None:
    original = make()
    state = copy.deepcopy(original.state_dict())
    before = {name: (type(module), module, set(module.__dict__), list(module._modules)) for name, module in named(original)}
    model = te_convert.revert(converted(original, (ids(),), fuse=fuse))
    assert model is original
    assert same(dict(model.state_dict()), dict(state))
    assert [name for name, _ in named(model)] == list(before)
    for name, module in named(model):
        kind, same_module, attributes, children = before[name]
        assert (type(module), list(module._modules)) == (kind, children)
        assert module is same_module
        assert set(module.__dict__) <= attributes | ({"_te_convert_plan"} if module is model else set())
        assert not module._load_state_dict_pre_hooks
        assert not module._load_state_dict_post_hooks
        assert not module._forward_hooks


def named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules(remove_duplicate=False))


def test_revert_takes_modules_only() -> None:
    with pytest.raises(InputError, match=r"nn\.Module"):
        te_convert.revert("model")  # type: ignore[arg-type]
    linear = nn.Linear(2, 2)
    assert te_convert.revert(linear) is linear
