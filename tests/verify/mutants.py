"""Mistakes that a conversion could make, planted in one site of a real conversion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from te_convert.plan.model import Decision
from te_convert.rewrite import apply as rewrite_apply

Mutate = Callable[[Any, "Planted"], bool]
LINEARS, NORMS = ("Linear", "Conv1D"), ("LayerNorm", "RMSNorm")


@dataclass
class Planted:
    """Where the mistake went: the first called site that takes it, and the sites converted before."""

    fqn: str | None = None
    others: list[nn.Module] = field(default_factory=list)
    count: int = 0


def plant(monkeypatch: pytest.MonkeyPatch, mutate: Mutate, kinds: tuple[str, ...]) -> Planted:
    """Let the rewrite make one mistake."""
    planted, convert = Planted(), rewrite_apply._convert

    def wrong(module: nn.Module, decision: Decision, backend: str) -> nn.Module:
        converted = convert(module, decision, backend)
        planted.count += 1
        if planted.fqn is None and decision.kind in kinds and decision.calls and mutate(converted, planted):
            planted.fqn = decision.fqn
        planted.others.append(converted)
        return converted

    monkeypatch.setattr(rewrite_apply, "_convert", wrong)
    return planted


def parameter(name: str, change: Callable[[torch.Tensor, Planted], torch.Tensor | None]) -> Mutate:
    """Another Parameter in the place of the original's."""

    def mutate(site: Any, planted: Planted) -> bool:
        own = site._parameters.get(name)
        changed = None if own is None else change(own.detach().clone(), planted)
        if changed is None:
            return False
        site._parameters[name] = nn.Parameter(changed)
        return True

    return mutate


def forward(change: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> Mutate:
    """Another forward: ``change(site, input, right output)``."""

    def mutate(site: Any, _: Planted) -> bool:
        right = type(site)

        def wrong(self: Any, x: torch.Tensor) -> torch.Tensor:
            return change(self, x, right.forward(self, x))

        site.__class__ = type(f"Wrong{right.__name__}", (right,), {"forward": wrong})
        return True

    return mutate


def attribute(name: str, change: Callable[[Any], Any]) -> Mutate:
    """Another constructor fact."""

    def mutate(site: Any, _: Planted) -> bool:
        setattr(site, name, change(getattr(site, name)))
        return True

    return mutate


def one_row(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, Planted], torch.Tensor]:
    def apply(weight: torch.Tensor, _: Planted) -> torch.Tensor:
        weight[3] = change(weight[3])
        return weight

    return apply


def _noise(row: torch.Tensor) -> torch.Tensor:
    step = max(1e-3, torch.finfo(row.dtype).eps)  # bf16 cannot hold 1e-3
    return row * (1 + step * torch.tensor([1, -1], dtype=row.dtype).repeat(len(row) // 2))


def _square(weight: torch.Tensor, _: Planted) -> torch.Tensor | None:
    return weight.t().contiguous() if weight.shape[0] == weight.shape[1] else None


def _of_another(name: str) -> Callable[[torch.Tensor, Planted], torch.Tensor | None]:
    def apply(own: torch.Tensor, planted: Planted) -> torch.Tensor | None:
        for other in planted.others:
            tensor = other._parameters.get(name)
            if tensor is not None and tensor.shape == own.shape and not torch.equal(tensor, own):
                return tensor.detach().clone()
        return None

    return apply


def _rms(x: torch.Tensor, dim: int, eps: float) -> torch.Tensor:
    return x.float() * torch.rsqrt(x.float().pow(2).mean(dim, keepdim=True) + eps)


def _no_mean_subtraction(site: Any, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = (_rms(x, -1, site.eps) * site.weight.float() + site.bias.float()).to(x.dtype)
    return y


def _mean_subtraction(site: Any, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x.float(), site.normalized_shape, site.weight.float(), None, site.eps).to(x.dtype)


def _wrong_dim(site: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    wrong: torch.Tensor = (_rms(x, -2, site.eps) * site.weight.float()).to(y.dtype)
    return wrong


def _raises(site: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("planted")


def _other_dtype(site: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.double() if y.dtype is torch.float32 else y.float()


def _rounded(site: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.to(torch.float16 if y.dtype is torch.bfloat16 else torch.bfloat16).to(y.dtype) * (1 + torch.finfo(y.dtype).eps)


def _keep_copy(site: Any, planted: Planted) -> bool:
    copies = [p.detach().clone() for p in site._parameters.values() if p is not None]
    if len(copies) != 2:
        return False
    return forward(lambda self, x, y: functional.linear(x, *copies))(site, planted)


ALL = ("bert", "llama", "gpt2", "vit")
WITH_BIAS = ("bert", "gpt2", "vit")

MUTANTS: dict[str, tuple[Mutate, tuple[str, ...], tuple[str, ...]]] = {
    # name: (mistake, kinds of sites, models whose sites can take it)
    "eps x 10": (attribute("eps", lambda eps: eps * 10), NORMS, ("llama", "gpt2")),
    "1 + weight": (attribute("zero_centered_gamma", lambda on: not on), NORMS, ALL),
    "gamma lost": (parameter("weight", lambda w, _: torch.ones_like(w)), NORMS, ALL),
    "norm bias lost": (parameter("bias", lambda b, _: torch.zeros_like(b)), ("LayerNorm",), WITH_BIAS),
    "bias dropped": (parameter("bias", lambda b, _: torch.zeros_like(b)), LINEARS, WITH_BIAS),
    "bias doubled": (parameter("bias", lambda b, _: b * 2), LINEARS, WITH_BIAS),
    "bias of another site": (parameter("bias", _of_another("bias")), LINEARS, WITH_BIAS),
    "square weight transposed": (parameter("weight", _square), LINEARS, ALL),
    "weight of another site": (parameter("weight", _of_another("weight")), LINEARS, ("bert", "llama", "vit")),
    "noise in one row": (parameter("weight", one_row(_noise)), LINEARS, ALL),
    "one row zeroed": (parameter("weight", one_row(torch.zeros_like)), LINEARS, ALL),
    "one element wrong": (parameter("weight", lambda w, _: w.flatten().roll(1).view_as(w)), LINEARS, ALL),
    "stale copy of the weights": (_keep_copy, ("Linear",), ("bert", "vit")),
    "mean subtraction lost": (forward(_no_mean_subtraction), ("LayerNorm",), WITH_BIAS),
    "mean subtraction added": (forward(_mean_subtraction), ("RMSNorm",), ("llama",)),
    "statistics over the wrong dimension": (forward(_wrong_dim), NORMS, ALL),
    "output x 1.001": (forward(lambda s, x, y: y * 1.001 if y.dtype is torch.float32 else y * 1.01), LINEARS, ALL),
    "norm output x 1.001": (forward(lambda s, x, y: y * 1.001 if y.dtype is torch.float32 else y * 1.01), NORMS, ALL),
    "dropout in eval": (forward(lambda s, x, y: functional.dropout(y, 0.1)), LINEARS, ALL),
    "dropout in train": (forward(lambda s, x, y: functional.dropout(y, 0.1, s.training)), LINEARS, ("llama",)),
    "output dtype": (forward(_other_dtype), NORMS, ALL),
    "rounded inside": (forward(_rounded), LINEARS, ALL),
    "returns its input": (forward(lambda s, x, y: x), NORMS, ALL),
    "returns half the batch": (forward(lambda s, x, y: y[:1]), LINEARS, ALL),
    "not a number": (forward(lambda s, x, y: y.masked_fill(torch.ones_like(y, dtype=torch.bool), float("nan"))), NORMS, ALL),
    "raises": (forward(_raises), LINEARS, ALL),
    "sign": (forward(lambda s, x, y: -y), LINEARS, ALL),
}
