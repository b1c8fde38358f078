"""Stacked experts on te.GroupedLinear: every routing gives the original's numbers, and the weights come back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_convert
from te_convert.replacements.experts import GroupedExperts, pad_rows
from te_convert.rewrite.loans import is_borrower
from tests.rewrite.block_samples import (
    WIDTH,
    Experts,
    MoE,
    X,
    assert_close,
    assert_same_gradients,
    check_everything,
    convert,
    floats,
    records,
)
from tests.rewrite.rewrite_samples import perturb

COUNT = 4


def transformers_experts(name: str, implementation: str = "eager") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 8, "moe_intermediate_size": 8}
    counts = {"num_local_experts": COUNT, "num_experts": COUNT}
    config = getattr(transformers, f"{name}Config")(**sizes, **counts)
    config._experts_implementation = implementation
    folder = {"Mixtral": "mixtral", "Qwen3Moe": "qwen3_moe", "Olmoe": "olmoe"}[name]
    module = __import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=["x"])
    experts: nn.Module = getattr(module, f"{name}Experts")(config)
    with torch.no_grad():
        for seed, parameter in enumerate(experts.parameters()):
            parameter.copy_(floats(*parameter.shape, seed=seed) / 4)
    return experts


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("gated", [True, False])
def test_every_number_of_experts_for_a_token(gated: bool, top_k: int) -> None:
    model = perturb(MoE(Experts(gated=gated, activation="silu" if gated else "relu"), top_k=top_k)).eval()
    result = check_everything(model, (X,))
    assert list(records(result.model)) == ["experts.grouped"]


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "qgelu"])
def test_any_known_activation(activation: str) -> None:
    model = perturb(MoE(Experts(activation=activation))).eval()
    assert_close(convert(model, (X,)).model(X), model(X))


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Olmoe"])
def test_transformers_experts(name: str) -> None:
    check_everything(perturb(MoE(transformers_experts(name))).eval(), (X,))


def test_another_implementation_of_transformers() -> None:
    model = perturb(MoE(transformers_experts("Mixtral", "batched_mm"))).eval()
    root = convert(model, (X,)).model
    assert_close(root(X), model(X))


def routed(experts: nn.Module) -> tuple[Any, Any]:
    """The experts before and after a conversion."""
    root: Any = convert(perturb(MoE(experts)).eval(), (X,)).model
    return experts, root.experts


ROUTES: dict[str, list[list[int]]] = {
    "one expert without tokens": [[0, 1], [1, 0], [3, 0], [0, 3], [1, 3], [3, 1]],
    "one expert has all": [[2, 2]] * 6,
    "sentinel": [[0, COUNT], [COUNT, COUNT], [1, 2], [COUNT, 3], [2, 1], [0, 1]],
    "nobody": [[COUNT, COUNT]] * 6,
    "an expert twice": [[1, 1], [2, 2], [1, 2], [0, 0], [3, 3], [1, 1]],
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", sorted(ROUTES))
def test_every_route(name: str, dtype: torch.dtype) -> None:
    experts, grouped = routed(Experts())
    tokens, weights, index = (
        floats(6, WIDTH),
        torch.rand(6, 2, generator=torch.Generator().manual_seed(1)),
        torch.tensor(ROUTES[name]),
    )
    record = records(grouped)["grouped"]
    executed = record.executed
    assert_close(grouped(tokens, index.to(dtype), weights), experts(tokens, index, weights), 1e-30)
    assert (record.executed, record.fallbacks) == (executed + 1, 0)


def test_no_tokens() -> None:
    experts, grouped = routed(Experts())
    empty = (floats(0, WIDTH), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert grouped(*empty).shape == experts(*empty).shape == (0, WIDTH)


def test_gradients_reach_tokens_router_and_every_expert() -> None:
    experts, grouped = routed(Experts())
    index = torch.tensor(ROUTES["one expert without tokens"])
    given = [(floats(6, WIDTH).requires_grad_(), floats(6, 2, seed=5).requires_grad_()) for _ in range(2)]
    for module, (tokens, weights) in zip((experts, grouped), given, strict=True):
        module(tokens, index, weights).square().sum().backward()
    for own, other in zip(*given, strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert_close(other.grad, own.grad)
    assert torch.equal(grouped.grouped.fc1.weight2.grad, torch.zeros(16, WIDTH))
    grouped.grouped.fc1.weight2.grad = None  # as a kernel may leave it
    assert_same_gradients(te_convert.revert(grouped), experts)


def test_calls_that_the_grouped_products_do_not_take_run_the_original() -> None:
    experts, grouped = routed(Experts())
    tokens, weights, index = floats(6, WIDTH), floats(6, 2, seed=5), torch.tensor(ROUTES["sentinel"])
    record = records(grouped)["grouped"]
    executed = record.executed
    short = index.to(torch.int16)
    assert torch.equal(grouped(tokens, short, weights), experts(tokens, short, weights))
    assert (record.executed, record.fallbacks) == (executed, 1)
    assert torch.equal(grouped(weights=weights, tokens=tokens, index=short), experts(tokens, short, weights))
    assert (record.executed, record.fallbacks) == (executed, 2)
    with pytest.raises(TypeError):
        grouped(tokens, index)
    with pytest.raises(TypeError, match="unexpected keyword argument 'weight'"):
        grouped(tokens, index, weight=weights)
    with pytest.raises(TypeError, match="multiple values"):
        grouped(tokens, index, index=weights)


def test_arguments_are_bound_by_name() -> None:
    experts, grouped = routed(Experts())
    tokens, weights, index = floats(6, WIDTH), floats(6, 2, seed=5), torch.tensor(ROUTES["sentinel"])
    record, expected = records(grouped)["grouped"], experts(tokens, index, weights)
    executed = record.executed
    assert_close(grouped(weights=weights, tokens=tokens, index=index), expected)
    assert_close(grouped(tokens, weights=weights, index=index), expected)
    assert_close(grouped(tokens, index=index, weights=weights), expected)
    assert (record.executed, record.fallbacks) == (executed + 3, 0)


def test_a_model_that_calls_its_experts_by_name_in_another_order() -> None:
    class Named(MoE):
        def forward(self, x: Tensor) -> Tensor:
            tokens = x.reshape(-1, x.shape[-1])
            weights, index = self.router(tokens).softmax(-1).topk(self.top_k, -1)
            out: Tensor = self.experts(weights=weights, index=index, tokens=tokens)
            return out.reshape(x.shape)

    model = perturb(Named(Experts())).eval()
    result = convert(model, (X,))
    assert list(records(result.model)) == ["experts.grouped"]
    assert_close(result.model(X), model(X))
    assert records(result.model)["experts.grouped"].fallbacks == 0


def test_the_weights_are_views_and_read_as_stacks() -> None:
    model: Any = perturb(MoE(Experts())).eval()
    own = dict(model.experts.named_parameters())
    root: Any = convert(model, (X,), inplace=True).model
    assert is_borrower(root.experts)
    for layer, name in (("fc1", "w_in"), ("fc2", "w_out")):
        assert torch.equal(getattr(root.experts, name), own[name])
        for index in range(COUNT):
            weight = root.get_parameter(f"experts.grouped.{layer}.weight{index}")
            assert weight.data_ptr() == own[name][index].data_ptr()
    with pytest.raises(AttributeError, match="cannot be replaced"):
        root.experts.w_in = nn.Parameter(own["w_in"])


def test_frozen_experts_stay_frozen() -> None:
    model: Any = perturb(MoE(Experts())).eval()
    model.experts.w_in.requires_grad_(False)
    root: Any = convert(model, (X,)).model
    flags = {name: p.requires_grad for name, p in root.named_parameters() if name.startswith("experts")}
    assert flags == {f"experts.grouped.{layer}.weight{index}": layer == "fc2" for layer in ("fc1", "fc2") for index in range(COUNT)}
    root(X).sum().backward()
    model(X).sum().backward()
    assert_same_gradients(te_convert.revert(root), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    model = perturb(MoE(Experts())).eval().to(dtype)
    root = convert(model, (X.to(dtype),)).model
    assert root(X.to(dtype)).dtype is dtype


@pytest.mark.parametrize("recipe", ["fp8", "fp8-current", "mxfp8"])
def test_rows_are_padded_for_a_recipe(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = perturb(MoE(Experts(width=32, ffn=32), width=32)).eval()
    x = floats(2, 5, 32)
    root: Any = convert(model, (x,), recipe=recipe).model
    multiple = 16 if recipe == "fp8-current" else 32
    assert root.experts.grouped.row_multiple == multiple
    seen: list[list[int]] = []
    forward = type(root.experts.grouped.fc1).forward

    def watch(module: nn.Module, rows: Tensor, splits: list[int]) -> Any:
        seen.append(splits)
        assert len(rows) == sum(splits)
        return forward(module, rows, splits)

    monkeypatch.setattr(type(root.experts.grouped.fc1), "forward", watch)
    assert_close(root(x), model(x))
    assert seen
    assert not any(size % multiple for splits in seen for size in splits)


@pytest.mark.parametrize("splits", [[3, 0, 4, 1], [0, 0, 0, 0], [4, 4], [1]])
def test_pad_rows_puts_zeros_behind_each_group(splits: list[int]) -> None:
    rows = floats(sum(splits), 2)
    padded, sizes, place = pad_rows(rows, splits, 4)
    assert sizes == [-(-size // 4) * 4 for size in splits]
    assert torch.equal(padded[place], rows)
    assert padded.abs().sum() == rows.abs().sum()
    for group, expected in zip(padded.split(sizes), rows.split(splits), strict=True):
        assert torch.equal(group[: len(expected)], expected)


def test_hooks_of_the_experts_run_and_the_module_stays_itself() -> None:
    model: Any = perturb(MoE(Experts())).eval()
    experts, seen = model.experts, []
    experts.register_forward_hook(lambda *_: seen.append("experts"))
    root: Any = convert(model, (X,), inplace=True).model
    assert root.experts is experts
    assert isinstance(root.experts, Experts)
    assert isinstance(root.experts.grouped, GroupedExperts)
    seen.clear()
    root(X)
    assert seen == ["experts"]
    te_convert.revert(root)
    assert type(root.experts) is Experts
    assert list(root.experts._modules) == []


def test_a_whole_language_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=COUNT, num_experts_per_tok=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    tokens = torch.randint(3, 32, (2, 6), generator=torch.Generator().manual_seed(0))
    result = te_convert.convert(model, {"input_ids": tokens}, backend="reference")
    (name,) = (name for name in records(result.model) if name.endswith(".grouped"))
    assert result.report.parity.executed[name] > 0
    assert_close(result.model(tokens).logits, model(tokens).logits)
    root: Any = result.model
    root.save_pretrained(tmp_path / "saved")
    loaded = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert_close(loaded(tokens).logits, model(tokens).logits)
    out = te_convert.save(result, tmp_path / "out")
    again = te_convert.load(out, backend="reference")
    assert list(records(again)) == list(records(result.model))
    assert_close(again(tokens).logits, model(tokens).logits)
