"""Attention modules of Transformers models: found by what they called, with what all their calls have in common."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from te_convert.capture.attention import AttentionCall
from te_convert.capture.graph import Capture
from te_convert.facts.attention import (
    BIAS,
    DIRECT,
    SINK,
    AttentionFacts,
    base_implementation,
    compared_names,
    is_bias_shape,
    is_understood,
    own_function,
    probe_attention,
)
from te_convert.facts.stand_in import ProbeError
from te_convert.match.candidate import Candidate
from te_convert.reasons import Reason, ReasonCode, reason

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SAME_SCALE = 1e-6


@dataclass(frozen=True)
class AttentionSite:
    """A module that calls an attention function, and the Transformers models that it is part of.

    Attributes:
        site: the module with what was observed.
        calls: its calls of attention functions over all scenarios.
        owners: the enclosing Transformers models, outermost first.
        obstacle: why a module that calls torch's function itself cannot be made to call another, or "".
    """

    site: Candidate
    calls: tuple[AttentionCall, ...]
    owners: tuple[nn.Module, ...]
    obstacle: str = ""

    @property
    def implementation(self) -> str:
        """Transformers' own name of the implementation in use."""
        return base_implementation(self.calls[0].implementation)

    @property
    def dropout(self) -> float:
        """The probability that is used in training."""
        return max(float(call.dropout) for call in self.calls)

    @property
    def is_biased(self) -> bool:
        """Every call brings a bias of the scores; else a call that brings one runs the original."""
        calls = [call for call in self.calls if _has_heads(call)]
        return bool(calls) and all(call.bias is not None and _fits(call, call.bias) for call in calls)

    @property
    def sink(self) -> str:
        """Name of the module's parameter [heads] that all calls bring as sinks, or ""."""
        names = {call.sink for call in self.calls}
        parameter = self.site.module._parameters.get(next(iter(names))) if len(names) == 1 else None
        fits = parameter is not None and parameter.shape == (self.calls[0].query[1],) and parameter.is_floating_point()
        return self.calls[0].sink if fits else ""

    @property
    def known(self) -> frozenset[str]:
        """Names of tensors that all calls bring and that the replacement takes."""
        return frozenset({*([BIAS] if self.is_biased else []), *([SINK] if self.sink else [])})


def find_attention(modules: dict[str, nn.Module], capture: Capture, candidates: Iterable[Candidate]) -> dict[str, AttentionSite]:
    """Every module that called an attention function of Transformers, by name."""
    calls: dict[str, list[AttentionCall]] = {}
    for recording in capture.recordings:
        for call in recording.attention:
            calls.setdefault(call.fqn, []).append(call)
    by_name = {site.fqn: site for site in candidates} if calls else {}
    return {fqn: AttentionSite(by_name[fqn], tuple(found), _owners(modules, fqn)) for fqn, found in calls.items() if fqn in by_name}


def _owners(modules: dict[str, nn.Module], fqn: str) -> tuple[nn.Module, ...]:
    common: Any = sys.modules.get("transformers.modeling_utils")
    parts = fqn.split(".") if fqn else []
    enclosing = [modules[".".join(parts[:count])] for count in range(len(parts) + 1)]
    return tuple(module for module in enclosing if isinstance(module, common.PreTrainedModel))


def check_attention(found: AttentionSite) -> tuple[AttentionFacts | None, tuple[Reason, ...]]:
    """What the calls have in common (None when they disagree), and every reason against the replacement."""
    facts, problem = _facts(found)
    direct = found.implementation == DIRECT
    reasons = [*([] if direct else _check_model(found)), *_check_calls(found)]
    if found.obstacle:
        reasons.append(reason(ReasonCode.ATTENTION_NOT_SWITCHABLE, found.obstacle))
    if facts is None:
        return None, (*reasons, reason(ReasonCode.ATTENTION_CALLS_DIFFER, problem))
    if not reasons and not direct:
        reasons += _check_function(found, facts)
    return facts, tuple(reasons)


def _check_model(found: AttentionSite) -> list[Reason]:
    """Can the implementation be exchanged at all?"""
    names = {call.implementation for call in found.calls}
    if len(names) > 1 or found.implementation not in ("sdpa", "eager"):
        return [reason(ReasonCode.ATTENTION_IMPLEMENTATION, f"it is {', '.join(map(repr, sorted(names)))}")]
    config = getattr(found.site.module, "config", None)
    if not found.owners or getattr(config, "_attn_implementation", None) not in names:
        return [reason(ReasonCode.ATTENTION_NOT_SWITCHABLE, "its implementation does not come from the model's config")]
    owner: Any = found.owners[-1]
    reasons = []
    if not _is_switchable(type(owner)):
        reasons.append(reason(ReasonCode.ATTENTION_NOT_SWITCHABLE, f"{type(owner).__name__} says so"))
    if found.implementation == "sdpa" and not getattr(owner, "_supports_sdpa", False):
        reasons.append(reason(ReasonCode.ATTENTION_NO_SDPA, f"{type(owner).__name__}._supports_sdpa is False"))
    for file in dict.fromkeys(type(module).__module__ for module in (found.site.module, *found.owners)):
        if found.implementation in _compared(file):
            reasons.append(reason(ReasonCode.ATTENTION_NAME_COMPARED, f"{file} compares it with {found.implementation!r}"))
    return reasons


def _is_switchable(cls: Any) -> bool:
    common: Any = sys.modules["transformers.modeling_utils"]
    changed = [
        name
        for name in ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation")
        if getattr(cls, name, None) is not getattr(common.PreTrainedModel, name, None)
    ]
    can = getattr(cls, "_can_set_attn_implementation", None)
    return not changed and (can is None or bool(can()))


@lru_cache(maxsize=256)
def _compared(file: str) -> frozenset[str]:
    try:
        return compared_names(inspect.getsource(sys.modules[file]))
    except (OSError, TypeError, KeyError):
        return frozenset()


def _check_calls(found: AttentionSite) -> list[Reason]:
    """Refused only when no recorded call could run on TE because of its arguments; a single one falls back by itself."""
    problems = [_problem(call, found.known) for call in found.calls]
    if all(problems):
        return [reason(ReasonCode.ATTENTION_EXTRA_INPUTS, problems[0])]
    dtypes = {str(call.dtype).removeprefix("torch.") for call in found.calls if call.dtype not in _DTYPES}
    return [reason(ReasonCode.DTYPE_UNSUPPORTED, f"queries are {', '.join(sorted(dtypes))}")] if dtypes else []


def _problem(call: AttentionCall, known: frozenset[str]) -> str:
    if call.positional > 5 or not _has_heads(call):
        return f"{call.positional} positional arguments, queries of {len(call.query)} dimensions"
    if call.key[1] != call.value[1]:
        return f"{call.key[1]} heads of keys and {call.value[1]} of values"
    return is_understood(call.function, tuple(name for name in call.tensors if name not in known), dict(call.options))


def _fits(call: AttentionCall, bias: tuple[int, ...]) -> bool:
    return is_bias_shape(bias, (*call.query[:3], call.key[2]))


def _has_heads(call: AttentionCall) -> bool:
    return all(len(shape) == 4 for shape in (call.query, call.key, call.value))


def _facts(found: AttentionSite) -> tuple[AttentionFacts | None, str]:
    seen: set[AttentionFacts] = set()
    for call in found.calls:
        options, width = dict(call.options), call.query[-1]
        scale = 1.0 / math.sqrt(width) if call.scaling is None else call.scaling
        if not isinstance(scale, int | float) or not isinstance(call.dropout, int | float):
            return None, "the scale or the dropout is no number"
        shapes = (call.query[1], call.key[1], (width, call.value[-1]))
        seen.add(AttentionFacts(*shapes, float(scale), float(options.get("softcap") or 0.0), found.is_biased, found.sink))
    dropouts = {float(call.dropout) for call in found.calls} - {0.0}
    if found.implementation == DIRECT:  # Transformers repeats keys and values in some calls and not in others
        groups = max(facts.groups for facts in seen)
        seen = {replace(facts, groups=groups if groups % facts.groups == 0 else facts.groups) for facts in seen}
    if len(seen) > 1 or len(dropouts) > 1:
        return None, f"{len(seen)} combinations of heads, sizes, scale and softcap, {len(dropouts)} of dropout"
    facts = next(iter(seen))
    return (facts, "") if facts.heads % facts.groups == 0 else (None, f"{facts.heads} heads over {facts.groups} groups")


def softmax_scale(facts: AttentionFacts) -> float | None:
    """The scale as TE takes it: None for its default."""
    default = 1.0 / math.sqrt(facts.channels[0])
    return None if abs(facts.scale - default) <= _SAME_SCALE * default else facts.scale


def _check_function(found: AttentionSite, facts: AttentionFacts) -> list[Reason]:
    call = next(call for call in found.calls if not _problem(call, found.known))
    function = own_function(type(found.site.module), found.implementation)
    same = function is call.function or call.implementation != found.implementation
    if function is None or not same:
        return [reason(ReasonCode.ATTENTION_NOT_RECOGNISED, "the function that was called cannot be found again")]
    try:
        probe_attention(function, found.site.module, facts, found.implementation, dict(call.options))
    except ProbeError as error:
        return [reason(ReasonCode.ATTENTION_NOT_RECOGNISED, str(error))]
    return []
