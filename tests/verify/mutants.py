"""Mistakes that a conversion could make, planted in one site of a real conversion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from te_convert.match.fusion import Fusion
from te_convert.plan.model import Decision
from te_convert.rewrite import apply as rewrite_apply
from te_convert.rewrite.fuse import fuse
from te_convert.rewrite.fused import get_fused

Mutate = Callable[[Any, "Planted"], bool]
LINEARS, NORMS = ("Linear", "Conv1D"), ("LayerNorm", "RMSNorm")


@dataclass
class Planted:
    """Where the mistake went: the first called site that takes it, the sites converted before, and a fusion's members."""

    fqn: str | None = None
    others: list[nn.Module] = field(default_factory=list)
    count: int = 0
    members: tuple[str, ...] = ()


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


def plant_in_fusion(monkeypatch: pytest.MonkeyPatch, mutate: Mutate, spec: str) -> Planted:
    """Let the rewrite make one mistake in the first fusion of a kind ("te.LayerNormLinear") that takes it."""
    planted = Planted()

    def wrong(root: nn.Module, fusion: Fusion, *args: Any) -> Any:
        result = fuse(root, fusion, *args)
        planted.count += 1
        if planted.fqn is None and fusion.spec.name == spec and mutate(result[0], planted):
            planted.fqn, planted.members = fusion.fqn, tuple(member.fqn for member in fusion.members)
        planted.others.append(result[0])
        return result

    monkeypatch.setattr(rewrite_apply, "fuse", wrong)
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


def te_forward(change: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> Mutate:
    """Another forward of a fused module: ``change(module, input of the norm, right output)``."""

    def mutate(site: Any, _: Planted) -> bool:
        right = type(site)

        def wrong(self: Any, x: torch.Tensor) -> torch.Tensor:
            return change(self, x, right.te_forward(self, x))

        site.__class__ = type(f"Wrong{right.__name__}", (right,), {"te_forward": wrong})
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


# ---- fusions -------------------------------------------------------------------------------------------------------------
def _last_weight(change: Callable[[torch.Tensor, Planted], torch.Tensor | None]) -> Mutate:
    """The change in the last weight matrix: fc2's of an MLP, the joint one of Linears."""

    def mutate(site: Any, planted: Planted) -> bool:
        return parameter("fc2_weight" if "fc2_weight" in site._parameters else "weight", change)(site, planted)

    return mutate


def _bias(change: Callable[[torch.Tensor], torch.Tensor]) -> Mutate:
    def mutate(site: Any, planted: Planted) -> bool:
        return parameter("fc1_bias" if "fc1_bias" in site._parameters else "bias", lambda b, _: change(b))(site, planted)

    return mutate


def _halves_swapped(weight: torch.Tensor, _: Planted) -> torch.Tensor:
    return weight.roll(weight.shape[0] // 2, 0)


def _parts_reordered(site: Any, _: Planted) -> bool:
    """The readers take one another's columns."""
    record = get_fused(site)
    if len(record.readers) < 2:
        return False
    record.__dict__["readers"] = record.readers[::-1]
    return True


def _stale(site: Any, planted: Planted) -> bool:
    """The module computes with copies: a change of the weights does not arrive."""
    copies = {name: p.detach().clone() for name, p in site._parameters.items() if p is not None}

    def wrong(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        held = dict(self._parameters)
        try:
            self._parameters.update(copies)
            stale: torch.Tensor = right.te_forward(self, x)
        finally:
            self._parameters.update(held)
        return stale

    right = type(site)
    return te_forward(wrong)(site, planted)


LINEAR, NORM_LINEAR, NORM_MLP = "te.Linear", "te.LayerNormLinear", "te.LayerNormMLP"
JOINED = ((NORM_LINEAR, "llama"), (LINEAR, "bert"), (NORM_LINEAR, "vit"))
WITH_NORM = ((NORM_LINEAR, "llama"), (NORM_MLP, "gpt2"), (NORM_LINEAR, "vit"), (NORM_MLP, "llama"))
ANY = (*WITH_NORM, (LINEAR, "bert"), (NORM_LINEAR, "gpt2"))
OF_LAYER_NORM = ((NORM_LINEAR, "gpt2"), (NORM_MLP, "gpt2"), (NORM_LINEAR, "vit"))
BIASED = ((NORM_LINEAR, "vit"), (NORM_MLP, "gpt2"), (LINEAR, "bert"), (NORM_LINEAR, "gpt2"))
EPS_SEEN = ((NORM_LINEAR, "llama"), (NORM_MLP, "gpt2"))
MLPS = ((NORM_MLP, "llama"), (NORM_MLP, "gpt2"))

FUSED_MUTANTS: dict[str, tuple[Mutate, tuple[tuple[str, str], ...]]] = {
    # name: (mistake, (TE module, model) pairs that can take it)
    "eps x 10": (attribute("eps", lambda eps: eps * 10), EPS_SEEN),
    "1 + weight": (attribute("zero_centered_gamma", lambda on: not on), WITH_NORM),
    "the other norm": (attribute("normalization", lambda name: "RMSNorm"), OF_LAYER_NORM),
    "another activation": (attribute("activation", lambda name: {"swiglu": "geglu"}.get(name, "silu")), MLPS),
    "gamma lost": (parameter("layer_norm_weight", lambda w, _: torch.ones_like(w)), WITH_NORM),
    "norm bias lost": (parameter("layer_norm_bias", lambda b, _: torch.zeros_like(b)), OF_LAYER_NORM),
    "bias dropped": (_bias(torch.zeros_like), BIASED),
    "bias doubled": (_bias(lambda b: b * 2), BIASED),
    "bias in another order": (_bias(lambda b: b.flip(0)), BIASED),
    "gate and up swapped": (parameter("fc1_weight", _halves_swapped), MLPS),
    "parts swapped": (parameter("weight", _halves_swapped), JOINED),
    "columns of another reader": (_parts_reordered, JOINED),
    "noise in one row": (_last_weight(one_row(_noise)), ANY),
    "one row zeroed": (_last_weight(one_row(torch.zeros_like)), ANY),
    "one element wrong": (_last_weight(lambda w, _: w.flatten().roll(1).view_as(w)), ANY),
    "stale copy of the weights": (_stale, ANY),
    "output x 1.001": (te_forward(lambda s, x, y: y * 1.001 if y.dtype is torch.float32 else y * 1.01), ANY),
    "dropout in eval": (te_forward(lambda s, x, y: functional.dropout(y, 0.1)), ANY),
    "dropout in train": (te_forward(lambda s, x, y: functional.dropout(y, 0.1, s.training)), ((NORM_LINEAR, "llama"),)),
    "output dtype": (te_forward(_other_dtype), JOINED),
    "rounded inside": (te_forward(_rounded), ANY),
    "returns half the batch": (te_forward(lambda s, x, y: y[:1]), ANY),
    "not a number": (te_forward(lambda s, x, y: y.masked_fill(torch.ones_like(y, dtype=torch.bool), float("nan"))), ANY),
    "raises": (te_forward(_raises), ANY),
    "sign": (te_forward(lambda s, x, y: -y), ANY),
}
