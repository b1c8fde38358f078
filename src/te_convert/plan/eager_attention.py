"""Attention that is written out with a softmax and stays so: said, with what stands between the two products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from te_convert.capture.graph import Capture
from te_convert.match.attention_cores import written_cores
from te_convert.match.candidate import Candidate
from te_convert.match.fusion import Fusion
from te_convert.match.readers import is_dropout
from te_convert.plan.model import Decision, Outcome
from te_convert.reasons import ReasonCode, reason


def eager_decisions(
    modules: dict[str, nn.Module],
    capture: Capture,
    candidates: Sequence[Candidate],
    known: Mapping[str, Decision | None],
    fusions: Sequence[Fusion],
) -> dict[str, Decision]:
    """A refusal for each module with a written-out attention that no fusion took and that no rule decided, by name."""
    found: dict[str, tuple[str, ...]] = {}
    for recording in capture.recordings:
        for core in written_cores(recording.graph, lambda node: is_dropout(node, modules)):
            stack = core.output.meta.get("nn_module_stack") or ("",)
            found.setdefault(stack[-1], core.between)
    owners = [fusion.scope for fusion in fusions if fusion.member("owner") is not None]
    sites = {site.fqn: site for site in candidates}
    return {
        fqn: _refusal(sites[fqn], between)
        for fqn, between in found.items()
        if fqn in sites and known.get(fqn) is None and not any(f"{fqn}.".startswith(f"{o}." if o else "") for o in owners)
    }


def _refusal(site: Candidate, between: tuple[str, ...]) -> Decision:
    steps = ", ".join(dict.fromkeys(between)) or "nothing"
    return Decision(
        fqn=site.fqn,
        kind="Attention",
        class_name=type(site.module).__name__,
        outcome=Outcome.REFUSED,
        aliases=site.aliases,
        reasons=(reason(ReasonCode.ATTENTION_EAGER_REGION, f"softmax is written out; between the two products: {steps}"),),
        calls=len(site.calls),
    )
