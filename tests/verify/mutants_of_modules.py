"""Mistakes in norms, activations, experts and whole layers."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.reference import layer_norm_linear, layer_norm_mlp
from te_convert.replacements.experts import GroupedExperts
from tests.verify.mutant_tools import (
    BETA,
    GAMMA,
    Place,
    Way,
    add,
    set_to,
    slots,
    wrap,
)
from tests.verify.mutants import NORM_LINEAR, NORM_MLP


# ---- norms ---------------------------------------------------------------------------------------------------------------
def norm_of(change: Callable[[Any], bool]) -> Way:
    """A change in the first module of a site that normalises."""
    return lambda place: any(change(module) for module in place.site.modules() if hasattr(module, "zero_centered_gamma"))


Norm = Callable[[Tensor, Tensor, "Tensor | None", float, bool], Tensor]


def normalise(wrong: Norm) -> Way:
    """Another formula: ``wrong(x, gamma, bias, eps, subtracts the mean)``."""

    def way(place: Place) -> bool:
        site = place.site
        spec = site.__dict__[SITE_ATTRIBUTE].decision.spec
        if spec.name in ("te.LayerNorm", "te.RMSNorm"):
            mean = spec.name == "te.LayerNorm"

            def leaf(self: Any, right: Any, x: Tensor) -> Tensor:
                return wrong(x, self._gamma(x.dtype), getattr(self, "bias", None), self.eps, mean).to(right(x).dtype)

            wrap(site, leaf)
            return True
        module = {NORM_LINEAR: layer_norm_linear, NORM_MLP: layer_norm_mlp}.get(spec.name)
        if module is None:
            return False
        wrap(site, _with_norm(module, wrong))
        return True

    return way


def _with_norm(module: ModuleType, wrong: Norm) -> Callable[..., Any]:
    def normalize(
        x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, normalization: str, zero_centered_gamma: bool
    ) -> Tensor:
        return wrong(x, weight + 1 if zero_centered_gamma else weight, bias, eps, normalization == "LayerNorm")

    def forward(_: Any, right: Any, *args: Any) -> Any:
        with mock.patch.object(module, "normalize", normalize):
            return right(*args)

    return forward


def _normed(x: Tensor, gamma: Tensor, bias: Tensor | None, scale: Tensor, mean: bool) -> Tensor:
    centred = x - x.mean(-1, keepdim=True) if mean else x
    y = centred * scale * gamma
    return y if bias is None else y + bias


def _square_mean(x: Tensor, mean: bool) -> Tensor:
    return (x - x.mean(-1, keepdim=True) if mean else x).pow(2).mean(-1, keepdim=True)


def _eps_outside(x: Tensor, gamma: Tensor, bias: Tensor | None, eps: float, mean: bool) -> Tensor:
    return _normed(x, gamma, bias, 1 / (_square_mean(x, mean).sqrt() + eps), mean)


def _unbiased(x: Tensor, gamma: Tensor, bias: Tensor | None, eps: float, mean: bool) -> Tensor:
    size = x.shape[-1]
    return _normed(x, gamma, bias, torch.rsqrt(_square_mean(x, mean) * size / (size - 1) + eps), mean)


def _half_statistics(x: Tensor, gamma: Tensor, bias: Tensor | None, eps: float, mean: bool) -> Tensor:
    low = x.to(torch.bfloat16)
    return _normed(
        low, gamma.to(low.dtype), None if bias is None else bias.to(low.dtype), torch.rsqrt(_square_mean(low, mean) + eps), mean
    ).to(x.dtype)


def _bias_inside(x: Tensor, gamma: Tensor, bias: Tensor | None, eps: float, mean: bool) -> Tensor:
    y = _normed(x, torch.ones_like(gamma), bias, torch.rsqrt(_square_mean(x, mean) + eps), mean)
    return y * gamma


def _whole_statistics(x: Tensor, gamma: Tensor, bias: Tensor | None, eps: float, mean: bool) -> Tensor:
    return _normed(x, gamma, bias, torch.rsqrt(x.pow(2).mean() + eps), mean)


add("eps x 10", norm_of(set_to("eps", lambda eps: eps * 10)))
add("eps lost", norm_of(set_to("eps", lambda eps: 0.0)))
add("TE's default eps", norm_of(set_to("eps", lambda eps: 1e-5)))
add("1 + weight", norm_of(set_to("zero_centered_gamma", lambda on: not on)))
add("eps outside the root", normalise(_eps_outside))
add("variance with n - 1", normalise(_unbiased))
add("norm in bfloat16", normalise(_half_statistics))
add("norm bias before gamma", normalise(_bias_inside))
add("statistics over everything", normalise(_whole_statistics))


# ---- activations -----------------------------------------------------------------------------------------------------------
_OTHER = {"swiglu": "geglu", "geglu": "swiglu", "silu": "gelu", "gelu": "qgelu", "gelu_tanh": "gelu", "relu": "silu"}


def activation_of(change: Callable[[str], str | None]) -> Way:
    def way(place: Place) -> bool:
        for module in place.site.modules():
            name = getattr(module, "activation", None)
            new = change(name) if isinstance(name, str) else None
            if new is not None and (type(module).__name__.endswith("LayerNormMLP") or isinstance(module, GroupedExperts)):
                module.activation = new
                return True
        return False

    return way


def _erf_gelu(place: Place) -> bool:
    """erf where the original has tanh."""
    site = place.site
    mlps = [m for m in site.modules() if getattr(m, "activation", "") in ("gelu", "geglu") and hasattr(m, "fc1_weight")]
    if not mlps:
        return False

    def activate(name: str, x: Tensor, *_: Any) -> Tensor:
        if name == "gelu":
            return F.gelu(x)
        gate, up = x.chunk(2, -1)
        return F.gelu(gate) * up

    def forward(_: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(layer_norm_mlp, "activate", activate):
            return right(*args, **kwargs)

    wrap(site, forward)
    return True


add("another activation", activation_of(_OTHER.get))
add("erf for tanh GELU", _erf_gelu)
add("gate lost", activation_of({"swiglu": "relu", "geglu": "gelu"}.get))


# ---- experts ---------------------------------------------------------------------------------------------------------------
def experts(change: Callable[[Any], None]) -> Way:
    def way(place: Place) -> bool:
        if not isinstance(place.site, GroupedExperts):
            return False
        change(place.site)
        return True

    return way


def _permuted(layer: str) -> Callable[[Any], None]:
    def change(site: Any) -> None:
        held = getattr(site, layer)._parameters
        held["weight0"], held["weight1"] = held["weight1"], held["weight0"]

    return change


def routed(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Callable[[Any], None]:
    return lambda site: wrap(site, lambda self, right, *inputs: right(*change(*inputs)))


def _padded_rows(site: Any) -> None:
    """Rows of one group padded to eight, and read one row too late."""
    site.row_multiple = 8
    wrap(site.fc2, lambda self, right, *args: right(*args).roll(1, 0))


def _one_lost(site: Any) -> None:
    held = site.fc2._parameters
    held["weight2"] = nn.Parameter(torch.zeros_like(held["weight2"]))


add("experts of the first layer permuted", experts(_permuted("fc1")))
add("experts of the second layer permuted", experts(_permuted("fc2")))
add("one expert lost", experts(_one_lost))
add("padded rows of experts leaking", experts(_padded_rows))
add("router's weights ignored", experts(routed(lambda x, i, w: (x, i, torch.ones_like(w)))))
add("router's weights in the other order", experts(routed(lambda x, i, w: (x, i, w.flip(1)))))
add("second expert of a token lost", experts(routed(lambda x, i, w: (x, i[:, :1], w[:, :1]))))
add("experts of the next token", experts(routed(lambda x, i, w: (x, i.roll(1, 0), w))))


# ---- whole layers -----------------------------------------------------------------------------------------------------------
def layer(change: Callable[[Any], bool]) -> Way:
    return lambda place: hasattr(place.site, "layernorm_mlp") and change(place.site)


def _residual(change: Callable[[Any, Tensor, Any], Tensor]) -> Callable[[Any], bool]:
    def apply(site: Any) -> bool:
        own = site._added
        site._added = lambda branch, hidden: change(branch, hidden, own)
        return not site.parallel_attention_mlp

    return apply


def _attention_of(name: str, change: Callable[[Any], Any]) -> Way:
    def way(place: Place) -> bool:
        modules = [module for module in place.site.modules() if hasattr(module, "qkv_weight_interleaved")]
        return any(set_to(name, change)(module) for module in modules)

    return way


def _norms_exchanged(place: Place) -> bool:
    pairs = [(a, b) for a in slots(place.site, GAMMA, BETA) for b in slots(place.site, GAMMA, BETA) if a.role == b.role]
    for a, b in pairs:
        if a.holder is not b.holder and not torch.equal(a.parameter, b.parameter):
            one, other = a.parameter.detach().clone(), b.parameter.detach().clone()
            a.put(other)
            b.put(one)
            return True
    return False


add("residual lost", layer(_residual(lambda branch, hidden, own: own(branch, torch.zeros_like(hidden)))))
add("residual doubled", layer(_residual(lambda branch, hidden, own: own(branch, hidden) + hidden)))
add("residual before the norm", layer(lambda site: site.output_layernorm and _residual(lambda b, h, own: own(b[:2], h))(site)))
add("final norm lost", layer(set_to("output_layernorm", lambda on: False)))
add("norms of one layer exchanged", _norms_exchanged)
add("mask type of the layer lost", _attention_of("attn_mask_type", lambda kind: "no_mask"))
add("rows read head by head", _attention_of("qkv_weight_interleaved", lambda on: not on))
