"""A mixture whose experts are modules of their own  ->  two te.GroupedLinear beside them; the gate and the mixture stay.

    y[t] = sum_k w[t, k] * expert_e(x[t]),  (w, e) = top-k and softmax of gate(x)

Proved on a copy with random weights (facts/mixture.py).  ``fc1.weight{e}`` is [gate; up] of expert e, or its fc1.
"""

from __future__ import annotations

from te_convert.facts.experts import NotExperts
from te_convert.facts.mixture import MixtureFacts, probe_mixture
from te_convert.match.blocks import Block
from te_convert.match.fusion import Fusion, Member
from te_convert.match.groups import Found
from te_convert.match.mixtures import NAME, Mixture, find_mixture, linears_of, mixture_obstacles
from te_convert.reasons import ReasonCode, reason
from te_convert.replacements.specs import GroupedExpertsSpec, Routing, dtype_name
from te_convert.rules.base import BlockRule
from te_convert.weights.ops import Concat, Move, WeightMap, WeightOp


class ExpertModulesRule(BlockRule):
    """A module with a list of expert modules and a gate that has a row for each."""

    id = "expert-modules"

    def looks_like(self, block: Block) -> bool:
        """A list of two or more modules of one class, two or three Linears in each, and a gate."""
        return find_mixture(block.site.module) is not None

    def propose(self, block: Block) -> Found:
        """A fusion when the probe knows the forward."""
        mixture, site = find_mixture(block.site.module), block.site
        assert mixture is not None
        refusals = [*mixture_obstacles(block, mixture)]
        facts = None if refusals else _recognise(block, mixture)
        if isinstance(facts, NotExperts):
            refusals.append(reason(ReasonCode.MOE_FORWARD, facts.detail))
        elif facts is not None and facts.eval_only and site.module.training:
            refusals.append(
                reason(ReasonCode.MOE_FORWARD, "in training mode, in which it was recorded, it computes something else")
            )
        if refusals or not isinstance(facts, MixtureFacts):
            return Found(advices={site.fqn: tuple(refusals)})
        prefix = f"{site.fqn}." if site.fqn else ""
        spec, weights = _spec(block, mixture, facts), _weights(mixture, facts)
        precision = block.precision(spec.hidden_size, spec.ffn_hidden_size)
        return Found((Fusion(f"{prefix}{NAME}", site.fqn, self.id, _members(block, mixture), spec, weights, precision),))


def _recognise(block: Block, mixture: Mixture) -> MixtureFacts | NotExperts:
    dims = len(block.site.calls[0].input_shape or ())
    return block.cached_deep(lambda: probe_mixture(block.site.module, mixture.container, mixture.gate, dims))


def _spec(block: Block, mixture: Mixture, facts: MixtureFacts) -> GroupedExpertsSpec:
    second, dims = linears_of(mixture.experts[0])[facts.expert.second], len(block.site.calls[0].input_shape or ())
    return GroupedExpertsSpec(
        num_gemms=len(mixture.experts),
        hidden_size=second.out_features,
        ffn_hidden_size=second.in_features,
        gated=len(facts.expert.first) > 1,
        activation=facts.expert.activation,
        row_multiple=1 if block.site.alignment is None else block.site.alignment.rows,
        dtype=dtype_name(second.weight.dtype),
        routing=Routing(mixture.gate, facts.router, facts.top_k, dims, facts.flat, facts.logits, facts.eval_only),
    )


def _weights(mixture: Mixture, facts: MixtureFacts) -> WeightMap:
    ops: list[WeightOp] = []
    for index, expert in enumerate(mixture.experts):
        prefix = f"{mixture.container}.{index}."
        first = tuple(f"{prefix}{name}.weight" for name in facts.expert.first)
        rows = tuple(linears_of(expert)[name].out_features for name in facts.expert.first)
        dest = f"fc1.weight{index}"
        ops.append(Move(first[0], dest) if len(first) == 1 else Concat(first, dest, rows))
    ops += [Move(f"{mixture.container}.{e}.{facts.expert.second}.weight", f"fc2.weight{e}") for e in range(len(mixture.experts))]
    return WeightMap(tuple(ops))


def _members(block: Block, mixture: Mixture) -> tuple[Member, ...]:
    """The mixture and everything inside but the gate: a part that is replaced or hooked later ends the fusion."""
    prefix, gate = f"{block.site.fqn}." if block.site.fqn else "", mixture.gate
    names = [name for name, _ in block.site.module.named_modules() if name and name != gate and not name.startswith(f"{gate}.")]
    return (Member("mixture", block.site.fqn), *(Member("part", prefix + name) for name in names))
