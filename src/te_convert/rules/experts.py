"""Experts with stacked weights  ->  two te.GroupedLinear; the router stays.

    y[t] = sum_k w[t, k] * W2[e] @ act(W1[e] @ x[t]),  e = index[t, k]        W1 [experts, rows, hidden], W2 [experts, hidden, ffn]

``weight{e}`` of the grouped modules are views of the stacked tensors.  Experts that are modules of their own are called by code
that is not known here: their Linears are converted one by one.
"""

from __future__ import annotations

from te_convert.capture.graph import ModuleCall
from te_convert.facts.experts import ExpertsFacts, argument_names, looks_like_experts, probe_experts
from te_convert.match.blocks import Block
from te_convert.match.fusion import Fusion, Member
from te_convert.match.groups import Found
from te_convert.match.guards import BEFORE_PROBES, executed, one_dtype, te_dtype
from te_convert.reasons import Reason, ReasonCode, reason
from te_convert.replacements.specs import GroupedExpertsSpec, dtype_name
from te_convert.rules.base import BlockRule
from te_convert.weights.ops import Take, WeightMap


class ExpertsRule(BlockRule):
    """One module with the stacked weights of all experts."""

    id = "experts"

    def looks_like(self, block: Block) -> bool:
        """Two stacked parameters."""
        return looks_like_experts(block.site.module)

    def propose(self, block: Block) -> Found:
        """A fusion when the probe knows the formula."""
        site = block.site
        guards = (*BEFORE_PROBES, te_dtype, one_dtype, executed)
        refusals = [found for guard in guards if (found := guard(site)) is not None and not found.is_advice]
        if site.ties:  # each entry becomes a Parameter of its own, which another holder of the stack would not see
            name, others = next(iter(site.ties.items()))
            refusals.append(reason(ReasonCode.PARAMETER_TIED_LAYOUT, f"{name} is also {', '.join(others)}"))
        facts = None if refusals else _recognise(block)
        if isinstance(facts, Reason):
            refusals.append(facts)
        if refusals or not isinstance(facts, ExpertsFacts):
            return Found(advices={site.fqn: tuple(refusals)})
        assert site.dtype is not None
        prefix = f"{site.fqn}." if site.fqn else ""
        spec = GroupedExpertsSpec(
            num_gemms=facts.experts,
            hidden_size=facts.hidden_size,
            ffn_hidden_size=facts.ffn_hidden_size,
            gated=facts.gated,
            activation=facts.activation,
            row_multiple=1 if site.alignment is None else site.alignment.rows,
            dtype=dtype_name(site.dtype),
        )
        ops = [
            Take(source, f"{dest}.weight{index}", index, facts.experts)
            for source, dest in ((facts.fc1, "fc1"), (facts.fc2, "fc2"))
            for index in range(facts.experts)
        ]
        member = Member("experts", site.fqn)
        return Found(
            (
                Fusion(
                    f"{prefix}grouped",
                    site.fqn,
                    self.id,
                    (member,),
                    spec,
                    WeightMap(tuple(ops)),
                    block.precision(facts.hidden_size, facts.ffn_hidden_size),
                ),
            )
        )


def _in_order(block: Block, call: ModuleCall, shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Shapes of a call's tensors in the order of the signature, whatever the order of its keywords was."""
    names = argument_names(type(block.site.module))[call.n_positional :]
    named = dict(zip(call.keywords, shapes[call.n_positional :], strict=False))
    if len(shapes) != call.n_positional + len(call.keywords) or not named.keys() <= set(names):
        return shapes
    return (*shapes[: call.n_positional], *[named[name] for name in names if name in named])


def _recognise(block: Block) -> ExpertsFacts | Reason:
    calls = [_in_order(block, call, shapes) for call, shapes in zip(block.site.calls, block.tensor_calls(), strict=True)]
    shapes = {tuple(shape) for call in calls for shape in call}
    if not calls or any(len(call) != 3 or len(call[0]) != 2 or len(call[1]) != 2 for call in calls):
        return reason(ReasonCode.MOE_FORM, f"called with tensors of shapes {sorted(shapes)}, not (tokens, indices, weights)")
    if block.is_meta:
        return reason(ReasonCode.MOE_FORM, "its weights are on the meta device, so its formula was not probed")
    facts = block.cached(lambda module: probe_experts(module, calls[0][1][-1]))
    return facts if isinstance(facts, ExpertsFacts) else reason(ReasonCode.MOE_FORM, facts.detail)
