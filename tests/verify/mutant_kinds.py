"""The catalogue of the mutation suite: mistakes that a conversion could make, each planted into a converted site of a real model.

A kind is a name and the ways in which its mistake can be made.  A way takes a :class:`Place` and says whether it made the mistake
there; where it does not apply, it changes nothing.  The mistakes of tests/verify/mutants.py are part of the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_convert.facts.sharing import find_parents
from te_convert.plan.model import SITE_ATTRIBUTE
from te_convert.reference import layer_norm_linear, layer_norm_mlp
from te_convert.reference.attention import DotProductAttention
from te_convert.replacements.experts import GroupedExperts
from te_convert.rewrite.apply import Applied
from te_convert.rewrite.fused import fused_record
from te_convert.rewrite.loans import LOANS, Loan, holder_of
from te_convert.weights.ops import Concat, Fill, Move, Rows, SwapHalves, Take, WeightMap, WeightOp
from tests.verify.mutants import FUSED_MUTANTS, LINEAR, MUTANTS, NORM_LINEAR, NORM_MLP, Planted


@dataclass
class Place:
    """A converted site in which to make a mistake.

    Attributes:
        touched: names of all sites that are wrong now; the gate must put one of them back or fail.
    """

    applied: Applied
    fqn: str
    touched: list[str] = field(default_factory=list)

    @property
    def site(self) -> Any:
        return self.applied.sites[self.fqn]

    @property
    def others(self) -> dict[str, nn.Module]:
        return {fqn: site for fqn, site in self.applied.sites.items() if fqn != self.fqn}


Way = Callable[[Place], bool]


@dataclass(frozen=True)
class Kind:
    name: str
    ways: tuple[Way, ...]

    def plant(self, place: Place) -> bool:
        """Make the mistake, in the first way that applies; False when none does."""
        if any(way(place) for way in self.ways):
            place.touched.append(place.fqn)
            return True
        return False


KINDS: dict[str, Kind] = {}


def add(name: str, *ways: Way) -> None:
    """One more way to make a mistake."""
    KINDS[name] = Kind(name, (*(KINDS[name].ways if name in KINDS else ()), *ways))


# ---- the mistakes of mutants.py, in sites that are converted already -----------------------------------------------------------
def _known(mutate: Callable[[Any, Planted], bool], fits: Callable[[Any], bool]) -> Way:
    def way(place: Place) -> bool:
        record = place.site.__dict__[SITE_ATTRIBUTE]
        same = [other for other in place.others.values() if (fused_record(other) is None) == (fused_record(place.site) is None)]
        try:
            return fits(record) and mutate(place.site, Planted(others=same))
        except (AttributeError, IndexError):  # a constructor fact that this module does not have, a weight with too few rows
            return False

    return way


def _leaf(kinds: tuple[str, ...]) -> Callable[[Any], bool]:
    return lambda record: getattr(record.decision, "kind", "") in kinds


def _fusion(record: Any) -> bool:
    return not hasattr(record.decision, "kind") and record.decision.spec.name in (LINEAR, NORM_LINEAR, NORM_MLP)


for _name, (_mutate, _kinds, _) in MUTANTS.items():
    add(_name, _known(_mutate, _leaf(_kinds)))
for _name, (_mutate, _pairs) in FUSED_MUTANTS.items():
    add(_name, _known(_mutate, _fusion))


# ---- tools -----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Slot:
    """A parameter of a TE module, where it is kept, and how it is made of the original's."""

    holder: nn.Module
    leaf: str
    op: WeightOp

    @property
    def parameter(self) -> nn.Parameter:
        found = self.holder._parameters[self.leaf]
        assert found is not None
        return found

    @property
    def role(self) -> str:
        if self.parameter.dim() > 1:
            return "matrix"
        norm = self.leaf.startswith("layer_norm_") or hasattr(self.holder, "normalized_shape")
        return ("norm " if norm else "") + ("bias" if "bias" in self.leaf else "weight")

    def put(self, value: Tensor) -> None:
        """Another Parameter, so that the original's own stays right."""
        self.holder._parameters[self.leaf] = nn.Parameter(value.contiguous(), requires_grad=self.parameter.requires_grad)


def slots(site: Any, *roles: str) -> list[Slot]:
    weights = site.__dict__[SITE_ATTRIBUTE].decision.weights
    found = [Slot(*holder_of(site, op.dest), op) for op in weights.ops if not isinstance(op, Fill)]
    return [slot for slot in found if not roles or slot.role in roles]


Change = Callable[[Tensor, Slot, Place], "Tensor | None"]


def tensor(change: Change, *roles: str, last: bool = False) -> Way:
    """Another value of the first (or last) parameter of a role that takes the change."""

    def way(place: Place) -> bool:
        candidates = slots(place.site, *roles)
        for slot in reversed(candidates) if last else candidates:
            own = slot.parameter.detach().clone()
            changed = change(own.clone(), slot, place)
            if changed is not None and not torch.equal(changed, own):
                slot.put(changed)
                return True
        return False

    return way


def around(change: Callable[..., Any], fits: Callable[[Any], bool] = lambda site: True) -> Way:
    """Another forward: ``change(site, right, *args, **kwargs)`` with the right forward."""

    def way(place: Place) -> bool:
        site = place.site
        if not fits(site):
            return False
        wrap(site, change)
        return True

    return way


def wrap(module: Any, change: Callable[..., Any]) -> None:
    right = type(module)
    name = "te_forward" if hasattr(right, "te_forward") else "forward"
    own = getattr(right, name)

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(self, lambda *a, **k: own(self, *a, **k), *args, **kwargs)

    module.__class__ = type(f"Wrong{right.__name__}", (right,), {name: wrong})


def output(change: Callable[[Tensor], Tensor]) -> Way:
    """Another output."""
    return around(lambda site, right, *args, **kwargs: change(right(*args, **kwargs)))


def with_parameters(site: Any, change: Callable[[Slot, nn.Parameter], Tensor]) -> Callable[..., Any]:
    """A forward that computes with other tensors in place of the parameters."""
    held = [(slot, slot.parameter) for slot in slots(site)]

    def wrong(_: Any, right: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        current = [(slot, slot.parameter) for slot, _ in held]
        try:
            for slot, parameter in current:
                slot.holder._parameters[slot.leaf] = change(slot, parameter)  # type: ignore[assignment]
            return right(*args, **kwargs)
        finally:
            for slot, parameter in current:
                slot.holder._parameters[slot.leaf] = parameter

    return wrong


def stale(*roles: str, straight: bool = False, only: Callable[[Slot], bool] = lambda slot: True) -> Way:
    """The forward computes with copies; ``straight``: their gradients arrive at the parameters all the same."""

    def way(place: Place) -> bool:
        chosen = [slot for slot in slots(place.site, *roles) if only(slot)]
        if not chosen:
            return False
        copies = {(id(slot.holder), slot.leaf): slot.parameter.detach().clone() for slot in chosen}

        def old(slot: Slot, parameter: nn.Parameter) -> Tensor:
            copy = copies.get((id(slot.holder), slot.leaf))
            if copy is None:
                return parameter
            copy = copy.to(parameter.dtype)
            return copy + (parameter - parameter.detach()) if straight else copy

        wrap(place.site, with_parameters(place.site, old))
        return True

    return way


# ---- parameters ------------------------------------------------------------------------------------------------------------
def _of_another(own: Tensor, slot: Slot, place: Place) -> Tensor | None:
    for other in place.others.values():
        for candidate in slots(other, slot.role):
            value = candidate.parameter.detach()
            if value.shape == own.shape and not torch.equal(value, own):
                return value.clone()
    return None


def _changed_row(own: Tensor, slot: Slot, place: Place) -> Tensor:
    own[len(own) // 2] *= 1.01
    return own


def _zeroed_column(own: Tensor, slot: Slot, place: Place) -> Tensor:
    own[:, own.shape[1] // 2] = 0
    return own


def _one_value(own: Tensor, slot: Slot, place: Place) -> Tensor:
    own.view(-1)[own.numel() // 2] += own.abs().mean() / 10
    return own


def _square(own: Tensor, slot: Slot, place: Place) -> Tensor | None:
    return own.t().contiguous() if own.shape[0] == own.shape[1] else None


MATRIX, BIAS, GAMMA, BETA = "matrix", "bias", "norm weight", "norm bias"
add("bias dropped", tensor(lambda t, s, p: torch.zeros_like(t), BIAS))
add("bias doubled", tensor(lambda t, s, p: t * 2, BIAS))
add("bias of another site", tensor(_of_another, BIAS))
add("bias in another order", tensor(lambda t, s, p: t.flip(0), BIAS))
add("bias of the last Linear dropped", tensor(lambda t, s, p: torch.zeros_like(t), BIAS, last=True))
add("gamma lost", tensor(lambda t, s, p: torch.ones_like(t), GAMMA))
add("gamma of another norm", tensor(_of_another, GAMMA))
add("norm bias lost", tensor(lambda t, s, p: torch.zeros_like(t), BETA))
add("norm bias doubled", tensor(lambda t, s, p: t * 2, BETA))
add("square weight transposed", tensor(_square, MATRIX))
add("weight of another site", tensor(_of_another, MATRIX))
add("one row zeroed", tensor(lambda t, s, p: _zeroed_column(t.t(), s, p).t(), MATRIX, last=True))
add("one column zeroed", tensor(_zeroed_column, MATRIX))
add("one row x 1.01", tensor(_changed_row, MATRIX))
add("one weight wrong", tensor(_one_value, MATRIX, last=True))
add("one element wrong", tensor(lambda t, s, p: t.flatten().roll(1).view_as(t), MATRIX, last=True))
add("weight rounded to bfloat16", tensor(lambda t, s, p: t.bfloat16().to(t.dtype) * (1 + torch.finfo(t.dtype).eps), MATRIX))
add("weight rounded to float8", tensor(lambda t, s, p: t.to(torch.float8_e4m3fn).to(t.dtype), MATRIX, last=True))
add("weight x 1.001", tensor(lambda t, s, p: t * (1.001 if t.dtype is torch.float32 else 1.02), MATRIX))
add("weight negated", tensor(lambda t, s, p: -t, MATRIX, last=True))
add("rows reversed", tensor(lambda t, s, p: t.flip(0), MATRIX))
add("columns reversed", tensor(lambda t, s, p: t.flip(1), MATRIX, last=True))


# ---- joined weights ----------------------------------------------------------------------------------------------------------
def exchanged(first: int, second: int) -> Change:
    """Two blocks of rows of the same size in one another's place."""

    def change(own: Tensor, slot: Slot, place: Place) -> Tensor | None:
        op = slot.op
        if not isinstance(op, Concat) or len(op.rows) <= max(first, second) or op.rows[first] != op.rows[second]:
            return None
        blocks = list(own.split(op.rows))
        blocks[first], blocks[second] = blocks[second], blocks[first]
        return torch.cat(blocks)

    return change


def _packed(first: int, second: int) -> Change:
    """The same where the original packs [q; k; v] itself."""

    def change(own: Tensor, slot: Slot, place: Place) -> Tensor | None:
        if isinstance(slot.op, Concat) or own.shape[0] != 3 * own.shape[-1] or own.dim() != 2:
            return None
        blocks = list(own.chunk(3))
        blocks[first], blocks[second] = blocks[second], blocks[first]
        return torch.cat(blocks)

    return change


def _head_size(place: Place) -> int:
    for site in place.applied.sites.values():
        for module in site.modules():
            if isinstance(module, DotProductAttention):
                return int(module.head_dims[0])
    return 0


def in_block(index: int, change: Callable[[Tensor, int], Tensor | None]) -> Change:
    """A change in one block of a joined [q; k; v] (from the start: 0, from the end: −1), given the size of a head."""

    def apply(own: Tensor, slot: Slot, place: Place) -> Tensor | None:
        size = _head_size(place)
        if isinstance(slot.op, Concat):
            rows = slot.op.rows if len(slot.op.rows) > 1 else ()
        else:
            rows = (len(own) // 3,) * 3 if len(own) == 3 * own.shape[-1] else ()
        if len(rows) < 3 or not size or any(count % size for count in rows):
            return None
        blocks = list(own.split(rows))
        changed = change(blocks[index], size)
        if changed is None:
            return None
        blocks[index] = changed
        return torch.cat(blocks)

    return apply


def _heads(block: Tensor, size: int) -> Tensor:
    return block.view(-1, size, *block.shape[1:])


def _heads_permuted(block: Tensor, size: int) -> Tensor | None:
    return block.roll(size, 0) if len(block) > size else None


def _rotary_halves(block: Tensor, size: int) -> Tensor:
    return _heads(block, size).roll(size // 2, 1).flatten(0, 1)


def _rotary_interleaved(block: Tensor, size: int) -> Tensor:
    return block.view(-1, 2, size // 2, *block.shape[1:]).transpose(1, 2).flatten(0, 2)


def _interleaved(own: Tensor, slot: Slot, place: Place) -> Tensor | None:
    """[q; k; v] head by head: the order that te.MultiheadAttention has with qkv_weight_interleaved."""
    size = _head_size(place)
    equal = isinstance(slot.op, Concat) and len(slot.op.rows) == 3 and len(set(slot.op.rows)) == 1
    if not size or not equal or len(own) % (3 * size):
        return None
    return own.view(3, -1, size, *own.shape[1:]).transpose(0, 1).flatten(0, 2)


def _half_swapped(own: Tensor, slot: Slot, place: Place) -> Tensor | None:
    """[gate; up] → [up; gate]."""
    module = slot.holder
    gated = str(getattr(module, "activation", "")).endswith("glu") and slot.leaf.startswith("fc1")
    if isinstance(place.site, GroupedExperts):
        gated = place.site.gated and slot.op.dest.startswith("fc1")
    return own.roll(len(own) // 2, 0) if gated else None


add("queries and keys swapped", tensor(exchanged(0, 1), MATRIX), tensor(_packed(0, 1), MATRIX))
add("keys and values swapped", tensor(exchanged(1, 2), MATRIX), tensor(_packed(1, 2), MATRIX))
add("queries and values swapped", tensor(exchanged(0, 2), MATRIX), tensor(_packed(0, 2), MATRIX))
add("biases of keys and values swapped", tensor(exchanged(1, 2), BIAS))
add("heads of the queries permuted", tensor(in_block(0, _heads_permuted), MATRIX))
add("KV groups of the keys permuted", tensor(in_block(1, _heads_permuted), MATRIX))
add("KV groups of the values permuted", tensor(in_block(-1, _heads_permuted), MATRIX))
add("rotary halves of the queries exchanged", tensor(in_block(0, _rotary_halves), MATRIX))
add("rotary halves of the keys interleaved", tensor(in_block(1, _rotary_interleaved), MATRIX))
add("q, k, v interleaved by head", tensor(_interleaved, MATRIX))
add("gate and up swapped", tensor(_half_swapped, MATRIX))
add("two blocks of a joined weight swapped", tensor(exchanged(0, 1), MATRIX))


# ---- norms ---------------------------------------------------------------------------------------------------------------
def norm_of(change: Callable[[Any], bool]) -> Way:
    """A change in the first module of a site that normalises."""
    return lambda place: any(change(module) for module in place.site.modules() if hasattr(module, "zero_centered_gamma"))


def _set(name: str, change: Callable[[Any], Any]) -> Callable[[Any], bool]:
    def apply(module: Any) -> bool:
        if not hasattr(module, name) or getattr(module, name) == change(getattr(module, name)):
            return False
        setattr(module, name, change(getattr(module, name)))
        return True

    return apply


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


add("eps x 10", norm_of(_set("eps", lambda eps: eps * 10)))
add("eps lost", norm_of(_set("eps", lambda eps: 0.0)))
add("TE's default eps", norm_of(_set("eps", lambda eps: 1e-5)))
add("1 + weight", norm_of(_set("zero_centered_gamma", lambda on: not on)))
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


# ---- attention -------------------------------------------------------------------------------------------------------------
Attend = Callable[..., Any]


def attention(change: Attend, fits: Callable[[Any], bool] = lambda core: True) -> Way:
    """Another attention: ``change(module, right, query, key, value, **options)``, tensors [·, ·, heads, d]."""

    def way(place: Place) -> bool:
        for core in place.site.modules():
            if isinstance(core, DotProductAttention) and fits(core):
                wrap(core, _attend(change))
                return True
        return False

    return way


def _attend(change: Attend) -> Callable[..., Any]:
    def forward(core: Any, right: Any, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **options: Any) -> Any:
        if mask and mask[0] is not None:
            options["attention_mask"] = mask[0]
        return change(core, right, query, key, value, **options)

    return forward


def core_attribute(name: str, change: Callable[[Any], Any]) -> Way:
    def way(place: Place) -> bool:
        return any(_set(name, change)(core) for core in place.site.modules() if isinstance(core, DotProductAttention))

    return way


def _length(core: Any, x: Tensor) -> int:
    return x.shape[1 if core.qkv_format == "bshd" else 0]


def with_options(change: Callable[[Any, dict[str, Any], Tensor, Tensor], dict[str, Any]]) -> Attend:
    def attend(core: Any, right: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        return right(query, key, value, **change(core, options, query, key))

    return attend


def with_tensors(change: Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Attend:
    def attend(core: Any, right: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        return right(*change(core, query, key, value), **options)

    return attend


def _is_causal(options: dict[str, Any]) -> bool:
    return "causal" in (options.get("attn_mask_type") or "")


def _no_mask(core: Any, options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
    return {**options, "attn_mask_type": "no_mask", "window_size": (-1, -1)} if _is_causal(options) else options


def _causal_added(core: Any, options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
    plain = options.get("attn_mask_type") == "no_mask"
    return {**options, "attn_mask_type": "causal", "window_size": (-1, 0)} if plain else options


def _diagonal(offset: int) -> Callable[[Any, dict[str, Any], Tensor, Tensor], dict[str, Any]]:
    def change(core: Any, options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
        window = options.get("window_size") or (-1, 0)
        if not _is_causal(options) or window[0] >= 0:
            return options
        queries, keys = _length(core, q), _length(core, k)
        masked = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries + offset)
        return {**options, "attn_mask_type": "arbitrary", "attention_mask": masked[None, None], "window_size": (-1, -1)}

    return change


def _other_corner(core: Any, options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
    kinds = {"causal": "causal_bottom_right", "causal_bottom_right": "causal"}
    return {**options, "attn_mask_type": kinds.get(options.get("attn_mask_type", ""), options.get("attn_mask_type"))}


def _window(change: Callable[[int], int]) -> Callable[[Any, dict[str, Any], Tensor, Tensor], dict[str, Any]]:
    def apply(core: Any, options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
        left, right = options.get("window_size") or (-1, -1)
        return {**options, "window_size": (change(left), right)} if left >= 0 else options

    return apply


def _polarity(core: Any, options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
    """Padding where there is none and the other way round (kept on the right where a padding type demands it)."""
    mask = options.get("attention_mask")
    if isinstance(mask, tuple):
        inverted = mask[1].logical_not().flip(-1)
        inverted[..., 0] = False
        return {**options, "attention_mask": (mask[0], inverted)}
    return options if mask is None else {**options, "attention_mask": mask.logical_not()}


def _padding_lost(core: Any, options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
    if not isinstance(options.get("attention_mask"), tuple):
        return options
    return {**options, "attn_mask_type": "no_mask", "attention_mask": None}


def _bias(change: Callable[[Tensor], Tensor]) -> Callable[[Any, dict[str, Any], Tensor, Tensor], dict[str, Any]]:
    def apply(core: Any, options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
        bias = options.get("core_attention_bias")
        return options if bias is None else {**options, "core_attention_bias": change(bias)}

    return apply


def _grouped(core: Any) -> bool:
    return bool(1 < core.num_gqa_groups < core.num_attention_heads)


def _groups_interleaved(core: Any, right: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Head i reads group i % groups instead of i // (heads / groups)."""
    heads, groups = core.num_attention_heads, core.num_gqa_groups
    order = torch.arange(heads).view(-1, groups).t().flatten()
    out = right(query[..., order, :], key, value, **options)
    return out.unflatten(-1, (heads, -1))[..., order.argsort(), :].flatten(-2)


def _dropped(core: Any, right: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    kept = core.attention_dropout, core.training
    core.attention_dropout, core.training = 0.1, True
    try:
        return right(query, key, value, **options)
    finally:
        core.attention_dropout, core.training = kept


def _across_the_batch(core: Any, right: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    if query.shape[:2] != key.shape[:2]:
        return right(query, key, value, **options)
    turned = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return right(*turned, attn_mask_type="no_mask", window_size=(-1, -1)).transpose(0, 1)


def _layout_swapped(core: Any, right: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    out = right(query, key, value, **options)
    return out.unflatten(-1, (core.num_attention_heads, -1)).transpose(1, 2).reshape(out.shape)


def _heads_flipped(core: Any, right: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    out = right(query, key, value, **options)
    return out.unflatten(-1, (core.num_attention_heads, -1)).flip(-2).flatten(-2)


def _swapped_if_alike(core: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (k, q, v) if q.shape == k.shape else (q, k, v)


def _rounded_scores(core: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.to(torch.bfloat16).to(q.dtype), k.to(torch.bfloat16).to(k.dtype), v


add("scale lost", core_attribute("softmax_scale", lambda scale: 1.0))
add("scale applied twice", core_attribute("softmax_scale", lambda scale: scale * scale))
add("softcap lost", attention(with_options(lambda core, options, q, k: {**options, "softcap": 0.0}), lambda core: core.softcap > 0))
add("causality lost", attention(with_options(_no_mask)))
add("causal where nothing is masked", attention(with_options(_causal_added)))
add("causal off by one: sees the next", attention(with_options(_diagonal(1))))
add("causal off by one: does not see itself", attention(with_options(_diagonal(-1))))
add("causal from the other corner", attention(with_options(_other_corner)))
add("window off by one", attention(with_options(_window(lambda left: left + 1))))
add("window lost", attention(with_options(_window(lambda left: -1))))
add("padding mask inverted", attention(with_options(_polarity)))
add("padding mask lost", attention(with_options(_padding_lost)))
add("position bias lost", attention(with_options(_bias(torch.zeros_like))))
add("position bias of other heads", attention(with_options(_bias(lambda bias: bias.flip(1)))))
add("position bias shifted", attention(with_options(_bias(lambda bias: bias.roll(1, -1)))))
add(
    "KV groups permuted",
    attention(with_tensors(lambda core, q, k, v: (q, k.flip(2), v.flip(2))), lambda core: core.num_gqa_groups > 1),
)
add("KV groups interleaved", attention(_groups_interleaved, _grouped))
add("heads of the result permuted", attention(_heads_flipped, lambda core: core.num_attention_heads > 1))
add("heads and positions of the result swapped", attention(_layout_swapped))
add("attention across the batch", attention(_across_the_batch))
add("dropout of attention in eval", attention(_dropped))
add("queries and keys of attention swapped", attention(with_tensors(_swapped_if_alike)))
add("rotary halves exchanged", attention(with_tensors(lambda core, q, k, v: (q.roll(q.shape[-1] // 2, -1), k, v))))
add("scores rounded", attention(with_tensors(_rounded_scores)))


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
        return any(_set(name, change)(module) for module in modules)

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
add("final norm lost", layer(_set("output_layernorm", lambda on: False)))
add("norms of one layer exchanged", _norms_exchanged)
add("mask type of the layer lost", _attention_of("attn_mask_type", lambda kind: "no_mask"))
add("rows read head by head", _attention_of("qkv_weight_interleaved", lambda on: not on))


# ---- outputs and inputs of any site ----------------------------------------------------------------------------------------
def _masked(y: Tensor, index: int) -> Tensor:
    if y.dim() < 2 or not y.shape[-2]:
        return y
    keep = torch.ones(y.shape[-2], 1, dtype=y.dtype)
    keep[index] = 0
    return y * keep


def _first_result(site: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
    """A cache that is never emptied."""
    y = right(*args, **kwargs)
    kept = site.__dict__.setdefault("_first", {})
    return kept.setdefault((y.shape, y.dtype), y.detach()) + (y - y.detach())


def _changes_its_input(site: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
    y = right(*args, **kwargs)
    args[0].data.mul_(1.001)
    return y


def _one_token(site: Any, right: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    y = right(x, *args, **kwargs)
    length = x.shape[1] if x.dim() == 4 else x.shape[-2] if x.dim() > 2 else 0
    return y * 1.01 if length == 1 else y


def _larger_batch(site: Any, right: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Rows beyond the batch of the example are not computed."""
    y = right(x, *args, **kwargs)
    return torch.cat((y[:2], torch.zeros_like(y[2:]))) if y.dim() > 2 else y


def _half_rounded(y: Tensor) -> Tensor:
    return y.to(torch.bfloat16).to(y.dtype) * (1 + torch.finfo(y.dtype).eps)


add("output x 1.001", output(lambda y: y * 1.001))
add("sign", output(lambda y: -y))
add("dropout in eval", output(lambda y: F.dropout(y, 0.1)))
add("dropout in train", around(lambda site, right, *a, **k: F.dropout(right(*a, **k), 0.1, site.training)))
add("output dtype", output(lambda y: y.double()))
add("rounded inside", output(_half_rounded))
add("not a number", output(lambda y: y * float("nan")))
add("raises", output(lambda y: y.view(y.numel() + 1)))
add("first position lost", output(lambda y: _masked(y, 0)))
add("last position lost", output(lambda y: _masked(y, -1)))
add("positions shifted", output(lambda y: y.roll(1, -2)))
add("samples exchanged", output(lambda y: y.roll(1, 0)))
add("samples mixed", output(lambda y: y + 1e-3 * y.mean(0, keepdim=True)))
add("dimensions of size one squeezed", output(lambda y: y.squeeze()))
add("an earlier result again", around(_first_result))
add("input changed in place", around(_changes_its_input))
add("wrong for a single token", around(_one_token))
add("samples beyond the second lost", around(_larger_batch))
add("output clamped", output(lambda y: y.clamp(-1, 1)))
add("output clamped from below", output(lambda y: y.clamp(min=-0.5)))


# ---- gradients -------------------------------------------------------------------------------------------------------------
class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].to(torch.bfloat16).to(gradients[0].dtype)


def _detached(site: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
    return right(*(a.detach() if isinstance(a, Tensor) else a for a in args), **kwargs)


def _first_sample_only(site: Any, right: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return right(torch.cat((x[:1], x[1:].detach())), *args, **kwargs)


def weights_detached(*roles: str) -> Way:
    def way(place: Place) -> bool:
        if not slots(place.site, *roles):
            return False
        wrap(place.site, with_parameters(place.site, lambda slot, p: p.detach() if slot.role in roles else p))
        return True

    return way


def frozen(role: str) -> Way:
    def way(place: Place) -> bool:
        found = [slot for slot in slots(place.site, role) if slot.parameter.requires_grad]
        for slot in found[:1]:
            slot.holder._parameters[slot.leaf] = nn.Parameter(slot.parameter.detach(), requires_grad=False)
        return bool(found)

    return way


def _constant_trained(place: Place) -> bool:
    """A constant that the conversion filled in becomes a parameter to train."""
    weights = place.site.__dict__[SITE_ATTRIBUTE].decision.weights
    for op in weights.ops:
        if isinstance(op, Fill):
            holder, name = holder_of(place.site, op.dest)
            constant = holder._parameters[name]
            assert constant is not None
            constant.requires_grad_(True)
            return True
    return False


add("gradient of the input lost", around(_detached))
add("gradient of all samples but one lost", around(_first_sample_only))
add("gradient of the weights lost", weights_detached(MATRIX))
add("gradient of the biases lost", weights_detached(BIAS))
add("gradient of the norm lost", weights_detached(GAMMA))
add("gradient doubled", output(lambda y: 2 * y - y.detach()))
add("gradient negated", output(lambda y: 2 * y.detach() - y))
add("gradient rounded", output(lambda y: _Rounded.apply(y)))
add("weight frozen", frozen(MATRIX))
add("bias frozen", frozen(BIAS))
add("norm weight frozen", frozen(GAMMA))
add("filled constant trained", _constant_trained)


# ---- weights that do not follow --------------------------------------------------------------------------------------------
add("stale copy of the weights", stale())
add("stale weight, right gradient", stale(MATRIX, straight=True))
add("stale bias, right gradient", stale(BIAS, straight=True))
add("stale norm weight, right gradient", stale(GAMMA, straight=True))
add(
    "stale copy of a transposed weight",
    stale(MATRIX, straight=True, only=lambda slot: "Transpose" in type(slot.op).__name__ or getattr(slot.op, "transposed", False)),
)


class _OldLoan(Loan):
    """A member of a fusion that shows an old copy of its weight."""

    def __init__(self, loan: Loan) -> None:
        self.__dict__.update(loan.__dict__)
        self.copy = loan.read().detach().clone()

    def read(self) -> Tensor:
        return self.copy if self.record.own is None else super().read()


def loans(place: Place) -> Iterator[tuple[dict[str, Any], str, Loan]]:
    """(where it is kept, its name there, loan) of a site's members."""
    record = fused_record(place.site)
    for module in (*(member for _, member in record.members), *place.site.modules()) if record is not None else ():
        held = module.__dict__.get(LOANS, {})
        for name, loan in held.items():
            if loan.record is record:
                yield held, name, loan


def _old_loans(place: Place) -> bool:
    found = list(loans(place))
    for held, name, loan in found:
        held[name] = _OldLoan(loan)
    return bool(found)


add("member shows an old weight", _old_loans)


# ---- weight maps -----------------------------------------------------------------------------------------------------------
def mapped(change: Callable[[tuple[WeightOp, ...]], tuple[WeightOp, ...] | None]) -> Way:
    """Another weight map than the one by which the weights were made."""

    def way(place: Place) -> bool:
        record = place.site.__dict__[SITE_ATTRIBUTE]
        changed = change(record.decision.weights.ops)
        if changed is None:
            return False
        record.decision = replace(record.decision, weights=WeightMap(changed))
        for held, name, loan in list(loans(place)):
            held[name] = Loan(loan.record, loan.source)
        return True

    return way


def _names_exchanged(ops: tuple[WeightOp, ...]) -> tuple[WeightOp, ...] | None:
    for index, op in enumerate(ops):
        if isinstance(op, Concat) and len(op.rows) > 1 and op.rows[-1] == op.rows[-2]:
            wrong = replace(op, names=(*op.names[:-2], op.names[-1], op.names[-2]))
            return (*ops[:index], wrong, *ops[index + 1 :])
    return None


def _entries_exchanged(ops: tuple[WeightOp, ...]) -> tuple[WeightOp, ...] | None:
    stacked = [index for index, op in enumerate(ops) if isinstance(op, Take)]
    if len(stacked) < 2:
        return None
    changed, (a, b) = list(ops), stacked[:2]
    changed[a], changed[b] = replace(ops[a], dest=ops[b].dest), replace(ops[b], dest=ops[a].dest)
    return tuple(changed)


def _rows_exchanged(ops: tuple[WeightOp, ...]) -> tuple[WeightOp, ...] | None:
    """[q; k; v] put together again as [k; v; q]."""
    for (a, one), (b, other) in pairwise((index, op) for index, op in enumerate(ops) if isinstance(op, Rows)):
        if one.source == other.source:
            changed = list(ops)
            changed[a], changed[b] = other, one
            return tuple(changed)
    return None


def _not_swapped_back(ops: tuple[WeightOp, ...]) -> tuple[WeightOp, ...] | None:
    for index, op in enumerate(ops):
        if isinstance(op, SwapHalves) and not op.transposed:
            return (*ops[:index], Move(op.source, op.dest), *ops[index + 1 :])
    return None


add("weight map with exchanged names", mapped(_names_exchanged))
add("weight map with exchanged experts", mapped(_entries_exchanged))
add("weight map with exchanged rows", mapped(_rows_exchanged))
add("weight map without the swap of halves", mapped(_not_swapped_back))


# ---- ties and wiring -------------------------------------------------------------------------------------------------------
def _tie_split(place: Place) -> bool:
    counts: dict[int, int] = {}
    for module in place.applied.model.modules():
        for parameter in module._parameters.values():
            counts[id(parameter)] = counts.get(id(parameter), 0) + (parameter is not None)
    for slot in slots(place.site):
        if counts.get(id(slot.parameter), 0) > 1:
            slot.put(slot.parameter.detach().clone())
            return True
    return False


def _tied_to_another(place: Place) -> bool:
    for slot in slots(place.site, MATRIX):
        for other in place.others.values():
            for candidate in slots(other, MATRIX):
                if candidate.parameter.shape == slot.parameter.shape and candidate.parameter is not slot.parameter:
                    slot.holder._parameters[slot.leaf] = candidate.parameter
                    return True
    return False


def _alike(place: Place) -> tuple[str, nn.Module] | None:
    """Another site that is one module in the tree and takes and gives the same sizes."""
    if fused_record(place.site) is not None:
        return None
    for fqn, other in place.others.items():
        same = [tuple(p.shape) for p in other.parameters()] == [tuple(p.shape) for p in place.site.parameters()]
        if fused_record(other) is None and same and type(other) is type(place.site):
            return fqn, other
    return None


def _sites_exchanged(place: Place) -> bool:
    found = _alike(place)
    if found is None:
        return False
    site, (fqn, other) = place.site, found
    parents = find_parents(place.applied.model)
    for module, new in ((site, other), (other, site)):
        for parent, name in parents[id(module)]:
            parent._modules[name] = new
    place.touched.append(fqn)
    return True


def _used_twice(place: Place) -> bool:
    found = _alike(place)
    if found is None:
        return False
    for parent, name in find_parents(place.applied.model)[id(place.site)]:
        parent._modules[name] = found[1]
    place.touched.append(found[0])
    return True


def _left_out(place: Place) -> bool:
    """The module is skipped where its result has the size of its input."""
    site = place.site
    if fused_record(site) is not None:
        return False
    matrices = slots(site, MATRIX)
    if any(slot.parameter.shape[0] != slot.parameter.shape[1] for slot in matrices):
        return False
    wrap(site, lambda self, right, x: x)
    return True


add("tie split", _tie_split)
add("tied to another weight", _tied_to_another)
add("two sites exchanged", _sites_exchanged)
add("one site used for another", _used_twice)
add("site left out", _left_out)
