"""Attention that a module writes out runs on te.DotProductAttention, and as written wherever that would not be the same."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_convert
from te_convert.rewrite.eager_attention import EagerRecord
from te_convert.rewrite.lazy_scores import LazyScores

HEADS, SIZE, LENGTH = 4, 8, 6
WIDTH = HEADS * SIZE


class Attention(nn.Module):
    """q, k and v by heads; what happens to the scores is the subclass's business."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(p)
        self.register_buffer("seen", torch.ones(1, 1, 16, 16).tril())
        self.seen: Tensor

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in (self.q, self.k, self.v))

    def join(self, y: Tensor) -> Tensor:
        result: Tensor = self.proj(y.transpose(1, 2).flatten(-2))
        return result


class NanoGPT(Attention):
    """The manual path of nanoGPT."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        length = x.shape[1]
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.seen[:, :, :length, :length] == 0, float("-inf"))
        return self.join(self.drop(F.softmax(att, dim=-1).type(att.dtype)) @ v)


class Biased(Attention):
    """A learnt bias, a padding mask by its values, weights returned beside the result."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__(p)
        self.bias = nn.Parameter(0.5 * torch.randn(1, HEADS, 16, 16))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        scores = torch.matmul(q, k.transpose(-1, -2)) / SIZE**0.5
        scores += self.bias[..., : x.shape[1], : x.shape[1]]
        if mask is not None:
            scores = scores + mask
        weights = self.drop(nn.Softmax(dim=-1)(scores.float()).type_as(scores))
        return self.join(torch.matmul(weights, v)), weights


class Relative(Biased):
    """A bias that is scaled with the scores, as relative positions are in Transformer-XL."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        scores = (torch.matmul(q, k.transpose(-1, -2)) + self.bias[..., : x.shape[1], : x.shape[1]]) / math.sqrt(SIZE)
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        return self.join(torch.matmul(weights, v)), weights


class Merged(Attention):
    """Heads and samples in one dimension, ALiBi in the product, a mask that replaces, softmax in float32: as in BLOOM."""

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.reshape(batch * HEADS, length, SIZE) for part in self.heads(x))
        slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=torch.float32).repeat(batch)
        alibi = (slopes[:, None, None] * torch.arange(length)).to(x.dtype)
        scores = alibi.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=SIZE**-0.5).view(batch, HEADS, length, length)
        if keep is not None:
            scores = torch.where(keep, scores, torch.finfo(scores.dtype).min)
        weights = self.drop(F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype))
        y = torch.bmm(weights.view(batch * HEADS, length, length), v)
        return self.join(y.view(batch, HEADS, length, SIZE))


class Wrap(nn.Module):
    """A model around it that uses the result alone."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention, self.out = nn.LayerNorm(WIDTH), attention, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        y = self.attention(self.norm(x), *rest)
        result: Tensor = self.out(x + (y[0] if isinstance(y, tuple) else y))
        return result


def padding(right: bool = True) -> Tensor:
    """[2, 1, 1, LENGTH]: the second sample has two padded keys."""
    mask = torch.zeros(2, 1, 1, LENGTH)
    mask[1, ..., -2:] = torch.finfo(torch.float32).min
    return mask if right else mask.flip(-1)


def model_of(attention: nn.Module) -> Any:
    torch.manual_seed(0)
    model = Wrap(attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


def inputs(*rest: Tensor) -> tuple[Any, ...]:
    return (torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)), *rest)


def record_of(model: nn.Module) -> EagerRecord:
    (record,) = {value for module in model.modules() for value in vars(module).values() if isinstance(value, EagerRecord)}
    record.executed = record.fallbacks = 0
    return record


_DONE: dict[tuple[type, float], tuple[Any, Any]] = {}


def converted(attention: Any) -> tuple[Any, Any, EagerRecord]:
    """A model with the attention and what became of it, converted without a mask, once for each kind."""
    key = type(attention), attention.drop.p
    if key not in _DONE:
        model = model_of(attention)
        result, report = te_convert.convert(model, inputs())
        assert report.parity.passed
        assert not report.parity.reverted
        _DONE[key] = model, result
    model, result = (copy.deepcopy(each) for each in _DONE[key])
    return model, result, record_of(result)


CASES = [
    (NanoGPT(), (), "causal"),
    (Biased(), (), "no_mask"),
    (Biased(), (padding(),), "padding"),
    (Biased(), (padding(right=False),), "arbitrary"),
    (Relative(), (), "no_mask"),
    (Relative(), (padding(),), "padding"),
    (Merged(), (), "no_mask"),
    (Merged(), (torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None],), "causal"),
    (Merged(), (padding() == 0,), "padding"),
]


@pytest.mark.parametrize(("attention", "rest", "mask_type"), CASES)
def test_it_runs_and_is_masked_as_it_was(attention: nn.Module, rest: tuple[Tensor, ...], mask_type: str) -> None:
    model, result, record = converted(attention)
    seen = []
    record.observer = lambda _, given, __: seen.append(given[0][0])
    with torch.no_grad():
        assert torch.allclose(model(*inputs(*rest)), result(*inputs(*rest)), atol=1e-5)
    assert (record.executed, record.fallbacks) == (1, 0)
    (run,) = seen
    assert run.masking.mask_type == mask_type
    assert (run.masking.bias is not None) == (not isinstance(attention, NanoGPT))
    assert record.spec.num_attention_heads == HEADS


@pytest.mark.parametrize(("attention", "rest", "mask_type"), CASES)
def test_gradients_are_those_of_the_original(attention: nn.Module, rest: tuple[Tensor, ...], mask_type: str) -> None:
    del mask_type
    model, result, record = converted(attention)
    found = []
    for each in (model, result):
        x, *others = inputs(*rest)
        x.requires_grad_()
        each(x, *others).square().sum().backward()
        found.append([x.grad, each.attention.proj.weight.grad, getattr(each.attention, "bias", each.attention.proj.bias).grad])
    assert record.executed == 1
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-4 * a.abs().max()


def test_another_mask_than_the_recorded_one_is_looked_at_again() -> None:
    model, result, record = converted(Biased())
    mask = padding()
    for _ in range(2):
        with torch.no_grad():
            assert torch.allclose(model(*inputs(mask)), result(*inputs(mask)), atol=1e-5)
        mask.copy_(padding(right=False))  # the same tensor with other values
    assert (record.executed, record.fallbacks) == (2, 0)


def test_a_row_without_a_key_is_left_to_the_original() -> None:
    model, result, record = converted(Biased())
    mask = torch.zeros(2, 1, LENGTH, LENGTH)
    mask[0, :, 2] = -math.inf
    with torch.no_grad():
        a, b = model(*inputs(mask)), result(*inputs(mask))
    assert torch.equal(a.isnan(), b.isnan())
    assert a.isnan().any()
    assert (record.executed, record.fallbacks) == (0, 1)


def test_weights_that_somebody_reads_are_the_original_ones() -> None:
    model, result, record = converted(Biased())
    x = inputs()[0]
    a, b = model.attention(x), result.attention(x)
    assert type(b[1]) is LazyScores
    assert (record.executed, record.fallbacks) == (1, 0)
    assert torch.allclose(a[1], b[1], atol=1e-6)
    grads = [torch.autograd.grad(y[1].square().sum(), module.attention.bias)[0] for y, module in ((a, model), (b, result))]
    assert torch.allclose(grads[0], grads[1], atol=1e-6)
    assert torch.equal(copy.deepcopy(b[1].detach()), b[1].detach())


class Function(torch.autograd.Function):
    """Doubles what it gets; C++ hands it the lazy tensor as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


def test_below_torch_functions_the_gradient_is_the_original_one() -> None:
    model, result, _ = converted(Biased())
    x = inputs()[0]
    found = [
        torch.autograd.grad(Function.apply(each.attention(x)[1]).square().sum(), each.attention.bias)[0] for each in (model, result)
    ]
    assert torch.allclose(found[0], found[1], atol=1e-5)
    assert found[0].abs().max() > 0


class Switch(Attention):
    """Takes ways that were never recorded."""

    way = ""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.transpose(-2, -1) * SIZE**-0.5
        if self.way == "tanh":
            scores = 3 * torch.tanh(scores / 3)
        elif self.way == "scale":
            scores = scores * 2
        elif self.way == "query":
            q.mul_(5)
        elif self.way == "view":
            scores.view(-1)[0] += 3
        elif self.way == "base":
            twice = scores * 2
            scores.add_(torch.ones(LENGTH))
            scores = scores + twice
        elif self.way == "dim":
            return self.join(scores.softmax(-2) @ v)
        elif self.way == "hook":
            weights = scores.softmax(-1)
            weights.register_hook(lambda grad: grad * 2) if weights.requires_grad else None
            return self.join(weights @ v)
        return self.join(scores.softmax(-1) @ v)


@pytest.mark.parametrize("way", ["", "tanh", "scale", "query", "view", "base", "dim", "hook"])
def test_a_way_that_was_not_recorded_computes_what_is_written(way: str) -> None:
    model, result, record = converted(Switch())
    model.attention.way = result.attention.way = way
    found = []
    for each in (model, result):
        x = inputs()[0].requires_grad_()
        y = each(x)
        found.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-5 * a.abs().max()
    assert (record.executed, min(record.fallbacks, 1)) == ((1, 0) if way == "" else (0, 1))


def test_copies_revert_and_state() -> None:
    model, result, record = converted(NanoGPT())
    twin = copy.deepcopy(result)
    with torch.no_grad():
        assert torch.equal(twin(*inputs()), result(*inputs()))
    assert record_of(twin) is not record
    back = te_convert.revert(copy.deepcopy(result))
    assert type(back.attention) is NanoGPT
    with torch.no_grad():
        assert torch.equal(back(*inputs()), model(*inputs()))
    assert te_convert.original_state_dict(result).keys() == model.state_dict().keys()
    assert te_convert.convert(result, inputs()).report.parity.passed


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_a_checkpoint(reentrant: bool) -> None:
    model, result, record = converted(NanoGPT())
    found = []
    for each in (model, result):
        x = inputs()[0].requires_grad_()
        checkpoint(each, x, use_reentrant=reentrant).square().sum().backward()
        found.append(x.grad)
    assert torch.allclose(found[0], found[1], atol=1e-4)
    assert record.executed == 2


def test_under_autocast() -> None:
    model, result, record = converted(NanoGPT())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        a, b = model(*inputs()), result(*inputs())
    assert a.dtype is b.dtype
    assert (a - b).abs().max() <= 0.05 * a.abs().max()
    assert (record.executed, record.fallbacks) == (1, 0)


def test_in_bfloat16_accuracy_is_that_of_the_original() -> None:
    model = model_of(Merged()).to(torch.bfloat16)
    x = inputs()[0].to(torch.bfloat16)
    result, report = te_convert.convert(model, (x,))
    assert report.parity.passed
    assert not report.parity.reverted
    record = record_of(result)
    assert result(x).dtype is torch.bfloat16
    assert (record.executed, record.fallbacks) == (1, 0)


def test_float64_is_refused() -> None:
    plan = te_convert.analyze(model_of(Merged()).double(), (inputs()[0].double(),))
    assert [reason.code for reason in plan.get("attention").reasons] == ["attention.eager-region"]
    assert "float64" in plan.get("attention").reasons[0].detail


def test_training_drops_with_the_same_probability() -> None:
    _, result, record = converted(NanoGPT(p=0.25))
    result.train()
    torch.manual_seed(0)
    first, second = result(*inputs()), result(*inputs())
    assert record.spec.attention_dropout == 0.25
    assert record.executed == 2
    assert not torch.equal(first, second)
    result.attention.drop.p = 0.5
    result(*inputs())
    assert (record.executed, record.fallbacks) == (2, 1)


def test_compiled_it_is_the_original() -> None:
    model, result, record = converted(NanoGPT())
    compiled: Any = torch.compile(result, backend="eager")
    with torch.no_grad():
        assert torch.allclose(compiled(*inputs()), model(*inputs()), atol=1e-5)
    assert record.fallbacks == 0


def test_excluded_it_stays() -> None:
    plan = te_convert.analyze(model_of(NanoGPT()), inputs(), exclude=("attention",))
    assert str(plan.get("attention").outcome) == "EXCLUDED"
