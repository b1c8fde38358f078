"""Blocks, torch's layers and experts, small, with the one check that every whole-module fusion has to pass."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_convert
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.rewrite.fused import FusedRecord, fused_record
from tests.rewrite.rewrite_samples import perturb

WIDTH, FFN, HEADS = 16, 32, 2
RELATIVE = 1e-5
"""Two float32 computations of the same formula in another order; the worst one here is below 1e-6."""


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, MEMORY = floats(2, 5, WIDTH), floats(2, 3, WIDTH, seed=1)


class Attends(nn.Module):
    """One nn.MultiheadAttention, as self-attention or on a memory."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options})

    def forward(self, x: Tensor, memory: Tensor | None = None, **masks: Any) -> Any:
        keys = x if memory is None else memory
        return self.attn(x, keys, keys, need_weights=False, **masks)[0]


def encoder_layer(**options: Any) -> Any:
    return perturb(nn.TransformerEncoderLayer(WIDTH, HEADS, FFN, **{"dropout": 0.0, "batch_first": True, **options}))


def decoder_layer(**options: Any) -> Any:
    return perturb(nn.TransformerDecoderLayer(WIDTH, HEADS, FFN, **{"dropout": 0.0, "batch_first": True, **options}))


class Attention(nn.Module):
    """nanoGPT's attention, with one packed Linear or three."""

    def __init__(self, split: bool = False, causal: bool = True, bias: bool = True, scale: float | None = None) -> None:
        super().__init__()
        self.causal, self.scale, self.split = causal, scale, split
        if split:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias) for _ in range(3))
        else:
            self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        parts = (self.q(x), self.k(x), self.v(x)) if self.split else self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (part.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal, scale=self.scale)
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, WIDTH))
        return out


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


class MLP(nn.Module):
    """Plain, or gated with packed halves of which the first or the second is activated."""

    def __init__(self, activation: str = "gelu_tanh", packed: str = "", bias: bool = True) -> None:
        super().__init__()
        self.activation, self.packed = activation, packed
        self.c_fc = nn.Linear(WIDTH, FFN * (2 if packed else 1), bias)
        self.c_proj = nn.Linear(FFN, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        act, hidden = ACTIVATIONS[self.activation], self.c_fc(x)
        if self.packed:
            first, second = hidden.chunk(2, -1)
            hidden = act(first) * second if self.packed == "first" else first * act(second)
        else:
            hidden = act(hidden)
        out: Tensor = self.c_proj(hidden)
        return out


class GatedMLP(nn.Module):
    """Two Linears into one product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Pre-norm, post-norm or parallel."""

    def __init__(
        self,
        order: str = "pre",
        norm: Callable[..., nn.Module] = nn.LayerNorm,
        eps: tuple[float, float] = (1e-5, 1e-5),
        mlp: nn.Module | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        self.order = order
        self.ln_1, self.attn = norm(WIDTH, eps=eps[0]), Attention(**attention)
        self.ln_2, self.mlp = norm(WIDTH, eps=eps[1]), mlp if mlp is not None else MLP()

    def forward(self, x: Tensor) -> Any:
        if self.order == "pre":
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))
        if self.order == "post":
            x = self.ln_1(x + self.attn(x))
            return self.ln_2(x + self.mlp(x))
        return x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))


class Experts(nn.Module):
    """Stacked weights under names of their own, gated or not."""

    def __init__(self, count: int = 4, gated: bool = True, activation: str = "silu", width: int = WIDTH, ffn: int = 8) -> None:
        super().__init__()
        self.count, self.gated, self.activation = count, gated, activation
        self.w_in = nn.Parameter(floats(count, ffn * (2 if gated else 1), width, seed=2) / 4)
        self.w_out = nn.Parameter(floats(count, width, ffn, seed=3) / 3)

    def inner(self, x: Tensor, expert: int) -> Tensor:
        act, hidden = ACTIVATIONS[self.activation], F.linear(x, self.w_in[expert])
        if not self.gated:
            return act(hidden)
        gate, up = hidden.chunk(2, -1)
        return act(gate) * up

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.count):
            token, place = torch.where(index == expert)
            if len(token):
                y = F.linear(self.inner(tokens[token], expert), self.w_out[expert])
                out = out.index_add(0, token, (y * weights[token, place, None]).to(out.dtype))
        return out


class MoE(nn.Module):
    """A router in front of experts."""

    def __init__(self, experts: nn.Module, count: int = 4, top_k: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.router, self.experts, self.top_k = nn.Linear(width, count), experts, top_k

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, index = self.router(tokens).softmax(-1).topk(self.top_k, -1)
        out: Tensor = self.experts(tokens, index, weights)
        return out.reshape(x.shape)


def records(model: nn.Module) -> dict[str, FusedRecord]:
    found = ((name, fused_record(module)) for name, module in model.named_modules())
    return {name: record for name, record in found if record is not None}


def convert(model: nn.Module, inputs: Any, **options: Any) -> Any:
    """A result that passed, in which every fusion ran."""
    result = te_convert.convert(model, inputs, backend="reference", **options)
    parity = result.report.parity
    assert parity.passed, result.report
    assert not parity.reverted
    assert records(result.model)
    assert all(parity.executed[name] > 0 for name in records(result.model)), parity.executed
    return result


def assert_close(found: Tensor, expected: Tensor, floor: float = 0.0) -> None:
    """Equal within RELATIVE of the largest value, or of ``floor``."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    found, expected = found.detach().double(), expected.detach().double()
    error = float((found - expected).abs().max())
    assert error <= RELATIVE * max(float(expected.abs().max()), floor), error


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(found: nn.Module, expected: nn.Module) -> None:
    """A gradient that is zero but for rounding (of the keys' bias) is measured against the largest one."""
    wanted, have = gradients(expected), gradients(found)
    assert list(have) == list(wanted)
    largest = max(float(grad.abs().max()) for grad in wanted.values() if grad is not None)
    for name, grad in wanted.items():
        other = have[name]
        assert (other is None) == (grad is None), name
        if grad is not None and other is not None:
            assert_close(other, grad, 1e-2 * largest)


def layout(model: nn.Module) -> dict[str, Any]:
    """Classes, order of everything, and flags."""
    return {
        name: (type(module), list(module._parameters), list(module._modules), list(module._buffers), module.training)
        for name, module in model.named_modules()
    }


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def copies(model: nn.Module) -> list[nn.Module]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]


def check_everything(model: nn.Module, inputs: tuple[Any, ...], **options: Any) -> Any:
    """What every conversion of a whole module has to give; returns the result of the first one."""
    before, state = layout(model), {key: value.clone() for key, value in model.state_dict().items()}
    result = convert(model, inputs, **options)
    root = result.model
    assert layout(model) == before
    expected = model(*inputs)
    check_outputs_and_gradients(model, copy.deepcopy(root), inputs, expected)
    check_state(root, state, inputs, expected)
    for other in copies(root):
        assert torch.equal(other(*inputs), root(*inputs))
        assert list(records(other)) == list(records(root))
        assert {id(p) for p in other.parameters()}.isdisjoint({id(p) for p in root.parameters()})
        back = te_convert.revert(other)
        assert layout(back) == before
        assert_same_state(back.state_dict(), state)
    again = convert(root, inputs)
    assert layout(again.model) == layout(root)
    assert_same_state(again.model.state_dict(), root.state_dict())
    check_in_place(model, inputs, before, state, **options)
    return result


def check_outputs_and_gradients(model: nn.Module, root: nn.Module, inputs: tuple[Any, ...], expected: Tensor) -> None:
    assert_close(root(*inputs), expected)
    runs = {name: record.executed for name, record in records(root).items()}
    assert all(count == 1 for count in runs.values()), runs
    assert not any(record.fallbacks for record in records(root).values())
    given = [[t.clone().requires_grad_() for t in inputs] for _ in range(2)]
    upstream = floats(*expected.shape, seed=9)
    for module, tensors in zip((model, root), given, strict=True):
        module.zero_grad()
        module(*tensors).backward(upstream)
    for own, other in zip(*given, strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert_close(other.grad, own.grad)
    assert_same_gradients(te_convert.revert(root), model)


def check_state(root: nn.Module, state: dict[str, Tensor], inputs: tuple[Any, ...], expected: Tensor) -> None:
    assert not any(key.endswith("_extra_state") for key in root.state_dict())
    assert any(key.endswith("_extra_state") for key in te_convert.te_state_dict(root))
    assert_same_state(te_convert.original_state_dict(root), state)
    twin = copy.deepcopy(root)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.requires_grad or parameter.dim() > 1:
                parameter.mul_(1.5)
    assert not torch.allclose(twin(*inputs), expected)
    for keys in (state, root.state_dict(), te_convert.te_state_dict(root)):
        other = copy.deepcopy(twin)
        assert not any(other.load_state_dict(keys))
        assert torch.equal(other(*inputs), root(*inputs))


def check_in_place(model: nn.Module, inputs: tuple[Any, ...], before: Any, state: dict[str, Tensor], **options: Any) -> None:
    """Train flags of every module, and back again with the same children."""
    model.zero_grad()
    children = {name: id(module) for name, module in model.named_modules()}
    root = convert(model, inputs, inplace=True, **options).model
    flags = {name: module.training for name, module in root.named_modules() if name in before}
    assert flags == {name: facts[-1] for name, facts in before.items()}
    root.train()
    assert all(module.training for module in root.modules())
    root.eval()
    assert not any(module.training for module in root.modules())
    root.train(before[""][-1])
    back = te_convert.revert(root)
    assert layout(back) == before
    assert {name: id(module) for name, module in back.named_modules()} == children
    assert_same_state(back.state_dict(), state)
    assert not any(SITE_ATTRIBUTE in module.__dict__ for module in back.modules())
