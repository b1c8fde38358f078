"""Whole modules on te.MultiheadAttention and te.TransformerLayer: equal in every way, and the original where TE has no words."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_convert
from te_convert.plan.model import Outcome
from te_convert.rewrite.fused import FusedRecord, fused_record
from tests.rewrite.block_samples import (
    MEMORY,
    MLP,
    WIDTH,
    Attends,
    Block,
    GatedMLP,
    X,
    assert_close,
    check_everything,
    convert,
    decoder_layer,
    encoder_layer,
    floats,
    layout,
    records,
)
from tests.rewrite.rewrite_samples import perturb

Make = Callable[[], nn.Module]
LAYERS = [
    {"batch_first": batch_first, "norm_first": norm_first, "bias": bias}
    for batch_first in (True, False)
    for norm_first in (True, False)
    for bias in (True, False)
]


def named(options: dict[str, Any]) -> str:
    return "-".join(name for name, value in options.items() if value) or "none"


class Model(nn.Module):
    """An encoder layer inside a bigger model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([encoder_layer(), encoder_layer(norm_first=True)])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def test_every_form_of_an_encoder_layer() -> None:
    for options in LAYERS:
        check_everything(encoder_layer(**options).eval(), (X,))


def test_every_form_of_a_decoder_layer() -> None:
    for options in LAYERS:
        memory = MEMORY if options["batch_first"] else floats(4, 5, WIDTH)
        check_everything(decoder_layer(**options).eval(), (X, memory))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_on_itself_and_on_a_memory(batch_first: bool, bias: bool) -> None:
    for memory in ((), (MEMORY if batch_first else floats(4, 5, WIDTH),)):
        check_everything(perturb(Attends(batch_first=batch_first, bias=bias)).eval(), (X, *memory))


BLOCKS: dict[str, Make] = {
    "pre": Block,
    "pre, three Linears, not causal": lambda: Block(split=True, causal=False),
    "post": lambda: Block("post", causal=False),
    "post, three Linears": lambda: Block("post", split=True),
    "parallel": lambda: Block("parallel"),
    "parallel, three Linears": lambda: Block("parallel", split=True),
    "RMSNorm": lambda: Block(norm=nn.RMSNorm),
    "post, RMSNorm": lambda: Block("post", norm=nn.RMSNorm),
    "no bias": lambda: Block(bias=False, mlp=MLP(bias=False)),
    "no bias in norms": lambda: Block(norm=lambda width, eps: nn.LayerNorm(width, eps, bias=False)),
    "eps": lambda: Block(eps=(1e-3, 1e-3)),
    "relu": lambda: Block(mlp=MLP("relu")),
    "quick gelu": lambda: Block(mlp=MLP("qgelu")),
    "gated": lambda: Block(mlp=GatedMLP()),
    "packed, first half": lambda: Block(mlp=MLP("silu", "first")),
    "packed, second half": lambda: Block(mlp=MLP("silu", "second")),
}


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_every_form_of_a_block(name: str) -> None:
    result = check_everything(nn.Sequential(perturb(BLOCKS[name]())).eval(), (X,))
    assert list(records(result.model)) == ["0"]


def test_a_model_with_layers_and_a_block_as_the_root() -> None:
    result = check_everything(perturb(Model()).eval(), (X,))
    assert list(records(result.model)) == ["layers.0", "layers.1"]
    result = check_everything(perturb(Block()).train(), (X,))
    assert list(records(result.model)) == [""]


def test_timms_vision_transformer() -> None:
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": WIDTH, "num_heads": 2, "depth": 2, "num_classes": 3}
    for activation in (nn.ReLU, lambda: nn.GELU(approximate="tanh")):
        model = timm.models.vision_transformer.VisionTransformer(act_layer=activation, **sizes)
        result = convert(perturb(model).eval(), (floats(2, 3, 16, 16),))
        assert list(records(result.model)) == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_whole_transformer(batch_first: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it has no nested tensors without batch_first
        model: Any = perturb(nn.Transformer(WIDTH, 2, 1, 1, 32, dropout=0.0, batch_first=batch_first)).eval()
    src, tgt = (floats(2, 5, WIDTH, seed=seed).transpose(0, int(not batch_first)).contiguous() for seed in (1, 2))
    root: Any = convert(model, (src, tgt)).model
    assert list(records(root)) == ["encoder.layers.0", "decoder.layers.0"]
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    masks = {
        "tgt_mask": torch.ones(5, 5, dtype=torch.bool).triu(1),
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
        "tgt_is_causal": True,
    }
    for record in records(root).values():
        record.fallbacks = 0
    for options in ({}, masks):
        assert_close(root(src, tgt, **options), model(src, tgt, **options))
    assert not any(record.fallbacks for record in records(root).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    for model in (encoder_layer(), nn.Sequential(perturb(Block())), perturb(Attends())):
        root = convert(model.eval().to(dtype), (X.to(dtype),)).model
        assert root(X.to(dtype)).dtype is dtype


# ---- masks -----------------------------------------------------------------------------------------------------------
def left(value: Tensor) -> Tensor:
    return value.flip(-1)


PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
SOME = torch.tensor([[False, False, True, False, True]] * 5) & ~torch.eye(5, dtype=torch.bool)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "right padding": {"key_padding_mask": PADDING},
    "left padding": {"key_padding_mask": left(PADDING)},
    "mask": {"attn_mask": SOME},
    "mask of each head": {"attn_mask": torch.stack([SOME, CAUSAL, SOME.flip(-1) & ~torch.eye(5, dtype=torch.bool), CAUSAL])},
    "causal mask": {"attn_mask": CAUSAL},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "causal, right padding": {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": PADDING},
    "mask and padding": {"attn_mask": SOME, "key_padding_mask": PADDING},
}


def as_float(masks: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.zeros(mask.shape).masked_fill(mask, -torch.inf) if isinstance(mask, Tensor) else mask
        for name, mask in masks.items()
    }


@pytest.fixture(scope="module")
def attention() -> tuple[nn.Module, nn.Module]:
    model = perturb(Attends()).eval()
    return model, convert(model, (X,)).model


@pytest.mark.parametrize("kind", [dict, as_float], ids=["bool", "float"])
@pytest.mark.parametrize("name", sorted(MASKS))
@pytest.mark.report("NVIDIA/TransformerEngine#614")
def test_masks_that_te_takes(name: str, kind: Any, attention: tuple[nn.Module, nn.Module]) -> None:
    model, root = attention
    record, masks = records(root)["attn"], kind(MASKS[name])
    before = (record.executed, record.fallbacks)
    assert_close(root(X, **masks), model(X, **masks))
    assert (record.executed, record.fallbacks) == (before[0] + 1, before[1])


def layer_masks(masks: dict[str, Any]) -> dict[str, Any]:
    names = {"attn_mask": "src_mask", "key_padding_mask": "src_key_padding_mask"}
    return {names.get(name, name): mask for name, mask in masks.items()}


@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_of_an_encoder_and_a_decoder_layer(batch_first: bool) -> None:
    encoder = encoder_layer(batch_first=batch_first, norm_first=True).eval()
    decoder = decoder_layer(batch_first=batch_first).eval()
    x = X if batch_first else X.transpose(0, 1).contiguous()
    memory = MEMORY if batch_first else MEMORY.transpose(0, 1).contiguous()
    first, second = convert(encoder, (x,)).model, convert(decoder, (x, memory)).model
    memory_padding = torch.tensor([[False, False, True], [False, False, False]])
    for masks in MASKS.values():
        assert_close(first(x, **layer_masks(masks)), encoder(x, **layer_masks(masks)))
        given = {f"tgt_{name.removeprefix('attn_')}": mask for name, mask in masks.items()}
        assert_close(second(x, memory, **given), decoder(x, memory, **given))
        given["memory_key_padding_mask"] = memory_padding
        assert_close(second(x, memory, **given), decoder(x, memory, **given))
    for root in (first, second):
        assert records(root)[""].fallbacks == 0


def test_gradients_go_through_a_mask(attention: tuple[nn.Module, nn.Module]) -> None:
    given = [X.clone().requires_grad_() for _ in attention]
    for model, x in zip(attention, given, strict=True):
        model(x, **MASKS["mask and padding"]).square().sum().backward()
    assert given[0].grad is not None
    assert given[1].grad is not None
    assert_close(given[1].grad, given[0].grad)


# ---- the original where TE has no words ------------------------------------------------------------------------------
def test_attention_weights_are_the_originals() -> None:
    model = perturb(nn.MultiheadAttention(WIDTH, 2, batch_first=True)).eval()
    root: Any = convert(model, (X, X, X, None, False)).model
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((X, X, X), {}),
        ((X, X, X), {"average_attn_weights": False}),
        ((X[0], X[0], X[0]), {"need_weights": False}),
        ((X, MEMORY, MEMORY), {"need_weights": False}),
        ((X, X, X.clone()), {"need_weights": False}),
        ((X, X, X), {"need_weights": False, "attn_mask": floats(5, 5)}),
        ((X, X, X), {"need_weights": False, "attn_mask": torch.ones(5, 5, dtype=torch.bool)}),
        ((X, X, X), {"need_weights": False, "key_padding_mask": torch.tensor([[True] * 5, [False] * 5])}),
    ]
    record = records(root)[""]
    record.fallbacks = 0  # the verification's shorter inputs are three tensors
    for index, (args, keywords) in enumerate(calls):
        expected, found = model(*args, **keywords), root(*args, **keywords)
        for own, other in zip(expected, found, strict=True):
            assert (own is None) == (other is None)
            assert own is None or torch.equal(own.nan_to_num(), other.nan_to_num())
        assert record.fallbacks == index + 1
    assert root(X, X, X, need_weights=False)[1] is None
    assert record.fallbacks == len(calls)


def test_a_mask_that_learns_gets_its_gradient(attention: tuple[nn.Module, nn.Module]) -> None:
    model, root = attention
    masks = [torch.zeros(5, 5, requires_grad=True) for _ in range(2)]
    for module, mask in zip((model, root), masks, strict=True):
        module(X, attn_mask=mask).square().sum().backward()
    assert masks[0].grad is not None
    assert masks[1].grad is not None
    assert torch.equal(masks[0].grad, masks[1].grad)


@pytest.mark.parametrize(
    "masks",
    [
        {"is_causal": True},
        {"is_causal": True, "key_padding_mask": PADDING},
        {"attn_mask": torch.zeros(1, 5, dtype=torch.bool)},
        {"attn_mask": torch.zeros(1, 5, 5, dtype=torch.bool)},
        {"attn_mask": torch.zeros(5, 5, dtype=torch.int64)},
        {"key_padding_mask": torch.zeros(1, 5, dtype=torch.bool)},
        {"key_padding_mask": torch.zeros(2, 1, dtype=torch.bool)},
        {"key_padding_mask": torch.zeros(2, 5, dtype=torch.int64)},
        {"no_such_argument": 1},
    ],
    ids=lambda masks: ", ".join(f"{name} {tuple(getattr(mask, 'shape', ()))}" for name, mask in masks.items()),
)
def test_an_error_stays_the_originals(masks: dict[str, Any], attention: tuple[nn.Module, nn.Module]) -> None:
    messages = []
    for module in attention:
        with pytest.raises((RuntimeError, AssertionError, TypeError)) as caught:
            module(X, **masks)
        messages.append((caught.type, str(caught.value)))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("keys", [1, 3, 5, 9])
def test_a_causal_hint_for_other_keys_than_queries(keys: int) -> None:
    model = perturb(Attends()).eval()
    root, memory = convert(model, (X, MEMORY)).model, floats(2, keys, WIDTH)
    masks = {"attn_mask": torch.ones(5, keys, dtype=torch.bool).triu(1), "is_causal": True}
    assert_close(root(X, memory, **masks), model(X, memory, **masks))
    assert records(root)["attn"].fallbacks == int(keys != 5)


def test_batches_that_do_not_fit_fail_as_before() -> None:
    model = decoder_layer().eval()
    root = convert(model, (X, MEMORY)).model
    for module in (model, root):
        with pytest.raises((RuntimeError, AssertionError)) as caught:
            module(X, MEMORY[:1])
        assert "te_convert" not in str(caught.traceback[-1].path)


def test_dropout_in_training_runs_the_original() -> None:
    model = perturb(Attends(dropout=0.5))
    root = convert(model, (X,)).model.train()
    record = records(root)["attn"]
    executed, record.fallbacks = record.executed, 0
    torch.manual_seed(0)
    expected = model.train()(X)
    torch.manual_seed(0)
    assert torch.equal(root(X), expected)
    assert (record.executed, record.fallbacks) == (executed, 1)


@pytest.mark.parametrize("place", ["dropout1", "self_attn"])
def test_a_dropout_that_was_switched_on_later_drops(place: str) -> None:
    model: Any = nn.Sequential(encoder_layer())
    root: Any = convert(model, (X,)).model
    record = records(root)["0"]
    executed = record.executed
    for layer in (model[0], root[0]):
        part = getattr(layer, place)
        setattr(part, "dropout" if place == "self_attn" else "p", 0.5)
    torch.manual_seed(0)
    expected = model.train()(X)
    torch.manual_seed(0)
    assert torch.equal(root.train()(X), expected)
    assert (record.executed, record.fallbacks) == (executed, 1)


def test_arguments_that_say_nothing_do_not_count() -> None:
    class Loose(Block):
        def forward(self, x: Tensor, mask: Any = None, flag: bool = True, *args: Any, **options: Any) -> Any:
            return super().forward(x) if flag else -super().forward(x)

    model: Any = nn.Sequential(perturb(Loose())).eval()
    root: Any = convert(model, (X,)).model
    record = records(root)["0"]
    start = record.executed
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((X,), {}), ((X, None), {}), ((X,), {"flag": True})]
    for args, options in calls:
        assert_close(root[0](*args, **options), model[0](*args, **options))
    assert (record.executed, record.fallbacks) == (start + 3, 0)
    assert torch.equal(root[0](X, flag=False), model[0](X, flag=False))
    assert torch.equal(root[0](X, None, True, 1), model[0](X, None, True, 1))
    assert (record.executed, record.fallbacks) == (start + 3, 2)


# ---- surroundings ----------------------------------------------------------------------------------------------------
def test_the_nested_tensor_path_is_off_while_converted() -> None:
    model: Any = perturb(nn.TransformerEncoder(encoder_layer(), 2)).eval()
    assert model.use_nested_tensor is True
    root: Any = te_convert.convert(model, (X,), inplace=True, backend="reference").model
    assert (root.use_nested_tensor, list(records(root))) == (False, ["layers.0", "layers.1"])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = root(X, src_key_padding_mask=PADDING)
    assert all(record.executed > 0 and record.fallbacks == 0 for record in records(root).values())
    assert te_convert.revert(root) is model
    assert model.use_nested_tensor is True
    expected = model(X, src_key_padding_mask=PADDING)
    assert_close(found, expected.detach())


def test_a_layer_in_parts_keeps_its_attention_out_of_the_fast_path() -> None:
    model: Any = perturb(nn.TransformerEncoder(encoder_layer(dropout=0.1), 1)).eval()
    root: Any = te_convert.convert(model, (X,), backend="reference").model
    assert list(records(root)) == ["layers.0.self_attn"]
    assert (root.use_nested_tensor, root.layers[0].activation_relu_or_gelu) == (False, 0)
    with torch.no_grad():
        assert_close(root(X), model(X))
    assert records(root)["layers.0.self_attn"].executed > 0
    back: Any = te_convert.revert(root)
    assert (back.use_nested_tensor, back.layers[0].activation_relu_or_gelu) == (True, 1)


def test_hooks_on_the_module_itself_run() -> None:
    model: Any = nn.Sequential(encoder_layer()).eval()
    seen: list[str] = []
    handle = model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    root: Any = te_convert.convert(model, (X,), inplace=True, backend="reference").model
    assert list(records(root)) == ["0"]
    seen.clear()
    x = X.clone().requires_grad_()
    root(x).sum().backward()
    assert seen == ["forward", "backward"]
    handle.remove()
    root(x).sum().backward()
    te_convert.revert(root)(x).sum().backward()
    assert seen == ["forward", "backward", "backward", "backward"]


def test_attributes_and_parts_stay_reachable() -> None:
    model: Any = nn.Sequential(encoder_layer()).eval()
    model[0].note = "mine"
    root: Any = convert(model, (X,)).model
    layer = root[0]
    assert (layer.note, layer.norm_first, layer.self_attn.num_heads, layer.linear1.out_features) == ("mine", False, 2, 32)
    assert torch.equal(layer.self_attn.in_proj_weight, model[0].self_attn.in_proj_weight)
    assert torch.equal(layer.norm2.bias, model[0].norm2.bias)
    with pytest.raises(AttributeError, match="nothing"):
        _ = layer.nothing
    assert torch.equal(layer._sa_block(X, None, None), model[0]._sa_block(X, None, None))


def test_a_layer_under_two_names_and_an_attention_in_two_layers() -> None:
    shared: Any = nn.Sequential(encoder_layer(), nn.Identity())
    shared.append(shared[0])
    root: Any = convert(shared.eval(), (X,)).model
    assert root[0] is root[2]
    assert_close(root(X), shared(X))
    model: Any = nn.Sequential(encoder_layer(), encoder_layer())
    model[1].self_attn = model[0].self_attn
    check_everything(model.eval(), (X,))


def test_frozen_parameters_stay_frozen() -> None:
    model: Any = nn.Sequential(encoder_layer(), perturb(Block(split=True)))
    model[0].self_attn.in_proj_weight.requires_grad_(False)
    for name in "qkv":
        getattr(model[1].attn, name).requires_grad_(False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    root: Any = convert(model.eval(), (X,)).model
    assert not root[0].self_attention.qkv.weight.requires_grad
    assert not root[1].self_attention.layernorm_qkv.weight.requires_grad
    root(X).sum().backward()
    model(X).sum().backward()
    back = te_convert.revert(root)
    assert {name: p.requires_grad for name, p in back.named_parameters()} == flags
    assert [name for name, p in back.named_parameters() if p.grad is None] == [
        n for n, p in model.named_parameters() if p.grad is None
    ]


@pytest.mark.parametrize("inner", ["0.linear1", "0.norm2", "0.self_attn.out_proj", "0"])
def test_an_excluded_part_keeps_the_layer_in_parts(inner: str) -> None:
    model = nn.Sequential(encoder_layer()).eval()
    result = te_convert.convert(model, (X,), exclude=inner, backend="reference")
    assert "0" not in records(result.model)
    excluded = [site.fqn for site in result.report.sites if site.outcome is Outcome.EXCLUDED]
    assert excluded
    assert all(name == inner or name.startswith(f"{inner}.") for name in excluded)


def test_constants_inside_a_te_module_are_in_no_state_dict_but_tes_own() -> None:
    model = perturb(Block(norm=lambda width, eps: nn.LayerNorm(width, eps, bias=False))).eval()
    root: Any = convert(model, (X,)).model
    filled = {name for name, p in root.named_parameters() if name.endswith("layer_norm_bias")}
    assert len(filled) == 2
    assert not filled & root.state_dict().keys()
    assert filled <= te_convert.te_state_dict(root).keys()
    assert list(te_convert.original_state_dict(root)) == list(model.state_dict())
    for state in (root.state_dict(), te_convert.te_state_dict(root), te_convert.original_state_dict(root)):
        assert not any(root.load_state_dict(state))
    assert all(not root.get_parameter(name).any() for name in filled)
    assert_close(root(X), model(X))


def test_a_failed_transaction_leaves_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    model = perturb(Model()).eval()
    before, state = layout(model), copy.deepcopy(model.state_dict())

    def fails(*_: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr("te_convert.rewrite.fuse.watch_scope", fails)
    result = te_convert.convert(model, (X,), inplace=True, backend="reference")
    assert not result.converted
    assert layout(model) == before
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


SOURCE = """
import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, bias={bias})
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        x = self.encoder(x)
        memory = x[:, :3]
        return self.cross(x, memory, memory, need_weights=False)[0]


def build_model():
    return Net().eval()


def example_inputs():
    return (torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)),)
"""


@pytest.mark.parametrize("bias", [True, False])
def test_a_directory_loads_again(bias: bool, tmp_path: Path) -> None:
    source = tmp_path / "net.py"
    source.write_text(SOURCE.format(bias=bias))
    opened = te_convert.open_model(str(source))
    perturb(opened.model)
    result = convert(opened.model, (X,))
    out = te_convert.save(result, tmp_path / "out", source=opened.source)
    loaded = te_convert.load(out, backend="reference")
    assert list(records(loaded)) == list(records(result.model)) == ["encoder.layers.0", "encoder.layers.1", "cross"]
    assert torch.equal(loaded(X), result.model(X))
    assert all(record.executed == 1 for record in records(loaded).values())
    assert list(te_convert.original_state_dict(loaded)) == list(opened.model.state_dict())
    back = te_convert.revert(loaded)
    assert torch.equal(back(X), opened.model(X))


def test_an_allowed_approximation_has_its_own_budget() -> None:
    for model in (encoder_layer(activation="gelu"), perturb(Block(mlp=MLP("gelu")))):
        whole = nn.Sequential(model).eval()
        assert "0" not in records(te_convert.convert(whole, (X,), backend="reference").model)
        result = convert(whole, (X,), allow=("gelu-tanh",))
        (parity,) = result.report.parity.sites
        assert (parity.fqn, "60 dB" in parity.bound) == ("0", True)
        assert 60 <= parity.figures.sqnr_db < 110
        difference = (result.model(X) - whole(X)).abs().max()
        assert 0 < difference < 1e-2


def test_a_step_of_training_is_the_originals() -> None:
    model: Any = nn.Sequential(encoder_layer(), perturb(Block()))
    root: Any = convert(model, (X,)).model
    for module in (model, root):
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(module(X), torch.zeros_like(X)).backward()
            optimizer.step()
    state = te_convert.original_state_dict(root)
    assert all(torch.allclose(state[key], value, rtol=1e-4, atol=1e-5) for key, value in model.state_dict().items())


def test_a_copy_counts_from_zero_and_has_its_own_parts() -> None:
    root: Any = convert(nn.Sequential(encoder_layer()).eval(), (X,)).model
    root(X)
    other: Any = copy.deepcopy(root)
    record: FusedRecord | None = fused_record(other[0])
    assert record is not None
    assert (record.executed, record.fallbacks) == (0, 0)
    owner: Any = record.role("owner")[0]
    assert owner.norm1 is other[0].norm1
    assert owner.norm1 is not root[0].norm1


def test_under_autocast_a_layer_keeps_its_residual_stream() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    converted = te_convert.convert(layer, (x,)).model
    with torch.autocast("cpu", torch.bfloat16):  # with gradients, so that the original does not take torch's fast path
        one, other = layer(x), converted(x)
    assert one.dtype is other.dtype
    assert torch.equal(one, other)
