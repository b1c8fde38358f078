"""Shared by the norm rules: recognition by probe, and the reasons that a recognised norm can still have."""

from __future__ import annotations

import torch
from torch import nn

from te_convert.facts.norm_formula import NormFacts
from te_convert.facts.norms import NotANorm, probe_norm_cached
from te_convert.match.candidate import Candidate
from te_convert.reasons import Reason, ReasonCode, reason

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def probe_norm_site(site: Candidate) -> NormFacts | NotANorm:
    """What the site's module computes; identical modules are probed once."""
    dtype = next(iter(site.input_dtypes), None) or site.dtype
    return probe_norm_cached(site.module, site.probe_cache, width=site.width, dtype=dtype)


def norm_miss(site: Candidate, kind: str) -> str:
    """Why the site is no norm of the kind, in words."""
    facts = probe_norm_site(site)
    if not isinstance(facts, NormFacts):
        return facts.detail
    return "" if facts.kind == kind else f"it computes what {facts.kind} does"


def declared_norm_reasons(site: Candidate) -> tuple[Reason, ...]:
    """Refusals that torch's own norm classes state themselves: several dimensions, no weight."""
    module = site.module
    if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return ()
    reasons = []
    if len(module.normalized_shape) > 1:
        reasons.append(reason(ReasonCode.NORM_MULTI_DIM, f"normalized_shape is {tuple(module.normalized_shape)}"))
    if not module.elementwise_affine:
        reasons.append(reason(ReasonCode.NORM_NO_AFFINE, "elementwise_affine=False"))
    return tuple(reasons)


def norm_reasons(site: Candidate, facts: NormFacts) -> tuple[Reason, ...]:
    """Refusals and advices of a recognised norm."""
    reasons = []
    if facts.weight is None:
        reasons.append(reason(ReasonCode.NORM_NO_AFFINE, "the norm has no weight"))
    low = site.dtype in _LOW_PRECISION
    changed = [call for call in site.calls if call.output_dtype is not None and call.output_dtype != call.dtype]
    if changed:
        reasons.append(reason(ReasonCode.NORM_OUTPUT_DTYPE, f"{changed[0].dtype} in, {changed[0].output_dtype} out"))
    elif low and not facts.keeps_dtype:
        reasons.append(reason(ReasonCode.NORM_OUTPUT_DTYPE, f"{site.dtype} in, another dtype out"))
    if low and facts.rounding == "before-weight":
        reasons.append(reason(ReasonCode.NORM_ROUNDING, f"casts to {site.dtype} before multiplying by the weight"))
    return tuple(reasons)
