"""What a model computes, as work items: products, norms, attention and memory traffic of each site, from a plan's shapes.

A work item is one place that TE takes over (a site, or a fusion with its members), or one that stays as it is.  Shapes are those
of the first recorded scenario.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from te_convert.estimate.kernels import Product
from te_convert.match.fusion import Fusion
from te_convert.plan.model import Decision, Plan
from te_convert.replacements.specs import (
    DotProductAttentionSpec,
    GroupedExpertsSpec,
    LayerNormLinearSpec,
    LayerNormMLPSpec,
    LinearSpec,
    MultiheadAttentionSpec,
    Spec,
    TransformerLayerSpec,
)

_ONE_KERNEL_NORMS = ("LayerNorm", "RMSNorm", "FusedRMSNorm")
_EAGER_ATTENTION_RULE = "eager-attention"


@dataclass(frozen=True)
class Work:
    """The work of one place in one forward.

    Attributes:
        fqn: where; "(rest of X)" for element-wise work of module X outside of any site.
        kind: TE's name of the replacement, else the module's class.
        share: "linear", "experts", "attention", "norm" or "other", for shares of the FLOPs.
        converted: TE computes it after the conversion.
        high: the plan keeps it in high precision under every recipe.
        calls: how often it runs in a forward.
        products: as the original launches them, per call.
        te_products: as TE does (joined), per call.
        norm_elements: elements that norms of it read, per call.
        norm_in_python: the original's norm is several element-wise kernels in float32.
        norm_fused: the norm is part of a TE module with a product.
        activation_elements: outputs of an MLP's activation that TE computes in its fused MLP, per call.
        gated: the activation's other half multiplies it.
        attention_flops: of the two products of attention, per call.
        scores: elements of the score matrix that the original writes to memory, per call; 0 where it is fused there too.
        moved_bytes: element-wise traffic that conversion does not change, per call.
        kernels: element-wise kernels of that traffic.
        other_flops: of convolutions and other products that stay as they are.
    """

    fqn: str
    kind: str
    share: str
    converted: bool = True
    high: bool = False
    calls: int = 1
    products: tuple[Product, ...] = ()
    te_products: tuple[Product, ...] = ()
    norm_elements: float = 0
    norm_in_python: bool = False
    norm_fused: bool = False
    activation_elements: float = 0
    gated: bool = False
    attention_flops: float = 0
    scores: float = 0
    moved_bytes: float = 0
    kernels: float = 0
    other_flops: float = 0

    @property
    def flops(self) -> float:
        """Operations of one forward of the original."""
        return self.calls * (sum(product.flops for product in self.products) + self.attention_flops + self.other_flops)

    @property
    def weights(self) -> int:
        """Elements of the matrices."""
        return sum(product.ins * product.outs for product in self.te_products)

    def scaled(self, factor: float) -> Work:
        """The same with ``factor`` times as many tokens in as many sequences more: their length stays."""

        def rows(products: Iterable[Product]) -> tuple[Product, ...]:
            return tuple(p._replace(rows=max(1, round(p.rows * factor))) for p in products)

        linear = ("norm_elements", "activation_elements", "attention_flops", "scores", "moved_bytes", "other_flops")
        more = {name: getattr(self, name) * factor for name in linear}
        return replace(self, products=rows(self.products), te_products=rows(self.te_products), **more)

    def repeated(self, times: int) -> Work:
        """``times`` such places."""
        return replace(self, calls=self.calls * times)


def find_work(plan: Plan, eager: Iterable[str] = ()) -> tuple[Work, ...]:
    """One item for each place with recorded calls.

    Args:
        plan: with shapes, that is, of a model that was recorded.
        eager: names of attention modules that compute a softmax of their own, where that is known from the recording.
    """
    fusions = {fusion.fqn: fusion for fusion in plan.fusions}
    places: dict[str, list[Decision]] = {}
    for decision in plan.decisions:
        place = decision.fused_into if decision.converts and decision.fused_into in fusions else None
        places.setdefault(decision.fqn if place is None else place, []).append(decision)
    runs = max(len(plan.scenarios), 1)
    found = [_of_place(place, members, fusions.get(place), runs, set(eager)) for place, members in places.items()]
    return tuple(work for work in found if work is not None)


def _of_place(fqn: str, members: Sequence[Decision], fusion: Fusion | None, runs: int, eager: set[str]) -> Work | None:
    first = members[0]
    spec = fusion.spec if fusion is not None else first.spec if first.converts else None
    products = [(d, found) for d in members if (found := _product(d)) is not None]
    shaped = next((d for d in members if d.shapes), None)
    if shaped is None:
        return None
    high = (fusion.precision if fusion is not None else first.precision) == "high"
    work = Work(
        fqn=fqn,
        kind=spec.name if spec is not None else first.class_name,
        share="linear" if products else "other",
        converted=spec is not None,
        high=high,
        calls=_calls(products, shaped, runs),
        products=tuple(product for _, product in products),
    )
    if isinstance(spec, DotProductAttentionSpec) or first.kind == "Attention":
        return _attention(work, first, spec, eager)
    if isinstance(spec, GroupedExpertsSpec):
        return _experts(work, shaped, spec)
    if not products and spec is None and first.flops:
        return replace(work, other_flops=first.flops / work.calls, share="other")
    work = _with_norms(work, members, products)
    if spec is None or fusion is None:
        return work if work.products or work.norm_elements else None
    return _joined(work, spec, fusion, shaped, eager)


def _product(decision: Decision) -> Product | None:
    """The product of a Linear: what its FLOPs are a multiple of."""
    if not decision.flops or not decision.shapes or decision.kind == "Attention":
        return None
    shape = decision.shapes[0]
    if not shape.input or not shape.output or shape.input[:-1] != shape.output[:-1]:
        return None
    product = Product(math.prod(shape.input[:-1]), shape.input[-1], shape.output[-1])
    return product if product.flops and decision.flops % product.flops == 0 else None


def _calls(products: Sequence[tuple[Decision, Product]], shaped: Decision, runs: int) -> int:
    """Calls in the first scenario: from the FLOPs, which are that scenario's, else the average."""
    if products:
        decision, product = products[0]
        return max(1, decision.flops // product.flops)
    return max(1, round(shaped.calls / runs))


def _with_norms(work: Work, members: Sequence[Decision], products: Sequence[tuple[Decision, Product]]) -> Work:
    norms = [d for d in members if d.kind in ("LayerNorm", "RMSNorm") and d.shapes]
    return replace(
        work,
        te_products=work.products,
        share=work.share if products or not norms else "norm",
        norm_elements=float(sum(math.prod(norm.shapes[0].input) for norm in norms)),
        norm_in_python=any(norm.class_name not in _ONE_KERNEL_NORMS for norm in norms),
        norm_fused=bool(norms and products),
    )


def _joined(work: Work, spec: Spec, fusion: Fusion, shaped: Decision, eager: set[str]) -> Work:
    """The products as the TE module has them, and an MLP's activation."""
    rows = work.products[0].rows if work.products else math.prod(shaped.shapes[0].input[:-1])
    if isinstance(spec, LinearSpec | LayerNormLinearSpec):
        return replace(work, te_products=(Product(rows, spec.in_features, spec.out_features),))
    if isinstance(spec, LayerNormMLPSpec):
        gated = fusion.member("gate") is not None or len(work.products) > 2
        up = sum(p.outs for p in work.products) - spec.hidden_size
        return replace(
            work,
            te_products=(Product(rows, spec.hidden_size, up), Product(rows, spec.ffn_hidden_size, spec.hidden_size)),
            activation_elements=rows * spec.ffn_hidden_size if fusion.whole is not None else 0,
            gated=gated or up > spec.ffn_hidden_size,
        )
    if isinstance(spec, MultiheadAttentionSpec | TransformerLayerSpec):
        prefix = f"{fusion.whole}." if fusion.whole else ""
        return _whole(work, spec, shaped, any(name == fusion.whole or name.startswith(prefix) for name in eager))
    return work


def _whole(work: Work, spec: MultiheadAttentionSpec | TransformerLayerSpec, shaped: Decision, eager: bool) -> Work:
    """A block of one TE module: its projections, attention, and the MLP of a layer."""
    shape, hidden = shaped.shapes[0].input, spec.hidden_size
    batch_first = (spec.qkv_format if isinstance(spec, MultiheadAttentionSpec) else spec.attn_input_format) == "bshd"
    rows, length = math.prod(shape[:-1]), shape[-2 if batch_first else 0]
    inner, up = 0, 0
    if isinstance(spec, TransformerLayerSpec):
        inner, up = spec.ffn_hidden_size, spec.ffn_hidden_size * (2 if spec.activation.endswith("glu") else 1)
    apart = sum(product.outs for product in work.products) - hidden - (up + hidden if up else 0)
    joined = [Product(rows, hidden, apart if apart > hidden else 3 * hidden), Product(rows, hidden, hidden)]
    joined += [Product(rows, hidden, up), Product(rows, inner, hidden)] if up else []
    return replace(
        work,
        share="linear",
        products=work.products or tuple(joined),
        te_products=tuple(joined),
        norm_elements=work.norm_elements or (2.0 * rows * hidden if up else 0.0),
        norm_fused=bool(up),
        activation_elements=rows * inner,
        gated=up > inner,
        attention_flops=4.0 * rows * length * hidden,
        scores=float(rows * length * spec.num_attention_heads) if eager else 0.0,
    )


def _attention(work: Work, decision: Decision, spec: Spec | None, eager: set[str]) -> Work:
    query = decision.shapes[0].input
    scores = float(math.prod(query[:-1]) * query[-2])
    width = sum(spec.kv_channels) if isinstance(spec, DotProductAttentionSpec) else 2 * query[-1]
    is_eager = decision.rule == _EAGER_ATTENTION_RULE or decision.fqn in eager
    return replace(work, share="attention", products=(), attention_flops=2 * scores * width, scores=scores if is_eager else 0)


def _experts(work: Work, shaped: Decision, spec: GroupedExpertsSpec) -> Work | None:
    """Experts that are chosen by a router that is known get an equal part of the tokens; of the others, nobody knows how many."""
    if spec.routing is None:
        return None
    tokens = math.prod(shaped.shapes[0].input[:-1]) * spec.routing.top_k
    rows = max(1, tokens // spec.num_gemms)
    up = spec.ffn_hidden_size * (2 if spec.gated else 1)
    one = (Product(rows, spec.hidden_size, up), Product(rows, spec.ffn_hidden_size, spec.hidden_size))
    return replace(work, share="experts", calls=1, products=one * spec.num_gemms, te_products=one * spec.num_gemms)
