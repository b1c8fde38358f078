"""Constructor facts of each replacement, without tensors: what a rule decides and a plan stores."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from te_convert.errors import LoadError


@dataclass(frozen=True)
class LinearSpec:
    """``te.Linear``: ``y = x @ weight.T + bias`` with ``weight`` of shape [out_features, in_features]."""

    name: ClassVar[str] = "te.Linear"
    in_features: int
    out_features: int
    bias: bool
    dtype: str


@dataclass(frozen=True)
class LayerNormSpec:
    """``te.LayerNorm`` over the last dimension; computed in float32 and rounded once."""

    name: ClassVar[str] = "te.LayerNorm"
    normalized_shape: int
    eps: float
    zero_centered_gamma: bool
    dtype: str


@dataclass(frozen=True)
class RMSNormSpec:
    """``te.RMSNorm`` over the last dimension; ``weight`` or ``1 + weight`` with ``zero_centered_gamma``."""

    name: ClassVar[str] = "te.RMSNorm"
    normalized_shape: int
    eps: float
    zero_centered_gamma: bool
    dtype: str


@dataclass(frozen=True)
class LayerNormLinearSpec:
    """``te.LayerNormLinear``: a norm and the Linears that read it, as one matrix ``weight`` [out_features, in_features].

    ``normalization`` is "LayerNorm" or "RMSNorm".
    """

    name: ClassVar[str] = "te.LayerNormLinear"
    in_features: int
    out_features: int
    bias: bool
    eps: float
    normalization: str
    zero_centered_gamma: bool
    dtype: str


@dataclass(frozen=True)
class LayerNormMLPSpec:
    """``te.LayerNormMLP``: norm, fc1, activation, fc2; ``fc1_weight`` has 2 * ffn_hidden_size rows for a gated activation."""

    name: ClassVar[str] = "te.LayerNormMLP"
    hidden_size: int
    ffn_hidden_size: int
    bias: bool
    eps: float
    normalization: str
    activation: str
    zero_centered_gamma: bool
    dtype: str


@dataclass(frozen=True)
class DotProductAttentionSpec:
    """``te.DotProductAttention``: softmax(scale * q @ k.T + bias + mask) @ v in the layout "bshd".

    ``softmax_scale`` None means 1 / sqrt(head size), ``softcap`` 0 none.  Mask type and window are given with each call, and the
    bias of the scores where ``bias`` is True.  It has no weights but for ``softmax_type`` "learnable", which adds a sink [heads]
    to the sum below.
    """

    name: ClassVar[str] = "te.DotProductAttention"
    num_attention_heads: int
    kv_channels: tuple[int, int]
    num_gqa_groups: int
    softmax_scale: float | None
    attention_dropout: float
    dtype: str
    softcap: float = 0.0
    bias: bool = False
    softmax_type: str = "vanilla"

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_channels", tuple(self.kv_channels))


@dataclass(frozen=True)
class Routing:
    """How a mixture whose experts are modules chooses among them.

    Attributes:
        gate: name of the module inside the mixture that computes the logits.
        router: name in facts/routers.py.
        top_k: experts of a token.
        dims: dimensions of the mixture's input.
        flat: the gate gets it as [tokens, hidden].
        logits: the mixture returns (output, logits).
        eval_only: in training mode it computes something else (noise).
    """

    gate: str
    router: str
    top_k: int
    dims: int
    flat: bool
    logits: bool
    eval_only: bool


@dataclass(frozen=True)
class GroupedExpertsSpec:
    """Two ``te.GroupedLinear``, ``fc1`` and ``fc2``, with an activation between: the experts of a mixture.

    ``activation`` is a name of facts/activations.py; with ``gated`` it applies to the first half of fc1's output, the second
    half multiplies.  Each expert's rows are padded to ``row_multiple``, which is what the recipe needs.  ``routing`` is that of
    experts which are modules; None where the caller of stacked experts chooses.
    """

    name: ClassVar[str] = "te.GroupedLinear"
    num_gemms: int
    hidden_size: int
    ffn_hidden_size: int
    gated: bool
    activation: str
    row_multiple: int
    dtype: str
    routing: Routing | None = None

    def __post_init__(self) -> None:
        if isinstance(self.routing, dict):  # as JSON has it
            object.__setattr__(self, "routing", Routing(**self.routing))


@dataclass(frozen=True)
class MultiheadAttentionSpec:
    """``te.MultiheadAttention`` with one fused projection [q; k; v] ("self"), or queries apart from [k; v] ("cross")."""

    name: ClassVar[str] = "te.MultiheadAttention"
    hidden_size: int
    num_attention_heads: int
    attention_dropout: float
    bias: bool
    attention_type: str
    qkv_format: str
    dtype: str


@dataclass(frozen=True)
class TransformerLayerSpec:
    """``te.TransformerLayer``, pre-norm, or post-norm with ``post_layernorm``; ``layer_type`` "encoder" or "decoder"."""

    name: ClassVar[str] = "te.TransformerLayer"
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    eps: float
    bias: bool
    activation: str
    normalization: str
    zero_centered_gamma: bool
    post_layernorm: bool
    parallel_attention_mlp: bool
    layer_type: str
    attn_input_format: str
    self_attn_mask_type: str
    dtype: str


Spec = (
    LinearSpec
    | LayerNormSpec
    | RMSNormSpec
    | LayerNormLinearSpec
    | LayerNormMLPSpec
    | DotProductAttentionSpec
    | GroupedExpertsSpec
    | MultiheadAttentionSpec
    | TransformerLayerSpec
)
SPECS: dict[str, type[Spec]] = {
    spec.name: spec
    for spec in (
        LinearSpec,
        LayerNormSpec,
        RMSNormSpec,
        LayerNormLinearSpec,
        LayerNormMLPSpec,
        DotProductAttentionSpec,
        GroupedExpertsSpec,
        MultiheadAttentionSpec,
        TransformerLayerSpec,
    )
}


WHOLE = (LayerNormMLPSpec, MultiheadAttentionSpec, TransformerLayerSpec)
"""Specs whose module takes the place of the module that it replaces; the others are registered beside their members."""


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` → ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` → ``torch.bfloat16``.

    Raises:
        LoadError: not the name of a torch dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(f"unknown dtype {name!r}", "the plan was written by another version or edited")
    return dtype


def spec_to_dict(spec: Spec) -> dict[str, Any]:
    """The spec as plain JSON values, with its TE name under ``"module"``."""
    return {"module": spec.name, **asdict(spec)}


def spec_from_dict(data: dict[str, Any]) -> Spec:
    """The inverse of :func:`spec_to_dict`.

    Raises:
        LoadError: an unknown module name or fields that do not fit.
    """
    fields = dict(data)
    name = fields.pop("module", None)
    if name not in SPECS:
        raise LoadError(f"the plan names an unknown replacement {name!r}", "use the te_convert version that wrote it")
    try:
        return SPECS[name](**fields)
    except TypeError as error:
        raise LoadError(f"the plan's {name} has wrong fields: {error}", "use the te_convert version that wrote it") from None
