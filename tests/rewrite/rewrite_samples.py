"""Small models for the tests of the rewrite, and a short way to convert them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_convert
from te_convert.capture.run import capture
from te_convert.capture.scenario import normalize_inputs
from te_convert.config import ConvertConfig
from te_convert.match.leaves import LeafPolicy
from te_convert.plan.choose import make_plan
from te_convert.plan.model import Plan
from te_convert.rewrite.apply import Applied, apply_plan

WIDTH = 8
FUSE = pytest.mark.parametrize("fuse", [False, True], ids=["leaf", "fused"])


def ids(batch: int = 2, length: int = 6, vocab: int = 50) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(3))


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


class TiedLM(nn.Module):
    """Embedding tied to the head, one module under two names, a norm without bias, a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH, bias=False)
        self.blocks = nn.ModuleList([self.up, self.down])
        self.final = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight
        assert self.up.bias is not None
        self.up.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.relu(self.blocks[0](self.norm(hidden))))
        out: torch.Tensor = self.head(self.final(hidden))
        return out


class Attention(nn.Module):
    """Three Linears that read one tensor, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj))
        y: torch.Tensor = self.o_proj(torch.softmax(q @ k.mT, -1) @ v)
        return y


class Attends(nn.Module):
    """A norm and an attention behind it, whose three matrices become one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = Attention()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        y: torch.Tensor = hidden + self.attn(self.norm(hidden))
        return y


class ReadsNames(nn.Module):
    """Keeps a child in a plain list and in a closure, and reads attributes of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        setattr(self.norm, "variance_epsilon", 0.125)  # noqa: B010  # an attribute that nn.LayerNorm lacks
        self.proj = nn.Linear(WIDTH, WIDTH)
        proj = self.proj
        self.plain = [proj]
        self.closure: Callable[[torch.Tensor], torch.Tensor] = lambda x: proj(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale: Any = self.norm.variance_epsilon
        y: torch.Tensor = self.plain[0](self.norm(x)) + self.closure(x) * scale
        return y


def plan_of(model: nn.Module, inputs: Any, **options: Any) -> Plan:
    config = ConvertConfig(**options)
    scenarios = normalize_inputs(inputs)
    return make_plan(model, capture(model, scenarios, LeafPolicy()), config, ())


def rewritten(model: nn.Module, inputs: Any, **options: Any) -> Applied:
    """Apply the plan in place, without verification."""
    return apply_plan(model, plan_of(model, inputs, **options), "reference")


def converted(model: nn.Module, inputs: Any, **options: Any) -> Any:
    """Convert in place and expect parity."""
    result = te_convert.convert(model, inputs, inplace=True, backend="reference", **options)
    assert result.report.parity.passed, result.report
    return result.model


def perturb(model: nn.Module) -> nn.Module:
    """Move 1-D parameters away from their initial values, so that a lost one is seen."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that an undo has to bring back: classes, objects, values, flags, hooks, attributes."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[f"{name}:module"] = id(module)
        found[f"{name}:class"] = type(module)
        found[f"{name}:training"] = module.training
        found[f"{name}:order"] = (list(module._parameters), list(module._modules))
        found[f"{name}:dict"] = {
            key: id(value) for key, value in module.__dict__.items() if key not in ("training", "_is_full_backward_hook")
        }
        for key, parameter in module._parameters.items():
            if parameter is not None:
                grad = None if parameter.grad is None else (id(parameter.grad), parameter.grad.clone().tolist())
                values = parameter.detach().clone().tolist()
                found[f"{name}.{key}"] = (id(parameter), values, parameter.dtype, parameter.requires_grad, grad)
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            found[f"{name}:{kind}"] = dict(getattr(module, kind))
    return found


def contents(model: nn.Module) -> dict[str, Any]:
    """A snapshot without the identity of the dictionaries that hold parameters and children: a fusion taken out makes new ones."""
    found = snapshot(model)
    for name, _ in model.named_modules(remove_duplicate=False):
        for holder in ("_parameters", "_modules"):
            del found[f"{name}:dict"][holder]
    return found


def gpt2(width: int = 8, layers: int = 1) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=50, n_embd=width, n_layer=layers, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=1, resid_pdrop=0.0
    )
    model: nn.Module = GPT2LMHeadModel(config).eval()
    return perturb(model)
