"""Modules whose forward calls torch's scaled_dot_product_attention, by itself or through a helper function, once per call."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Container, Iterable
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from te_convert.capture.attention import AttentionCall
from te_convert.capture.graph import Capture, Recording
from te_convert.facts.attention import DIRECT, calls_itself, with_heads
from te_convert.match.attention import AttentionSite
from te_convert.match.candidate import Candidate

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def find_direct_attention(
    modules: dict[str, nn.Module], capture: Capture, candidates: Iterable[Candidate], through_interface: Container[str] = ()
) -> dict[str, AttentionSite]:
    """Every module outside torch itself that called the function, and what keeps its forward from being redirected.

    Modules that called it through Transformers' attention interface are not among them, but for those named.
    """
    calls: dict[str, list[AttentionCall]] = {}
    unfit: set[str] = set()
    for recording in capture.recordings:
        told = {call.fqn for call in recording.attention if call.fqn not in through_interface}
        counts, ran = Counter[str](), recording.call_counts()
        for node in recording.graph.nodes:
            stack = tuple(node.meta.get("nn_module_stack") or ())
            if node.target is not F.scaled_dot_product_attention or not stack or stack[-1] in told:
                continue
            call = _call(node, str(stack[-1]), modules, recording)
            if call is not None:
                calls.setdefault(call.fqn, []).append(call)
            counts[str(stack[-1])] += 1
        unfit |= {fqn for fqn, count in counts.items() if count != ran[fqn]}
    by_name = {site.fqn: site for site in candidates} if calls else {}
    return {
        fqn: AttentionSite(by_name[fqn], tuple(found), (), _obstacle(fqn, modules[fqn], unfit, calls))
        for fqn, found in calls.items()
        if fqn in by_name and not type(modules[fqn]).__module__.startswith("torch.")
    }


def _obstacle(fqn: str, module: nn.Module, unfit: Iterable[str], callers: Iterable[str]) -> str:
    """Why the module's calls could not be told apart or be redirected, or ""."""
    if fqn in unfit:
        return "it calls the function several times"
    if "forward" in module.__dict__ or not inspect.isfunction(type(module).forward):
        return "its forward was replaced"
    prefix = f"{fqn}." if fqn else ""
    inside = next((other for other in callers if other != fqn and other.startswith(prefix)), None)
    if inside is not None and not calls_itself(type(module).forward):
        return f"a helper function calls scaled_dot_product_attention, and so does {inside} inside it"
    return ""


def _call(node: fx.Node, fqn: str, modules: dict[str, nn.Module], recording: Recording) -> AttentionCall | None:
    given = dict(zip(_NAMES, node.args, strict=False)) | dict(node.kwargs)
    metas = [value.meta.get("tensor_meta") if isinstance(value, fx.Node) else None for value in map(given.get, _NAMES[:3])]
    if any(meta is None for meta in metas):
        return None
    query, key, value = (with_heads(tuple(meta.shape)) for meta in metas if meta is not None)
    dtype: Any = metas[0].dtype if metas[0] is not None else None
    return AttentionCall(
        fqn=fqn,
        implementation=DIRECT,
        function=F.scaled_dot_product_attention,
        query=query,
        key=key,
        value=value,
        dtype=dtype,
        scaling=given.get("scale"),
        dropout=given.get("dropout_p") or 0.0,
        training=bool(recording.scenario.training) if recording.scenario.training is not None else modules[fqn].training,
        tensors=(),
        options=(("is_causal", bool(given.get("is_causal"))),),
        positional=3,
    )
