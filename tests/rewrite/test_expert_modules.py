"""Experts that are modules on te.GroupedLinear: every router's numbers, the way back, and the original's forward elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_convert
from te_convert.rewrite import mixture
from te_convert.rules import expert_modules
from tests.rewrite.block_samples import (
    X,
    assert_close,
    assert_same_gradients,
    assert_same_state,
    check_everything,
    convert,
    floats,
    records,
)
from tests.rewrite.mixture_samples import COUNT, Gated, LanguageModel, Layer, Mixture, Plain
from tests.rewrite.rewrite_samples import perturb

IDS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))


def layer(**options: Any) -> Any:
    return perturb(Layer(Mixture(**options))).eval()


@pytest.mark.parametrize("expert", [Gated, Plain])
def test_everything(expert: type[nn.Module]) -> None:
    result = check_everything(layer(expert=expert), (X,))
    assert list(records(result.model)) == ["moe.grouped"]


@pytest.mark.parametrize("top_k", [1, 3, COUNT])
@pytest.mark.parametrize("form", ["softmax-topk-normalize", "softmax-topk", "topk-softmax"])
def test_every_router(form: str, top_k: int) -> None:
    model = layer(form=form, top_k=top_k, wide=False)
    root = convert(model, (X,)).model
    assert_close(root(X), model(X))
    assert records(root)["moe.grouped"].fallbacks == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    model = layer().to(dtype)
    root = convert(model, (X.to(dtype),)).model
    assert root(X.to(dtype)).dtype is dtype


def test_a_language_model_with_logits(tmp_path: Path) -> None:
    model = perturb(LanguageModel()).eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    result = convert(model, (IDS,))
    root = result.model
    assert list(records(root)) == ["layers.0.moe.grouped", "layers.1.moe.grouped"]
    assert_close(root(IDS), model(IDS))
    file = tmp_path / "net.py"
    file.write_text(
        "from tests.rewrite.mixture_samples import LanguageModel\n\n\ndef model():\n    return LanguageModel().eval()\n"
    )
    out = te_convert.save(result, tmp_path / "out", source=te_convert.open_model(f"{file}:model").source)
    again: Any = te_convert.load(out, backend="reference")
    assert list(records(again)) == list(records(root))
    assert torch.equal(again(IDS), root(IDS))
    assert records(again)["layers.0.moe.grouped"].executed == 1
    for one in (root, model):
        one(IDS).square().mean().backward()
    assert_same_state(te_convert.original_state_dict(root), state)
    back = te_convert.revert(root)
    assert_same_gradients(back, model)
    assert_same_state(back.state_dict(), state)
    assert torch.equal(back(IDS), model(IDS))


def test_the_logits_are_those_of_the_gate() -> None:
    model: Any = layer(logits=True)
    root: Any = convert(model, (X,)).model
    for found, expected in zip(root.moe(X), model.moe(X), strict=True):
        assert_close(found, expected)


def test_an_expert_without_tokens() -> None:
    model, x = layer(top_k=1), X[:1, :1]
    root: Any = convert(model, (x,)).model
    root(x).sum().backward()
    model(x).sum().backward()
    idle = [number for number, expert in enumerate(model.moe.experts) if expert.w1.weight.grad is None]
    assert len(idle) == COUNT - 1
    for number in idle:  # zeros, as for stacked experts
        assert not root.moe.grouped.fc1.get_parameter(f"weight{number}").grad.any()


@pytest.mark.parametrize("flat", [True, False])
def test_a_site_is_compared_where_no_run_reached_it(flat: bool) -> None:
    class Deep(Mixture):
        def forward(self, hidden_states: Tensor) -> Tensor:
            weights, index = self.route(self.gate(hidden_states).flatten(0, 1))
            return self.mix(hidden_states, weights, index)

    model = perturb(Layer(Mixture() if flat else Deep())).eval()
    record: Any = records(convert(model, (X,)).model)["moe.grouped"]
    assert record.decision.spec.routing.flat is flat
    inputs = record.sample_inputs()
    assert_close(record.run_again(inputs), record.run_original(inputs))


def fallbacks(root: Any) -> tuple[int, int]:
    record = records(root)["moe.grouped"]
    return record.executed, record.fallbacks


def test_hooks_of_the_gate_and_the_mixture_run() -> None:
    model, seen = layer(), []
    model.moe.gate.register_forward_hook(lambda *_: seen.append("gate"))
    model.moe.register_forward_hook(lambda *_: seen.append("moe"))
    root: Any = convert(model, (X,)).model
    seen.clear()
    root(X)
    assert seen == ["gate", "moe"]
    assert isinstance(root.moe, Mixture)


def changed_top_k(moe: Any) -> None:
    moe.top_k = 1


def hooked_expert(moe: Any) -> None:
    moe.experts[0].register_forward_hook(lambda *_: None)


ANOTHER = perturb(Gated())


def replaced_expert(moe: Any) -> None:
    moe.experts[1] = ANOTHER


def another_activation(moe: Any) -> None:
    moe.experts[2].activation = "relu"


@pytest.mark.parametrize("change", [changed_top_k, hooked_expert, replaced_expert, another_activation])
def test_a_mixture_that_changed_runs_its_own_forward(change: Any) -> None:
    model = layer()
    root: Any = convert(model, (X,)).model
    executed, before = fallbacks(root)
    for one in (root, model):
        change(one.moe)
    assert_close(root(X), model(X))
    assert fallbacks(root) == (executed, before + 1)


def test_other_calls_run_its_own_forward() -> None:
    model = layer()
    root: Any = convert(model, (X,)).model
    executed, before = fallbacks(root)
    assert_close(root.moe(X[0]), model.moe(X[0]))  # two dimensions were not proved
    assert root.moe(X[:0]).shape == (0, *X.shape[1:])
    with pytest.raises(TypeError):
        root.moe(x=X)
    assert fallbacks(root) == (executed, before + 3)
    assert_close(root.moe(hidden_states=X), model.moe(X))
    assert fallbacks(root) == (executed + 1, before + 3)


def test_noise_in_training_runs_its_own_forward() -> None:
    model = layer()
    model.moe.jitter_noise = 0.5
    root: Any = convert(model, (X,)).model
    executed, before = fallbacks(root)
    root.train()
    model.train()
    torch.manual_seed(0)
    expected = model(X)
    torch.manual_seed(0)
    assert_close(root(X), expected)
    assert fallbacks(root) == (executed, before + 1)


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_frozen_weights_stay_frozen(name: str) -> None:
    model = layer(expert=Plain if name == "w2" else Gated)
    model.moe.experts.requires_grad_(False)
    root: Any = convert(model, (X,)).model
    assert not any(p.requires_grad for p in root.moe.grouped.parameters())


def wrong_router(logits: Tensor, router: str, top_k: int) -> tuple[Tensor, Tensor]:
    del router
    return logits.softmax(-1).topk(top_k, -1)


def wrong_experts(logits: Tensor, router: str, top_k: int) -> tuple[Tensor, Tensor]:
    del router
    weights, index = logits.softmax(-1).topk(top_k, -1)
    return weights / weights.sum(-1, keepdim=True), index.flip(-1)


@pytest.mark.parametrize("mutant", [wrong_router, wrong_experts])
def test_a_wrong_router_is_caught(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "route", mutant)
    model = layer()
    result = te_convert.convert(model, (X,), backend="reference")
    assert "moe.grouped" in [site.fqn for site in result.report.parity.reverted]
    assert list(records(result.model)) == []
    assert_close(result.model(X), model(X))


def test_exchanged_weights_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = expert_modules._weights

    def wrong(mixture: Any, facts: Any) -> Any:
        expert = replace(facts.expert, first=facts.expert.first[::-1])
        return right(mixture, replace(facts, expert=expert))

    monkeypatch.setattr(expert_modules, "_weights", wrong)
    result = te_convert.convert(layer(), (X,), backend="reference")
    assert "moe.grouped" in [site.fqn for site in result.report.parity.reverted]


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8"])
def test_rows_are_padded_for_a_recipe(recipe: str) -> None:
    root: Any = convert(layer(), (floats(2, 16, 16),), recipe=recipe).model
    assert root.moe.grouped.row_multiple == 32
