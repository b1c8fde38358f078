"""Whole models converted to Transformer Engine's real modules: outputs, gradients, training, state dicts, and the way back."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_convert
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.replacements.build import constructor_arguments, module_class
from te_convert.rewrite.fused import fused_record
from tests.rewrite import attention_models, layer_models
from tests.rewrite.mixture_samples import Layer, Mixture
from tests.rewrite.rewrite_samples import perturb
from tests.te_contract.te_on_cpu import needs_te, te_on_cpu

pytestmark = needs_te

WIDTH = 32
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def te() -> Iterator[Any]:
    with te_on_cpu() as package:
        yield package


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return y


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return y


class Block(nn.Module):
    """A pre-norm block as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(8, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH))


def encoder(norm_first: bool, batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, norm_first=norm_first, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True, norm_first=True), 2)


class CrossAttends(nn.Module):
    """nn.MultiheadAttention outside torch's layers: self- and cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = (nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.own(x, x, x, need_weights=False)[0]
        y: Tensor = x + self.other(x, memory, memory, need_weights=False)[0]
        return y


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: nn.Module = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2)).eval()
    return model


def tensors(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed, shape in enumerate(shapes))


@dataclass(frozen=True)
class Case:
    """A model, its inputs, how many TE modules of each kind it gets, and options of the conversion."""

    make: Callable[[], nn.Module]
    inputs: Any
    modules: dict[str, int]
    allow: tuple[str, ...] = ()

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return perturb(self.make())


def transformers_case(name: str, modules: dict[str, int], **options: Any) -> Case:
    return Case(attention_models.CONVERTED[name], attention_models.inputs_of(name), modules, **options)


def torch_case(make: Callable[[], nn.Module], *shapes: tuple[int, ...], **modules: int) -> Case:
    return Case(make, tensors(*shapes), modules)


X, MEMORY = (2, 7, WIDTH), (2, 9, WIDTH)
CASES: dict[str, Case] = {
    "gpt2": transformers_case(
        "gpt2", {"Linear": 3, "LayerNorm": 1, "LayerNormLinear": 2, "LayerNormMLP": 2, "DotProductAttention": 2}
    ),
    "llama": transformers_case(
        "llama", {"Linear": 3, "RMSNorm": 1, "LayerNormLinear": 2, "LayerNormMLP": 2, "DotProductAttention": 2}
    ),
    "gemma2": transformers_case(
        "gemma2", {"Linear": 3, "RMSNorm": 5, "LayerNormLinear": 2, "LayerNormMLP": 2, "DotProductAttention": 2}
    ),
    "mistral": transformers_case(
        "mistral", {"Linear": 3, "RMSNorm": 1, "LayerNormLinear": 2, "LayerNormMLP": 2, "DotProductAttention": 2}
    ),
    "gpt2, whole layers": Case(
        layer_models.gpt2, layer_models.inputs("gpt2"), {"Linear": 1, "LayerNorm": 1, "TransformerLayer": 2}
    ),
    "bert, whole layers": Case(
        layer_models.bert, layer_models.inputs("bert"), {"Linear": 1, "LayerNorm": 1, "TransformerLayer": 2}
    ),
    "clip, whole layers": Case(layer_models.clip_text, layer_models.inputs("clip"), {"LayerNorm": 1, "TransformerLayer": 2}),
    "bert": transformers_case("bert", {"Linear": 9, "LayerNorm": 5, "DotProductAttention": 2}),
    "vit": transformers_case("vit", {"Linear": 5, "LayerNorm": 1, "LayerNormLinear": 4, "DotProductAttention": 2}),
    "whisper": transformers_case("whisper", {"Linear": 7, "LayerNorm": 1, "LayerNormLinear": 8, "DotProductAttention": 3}),
    "mixtral": Case(
        mixtral,
        {"input_ids": attention_models.ids()},
        {"Linear": 2, "RMSNorm": 2, "LayerNormLinear": 1, "GroupedLinear": 1, "DotProductAttention": 1},
    ),
    "expert modules": torch_case(lambda: Layer(Mixture()).eval(), (2, 7, 16), Linear=1, LayerNorm=1, GroupedLinear=1),
    "encoder, pre-norm": torch_case(partial(encoder, True, True), X, TransformerLayer=2),
    "encoder, post-norm": torch_case(partial(encoder, False, True), X, TransformerLayer=2),
    "encoder, sequence first": torch_case(partial(encoder, True, False), X, TransformerLayer=2),
    "decoder": torch_case(decoder, X, MEMORY, TransformerLayer=2),
    "attention": torch_case(CrossAttends, X, MEMORY, MultiheadAttention=2),
    "blocks": torch_case(blocks, (2, 7, 8), Linear=1, LayerNorm=1, TransformerLayer=2),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def run(model: nn.Module, inputs: Any) -> Tensor:
    """The first output: logits, or hidden states."""
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    first: Tensor = output if isinstance(output, Tensor) else output["logits"] if "logits" in output else output[0]
    return first


def backward(model: nn.Module, inputs: Any) -> Tensor:
    output = run(model, inputs)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype))
    return output.detach()


def convert(case: Case, model: nn.Module, **options: Any) -> Any:
    result = te_convert.convert(model, case.inputs, backend="te", allow=case.allow, **options)
    parity = result.report.parity
    assert parity.passed, result.report
    assert parity.backend == "te"
    assert not parity.reverted
    return result.model


def counters(model: nn.Module) -> dict[str, tuple[int, int]]:
    """How often each fusion ran on TE, and how often its members ran instead."""
    records = {name: record for name, module in model.named_modules() if (record := fused_record(module)) is not None}
    return {name: (record.executed, record.fallbacks) for name, record in records.items()}


def assert_ran_on_te(model: nn.Module, before: dict[str, tuple[int, int]]) -> None:
    """Since then, every fusion ran and nothing fell back."""
    for name, (executed, fallbacks) in counters(model).items():
        assert executed > before[name][0], name
        assert fallbacks == before[name][1], name


def named(name: str) -> Callable[[str], str]:
    """For assert_close: its text with the parameter's name."""
    return lambda text: f"{name}: {text}"


def te_modules(model: nn.Module) -> dict[str, int]:
    found = [module for module in model.modules() if SITE_ATTRIBUTE in module.__dict__]
    return dict(Counter(type(module).__name__.removeprefix("TE") for module in found))


def assert_same_gradients(model: nn.Module, original: nn.Module) -> None:
    """Of a reverted model and its original; the tolerance grows with the largest entry of a gradient."""
    names = [name for name, _ in original.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    for name, parameter in original.named_parameters():
        other = model.get_parameter(name)
        if parameter.grad is None:
            assert other.grad is None, name
            continue
        assert other.grad is not None, name
        largest = max(1.0, float(parameter.grad.abs().max()))
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-5, atol=1e-5 * largest, msg=named(name))


@every_case
def test_outputs_and_gradients_are_the_originals(case: Case) -> None:
    original = case.model()
    before = torch.get_rng_state()
    model = convert(case, original)
    assert torch.equal(torch.get_rng_state(), before)
    assert te_modules(model) == case.modules
    counted = counters(model)
    torch.testing.assert_close(backward(model, case.inputs), backward(original, case.inputs), **TOLERANCE)
    assert_ran_on_te(model, counted)
    assert_same_gradients(te_convert.revert(model), original)


@every_case
def test_the_way_back_is_exact(case: Case) -> None:
    original = case.model()
    reverted = te_convert.revert(convert(case, original))
    assert not te_modules(reverted)
    assert torch.equal(run(reverted, case.inputs), run(original, case.inputs))
    state = reverted.state_dict()
    assert list(state) == list(original.state_dict())
    assert all(torch.equal(value, state[name]) for name, value in original.state_dict().items())


@every_case
def test_state_dicts_load_strictly_in_both_layouts(case: Case) -> None:
    original = case.model()
    model = convert(case, original)
    expected = run(original, case.inputs)
    layouts = {"te": model.state_dict(), "original": te_convert.original_state_dict(model)}
    assert list(layouts["original"]) == list(original.state_dict())
    assert all(torch.equal(value, layouts["original"][name]) for name, value in original.state_dict().items())
    assert not [name for name in layouts["te"] if name.endswith("_extra_state")]
    for layout, load in (("te", model.load_state_dict), ("original", partial(te_convert.load_original_state_dict, model))):
        state = copy.deepcopy(layouts[layout])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load(state)
        torch.testing.assert_close(run(model, case.inputs), expected, **TOLERANCE)


@every_case
def test_te_state_dict_is_that_of_plain_te_modules(case: Case) -> None:
    """Each site's part loads strictly into an ordinary TE module with the same arguments."""
    model = convert(case, case.model())
    state = te_convert.te_state_dict(model)
    for name, module in model.named_modules():
        if SITE_ATTRIBUTE in module.__dict__:
            spec = module.__dict__[SITE_ATTRIBUTE].decision.spec
            cls = module_class(spec, "te")
            args, kwargs = constructor_arguments(spec, cls)
            prefix = f"{name}." if name else ""
            part = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            cls(*args, **kwargs).load_state_dict(part, assign=True)


@every_case
def test_twins_and_te_exchange_weights(case: Case) -> None:
    on_te = convert(case, case.model())
    on_twins = te_convert.convert(case.model(), case.inputs, backend="reference", allow=case.allow).model
    with torch.no_grad():
        for parameter in on_te.parameters():
            parameter.mul_(1.125)
    on_twins.load_state_dict(on_te.state_dict())
    torch.testing.assert_close(run(on_te, case.inputs), run(on_twins, case.inputs), **TOLERANCE)
    assert list(te_convert.te_state_dict(on_te)) == list(te_convert.te_state_dict(on_twins))


@every_case
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_copies_compute_the_same_on_their_own(case: Case, copied: Callable[[Any], Any]) -> None:
    model = convert(case, case.model())
    expected = run(model, case.inputs)
    other = copied(model)
    assert te_modules(other) == case.modules
    assert torch.equal(run(other, case.inputs), expected)
    assert list(other.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    assert torch.equal(run(model, case.inputs), expected)
    assert not torch.equal(run(other, case.inputs), expected)
    reverted = te_convert.revert(other)
    assert list(reverted.state_dict()) == list(case.model().state_dict())


@every_case
def test_training_takes_the_same_steps(case: Case) -> None:
    """Three steps of SGD, dropout off."""
    original = case.model()
    for module in original.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "attn_pdrop", "resid_pdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model = convert(case, original.train())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (original, model)]
    for _ in range(3):
        losses = []
        for each, optimizer in zip((original, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = run(each, case.inputs).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    trained = te_convert.original_state_dict(model)
    for name, value in original.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-5, msg=named(name))


@every_case
def test_bfloat16_passes_the_parity_check(case: Case) -> None:
    inputs = torch.utils._pytree.tree_map_only(Tensor, lambda x: x.bfloat16() if x.is_floating_point() else x, case.inputs)
    convert(Case(case.make, inputs, case.modules, case.allow), case.model().bfloat16())


@every_case
def test_under_autocast_te_computes_in_its_dtype(case: Case) -> None:
    """bfloat16 outputs instead of float32 at a norm or a TransformerLayer are TE's way; the values agree to bfloat16."""
    original = case.model()
    model = convert(case, original)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        actual, expected = run(model, case.inputs).float(), run(original, case.inputs).float()
    assert float((actual - expected).norm() / expected.norm()) < 0.02


def test_masks_of_torchs_layers() -> None:
    """Causal masks, padding and a mask per head reach te.TransformerLayer as torch's layers mean them."""
    case = CASES["encoder, pre-norm"]
    original = case.model()
    model = convert(case, original)
    (x,) = case.inputs
    causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    padding = torch.arange(x.shape[1]) >= torch.tensor([[7], [4]])
    calls: list[dict[str, Any]] = [
        {"mask": causal, "is_causal": True},
        {"mask": causal.isneginf()},
        {"src_key_padding_mask": padding},
        {"mask": causal.isneginf(), "src_key_padding_mask": padding},
    ]
    counted = counters(model)
    for options in calls:
        actual, expected = model(x, **options), original(x, **options)
        torch.testing.assert_close(actual[~padding], expected[~padding], **TOLERANCE)
    assert_ran_on_te(model, counted)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "gpt2, whole layers", "bert, whole layers"])
def test_padded_batches(name: str, side: str) -> None:
    """Right padding runs on TE; left padding falls back to the original attention, as TE's backends do not agree on it."""
    case = CASES[name]
    original = case.model()
    model = convert(case, original)
    mask = attention_models.padding(side, 0, 4)
    inputs = {**case.inputs, "attention_mask": mask}
    actual, expected = run(model, inputs), run(original, inputs)
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], **TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt2, whole layers", "mistral", "whisper"])
def test_generation_with_a_cache(name: str) -> None:
    """The same tokens, one query at a time over a growing cache."""
    case = CASES[name]
    original: Any = case.model()
    model = convert(case, original)
    arguments = {key: value for key, value in case.inputs.items() if key not in ("decoder_input_ids", "use_cache")}
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(**arguments, **options), original.generate(**arguments, **options))


def test_a_fused_layer_follows_the_mode_of_its_model() -> None:
    model = convert(CASES["blocks"], CASES["blocks"].model())
    for mode in (False, True):
        model.train(mode)
        assert {module.training for module in model.modules()} == {mode}
